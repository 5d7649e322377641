//! Everything put together: connect, agree, make base transfers and encryption keys, and run the steps of
//! [`crate::protocol`] and [`crate::matmul`] with the keys, plans and supplies of one session.

use crate::error::{Error, Result};
use crate::matmul::single::{self, CostModel, Matrix, Plan, Shape};
use crate::matmul::triples::EncryptedTriples;
use crate::matmul::{BatchedPlan, BatchedShape, Conditions, Encryption, ExpertWeights, batched, shared};
use crate::net::identity::{Identity, Trust};
use crate::net::shaped::{Link, ShapedPipe};
use crate::net::{Channel, Limits, Pipe, tcp, tls};
use crate::ot::{
    BaseKind, ExtendedOt, GroupBits, OtConfig, OtCounts, OtKind, OtSupply, ReceivedPads, ReceivedPads16, SentPads,
};
use crate::party::{Party, Role, TripleSupply, Triples};
use crate::protocol;
use crate::random::SecretRng;
use crate::rlwe::{Automorphism, params};
use crate::session::{self, Session, Terms, TransferKind};
use sha2::{Digest, Sha256};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How the link is protected.
pub enum Security {
    /// TLS 1.3, both parties authenticated.
    Tls {
        /// Our key and certificate.
        identity: Identity,
        /// Whom we accept.
        trust: Trust,
    },
    /// No protection, on the loopback interface only: for tests and measurements.
    InsecureLoopback,
}

/// What a party brings to a session.
pub struct Settings {
    /// How the link is protected.
    pub security: Security,
    /// What both parties must agree on.
    pub terms: Terms,
    /// How long a peer may take.
    pub limits: Limits,
    /// A slower link to imitate, for measurements.
    pub shaped: Option<Link>,
    /// Threads that work for this party.
    pub threads: usize,
    /// What the plans of products assume of the link. Public, and the same at both parties.
    pub conditions: Conditions,
    /// Seconds of one round, for the choice between protocols. Public, and the same at both parties.
    pub round_seconds: f64,
}

impl Settings {
    /// The defaults of this build: a local network, SoftSpoken transfers, every core.
    pub fn new(security: Security) -> Self {
        // Builds from different sources may compute differently although they speak alike: tables, plans, roundings.
        let table = format!("{:?} {:?} {}", params::PRIMES, params::SECURITY, env!("CLOISTER_CORE_SOURCES"));
        let table: [u8; 32] = Sha256::digest(table).into();
        let primes = params::PRIMES.iter().map(|&q| u64::from(q)).collect();
        let flood = (params::FLOODED_COEFFICIENTS_LOG2 + params::FLOOD_SECURITY_BITS) as u16;
        Self {
            security,
            terms: Terms::new(table, primes, flood, [0; 32]),
            limits: Limits::default(),
            shaped: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            // A gigabit a second: slower than the LAN of the figures, so that plans save bytes where that costs little.
            conditions: Conditions { bytes_per_second: 125e6, cores: 2.0 },
            round_seconds: protocol::Link::LAN.round_seconds,
        }
    }

    /// Chooses the transfers by name.
    pub fn set_transfers(&mut self, name: &str) -> Result<()> {
        self.terms.transfers = match name {
            "softspoken1" => TransferKind::SoftSpoken1,
            "softspoken2" => TransferKind::SoftSpoken2,
            "softspoken4" => TransferKind::SoftSpoken4,
            "softspoken8" => TransferKind::SoftSpoken8,
            "silent" => TransferKind::Silent,
            other => return Err(Error::Unsupported(format!("there is no kind of transfers called {other:?}"))),
        };
        Ok(())
    }

    /// Rests the transfers on ML-KEM-768, which is safe against quantum computers, or on elliptic curves.
    pub fn set_post_quantum(&mut self, wanted: bool) {
        self.terms.base = if wanted { session::BaseKind::MlKem768 } else { session::BaseKind::Ristretto };
    }

    /// Imitates a slower link, and plans for it.
    pub fn imitate_link(&mut self, bits_per_second: f64, delay_seconds: f64) {
        let one_way = Duration::from_secs_f64(delay_seconds.clamp(0.0, 60.0));
        self.shaped = Some(Link { bits_per_second, one_way });
        self.round_seconds = 2.0 * one_way.as_secs_f64();
        self.conditions.bytes_per_second = bits_per_second / 8.0;
    }

    fn transfers(&self) -> Result<OtConfig> {
        let base = match self.terms.base {
            session::BaseKind::Ristretto => BaseKind::Ristretto,
            session::BaseKind::MlKem768 => BaseKind::MlKem768,
        };
        let group = |bits| Ok(OtConfig { base, kind: OtKind::SoftSpoken(GroupBits::new(bits)?) });
        match self.terms.transfers {
            TransferKind::SoftSpoken1 => group(1),
            TransferKind::SoftSpoken2 => group(2),
            TransferKind::SoftSpoken4 => group(4),
            TransferKind::SoftSpoken8 => group(8),
            TransferKind::Silent => Ok(OtConfig { base, kind: OtKind::Silent }),
        }
    }
}

/// One party of a session, ready to compute.
pub struct Engine {
    /// What the protocol steps take.
    pub party: Party,
    /// The keys of this session.
    pub encryption: Encryption,
    rotations: Vec<Automorphism>,
    transfers: Shared<ExtendedOt>,
    triples: Shared<EncryptedTriples>,
    conditions: Conditions,
    /// What the choice between protocols assumes of the link.
    pub link: protocol::Link,
}

/// A supply that the party's steps and the preprocessing both reach.
struct Shared<T>(Arc<Mutex<T>>);

impl<T> Shared<T> {
    fn new(inner: T) -> (Self, Self) {
        let shared = Arc::new(Mutex::new(inner));
        (Self(shared.clone()), Self(shared))
    }

    fn get(&self) -> Result<MutexGuard<'_, T>> {
        // A panic while a supply was in use leaves it in an unknown state: correlations could repeat.
        self.0.lock().map_err(|_| Error::SessionOver)
    }
}

impl OtSupply for Shared<ExtendedOt> {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        self.get()?.send(channel, n)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        self.get()?.receive(channel, n)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        self.get()?.send16(channel, n)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        self.get()?.receive16(channel, n)
    }
}

impl TripleSupply for Shared<EncryptedTriples> {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        self.get()?.triples(channel, n)
    }
}

/// Before the keys are there, nothing can be multiplied.
struct NoTriples;

impl TripleSupply for NoTriples {
    fn triples(&mut self, _: &mut Channel, _: usize) -> Result<Triples> {
        Err(Error::Unsupported("the session has no keys yet".into()))
    }
}

/// Connects to a server and sets the session up.
pub fn connect(host: &str, port: u16, settings: Settings) -> Result<Engine> {
    let stream = tcp::connect((host, port), &settings.limits)?;
    let pipe: Box<dyn Pipe> = match &settings.security {
        Security::Tls { identity, trust } => Box::new(tls::connect(stream, identity, trust, &settings.limits)?),
        Security::InsecureLoopback => Box::new(tcp::insecure_plain_loopback(stream, &settings.limits)?),
    };
    Engine::set_up(Role::Client, pipe, settings)
}

/// Waits for a client and sets the session up.
pub fn accept(listener: &TcpListener, wait: Duration, settings: Settings) -> Result<Engine> {
    let stream = tcp::accept(listener, wait)?;
    let pipe: Box<dyn Pipe> = match &settings.security {
        Security::Tls { identity, trust } => Box::new(tls::accept(stream, identity, trust, &settings.limits)?),
        Security::InsecureLoopback => Box::new(tcp::insecure_plain_loopback(stream, &settings.limits)?),
    };
    Engine::set_up(Role::Server, pipe, settings)
}

impl Engine {
    /// Sets a session up over any pipe: the hello, base transfers, encryption keys.
    pub fn set_up(role: Role, pipe: Box<dyn Pipe>, mut settings: Settings) -> Result<Self> {
        let config = settings.transfers()?;
        // Plans follow from the conditions, so the parties must agree on them like on the model.
        let Conditions { bytes_per_second, cores } = settings.conditions;
        settings.terms.model = Sha256::new()
            .chain_update(settings.terms.model)
            .chain_update(format!("{bytes_per_second:?} {cores:?} {:?}", settings.round_seconds))
            .finalize()
            .into();
        let pipe = match settings.shaped {
            Some(link) => Box::new(ShapedPipe::new(pipe, link)),
            None => pipe,
        };
        let session = match role {
            Role::Client => Session::connect(pipe, &settings.terms, &[], &settings.limits)?,
            Role::Server => Session::accept(pipe, &settings.terms, &[], &settings.limits)?,
        };
        let (mut channel, transcript) = (session.channel, session.transcript);
        let mut rng = SecretRng::from_os();
        let transfers = ExtendedOt::set_up(&mut channel, role, &transcript, config, &mut rng)?;
        let (transfers, for_party) = Shared::new(transfers);
        let mut party = Party { role, channel, ot: Box::new(for_party), triples: Box::new(NoTriples), rng };
        let encryption = Encryption::exchange(&mut party, &transcript, &[], settings.threads)?;
        let (triples, for_party) = Shared::new(match &encryption {
            Encryption::Client(keys) => EncryptedTriples::client(keys.secret.clone()),
            Encryption::Server(keys) => EncryptedTriples::server(keys.public.clone()),
        });
        party.triples = Box::new(for_party);
        let conditions = settings.conditions;
        let link =
            protocol::Link { bytes_per_second: conditions.bytes_per_second, round_seconds: settings.round_seconds };
        Ok(Self { party, encryption, rotations: Vec::new(), transfers, triples, conditions, link })
    }

    /// Makes transfers (as this party sees them) and triples ahead, so that steps need not wait for them. The costs
    /// stand under `preprocess`.
    pub fn preprocess(&mut self, transfers: OtCounts, triples: usize) -> Result<()> {
        let (ours, stock) = (&self.transfers, &self.triples);
        self.party.step("preprocess", |party| {
            ours.get()?.preprocess(&mut party.channel, transfers)?;
            stock.get()?.refill(&mut party.channel, triples)
        })
    }

    /// The product of a shared matrix (rows x columns) with one matrix of weights (columns x outputs) that the server
    /// passes: at the sum of the scales, off by at most one before it is truncated.
    pub fn product(&mut self, x: &[u64], shape: Shape, weight_bits: u32, weights: Option<&[i32]>) -> Result<Vec<u64>> {
        if weight_bits > 24 {
            return Err(Error::Unsupported(format!("weights of {weight_bits} bits; 24 is the most")));
        }
        let plan = Plan::new(shape, weight_bits, &self.cost_model())?;
        let party = &mut self.party;
        match (&self.encryption, weights) {
            (Encryption::Client(keys), None) => keys.pool.install(|| single::client(party, &keys.secret, &plan, x)),
            (Encryption::Server(keys), Some(weights)) => {
                let weights = Matrix::from_i32(shape.columns, shape.outputs, weight_bits, weights)?;
                keys.pool.install(|| single::server(party, &keys.public, &plan, weights, x))
            }
            _ => Err(whose_weights()),
        }
    }

    /// n experts with weights of their own, one or more matrices on the same input: shares of
    /// `[expert][token][column]` in, the same for each matrix out, exact. `most_bytes` bounds what travels, at the price of
    /// work at the server; both parties say the same.
    pub fn batched_product(
        &mut self,
        x: &[u64],
        shape: BatchedShape,
        most_bytes: Option<usize>,
        weights: Option<&[ExpertWeights]>,
    ) -> Result<Vec<Vec<u64>>> {
        let plan = match most_bytes {
            Some(bytes) => BatchedPlan::within(shape, self.conditions, bytes)?,
            None => BatchedPlan::new(shape, self.conditions)?,
        };
        if weights.is_some() == self.party.role.is_client() {
            return Err(whose_weights());
        }
        let wanted = plan.automorphisms();
        self.encryption.add_rotations(&mut self.party, &self.rotations, &wanted)?;
        self.rotations.extend(wanted);
        self.rotations.sort_unstable();
        self.rotations.dedup();
        batched::multiply(&mut self.party, &self.encryption, &plan, x, weights)
    }

    /// Products of pairs of shared matrices, all of one shape, in one round; off by at most two before truncation.
    pub fn shared_products(&mut self, pairs: &[shared::Pair], shape: Shape) -> Result<Vec<Vec<u64>>> {
        let plan = shared::SharedPlan::new(shape, &self.cost_model())?;
        let party = &mut self.party;
        match &self.encryption {
            Encryption::Client(keys) => keys.pool.install(|| shared::client(party, &keys.secret, &plan, pairs)),
            Encryption::Server(keys) => keys.pool.install(|| shared::server(party, &keys.public, &plan, pairs)),
        }
    }

    /// Says goodbye and ends the session.
    pub fn finish(mut self) -> Result<()> {
        self.party.channel.goodbye()
    }

    fn cost_model(&self) -> CostModel {
        let Conditions { bytes_per_second, cores } = self.conditions;
        CostModel { link_bits_per_second: bytes_per_second * 8.0, cores, ..CostModel::default() }
    }
}

fn whose_weights() -> Error {
    Error::BadArgument("the server passes the weights, the client none".into())
}
