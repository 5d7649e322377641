//! Everything put together: connect, agree, make encryption keys, and run the steps of [`crate::protocol`] and
//! [`crate::matmul`] with the keys, plans and supplies of one session.
//!
//! With a store ([`StoreSettings`]) steps take their transfers and triples from disk and linear layers take what was
//! prepared, in this session or an earlier one with the same peer; see [`ahead`].

use crate::error::{Error, Result};
use crate::matmul::single::{self, CostModel, Matrix, Shape};
use crate::matmul::triples::EncryptedTriples;
use crate::matmul::{BatchedPlan, BatchedShape, Conditions, Encryption, ExpertWeights, batched, shared};
use crate::net::shaped::ShapedPipe;
use crate::net::{Pipe, tcp, tls};
use crate::ot::store::{Agreement, SharedStore, Store, StoredOt, WhenEmpty};
use crate::party::{Party, Role};
use crate::preprocess::{Demand, SET_UP};
use crate::protocol;
use crate::random::SecretRng;
use crate::rlwe::Automorphism;
use crate::session::{Network, Session};
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use supply::{Counted, Nothing, Shared, Transfers};
use zeroize::Zeroizing;

pub mod ahead;
mod settings;
mod supply;

pub use ahead::{Layer, LayerWeights, Linear};
pub use settings::{Security, Settings, StoreSettings};

/// One party of a session, ready to compute.
pub struct Engine {
    /// What the protocol steps take.
    pub party: Party,
    /// The keys of this session.
    pub encryption: Encryption,
    /// What the choice between protocols assumes of the link.
    pub link: protocol::Link,
    network: Network,
    quiet: Duration,
    rotations: Vec<Automorphism>,
    transfers: Shared<Transfers>,
    triples: Shared<EncryptedTriples>,
    demand: Arc<Mutex<Demand>>,
    store: Option<SharedStore>,
    agreement: Option<Agreement>,
    /// Prepared layers of a session without a store.
    prepared: BTreeMap<[u8; 20], VecDeque<Zeroizing<Vec<u8>>>>,
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

/// Opens a party's store, or makes it.
fn open_store(wanted: &StoreSettings, settings: &Settings, role: Role) -> Result<Store> {
    let identity = settings.store_identity(role)?;
    let (disk, place) = (wanted.disk.clone(), &wanted.place);
    let mut store = Store::open_or_make(disk, place, &identity)?;
    store.set_policy(wanted.policy);
    Ok(store)
}

impl Engine {
    /// Sets a session up over any pipe: the hello with the marks of the store, encryption keys, and base transfers unless
    /// a store may make them superfluous.
    pub fn set_up(role: Role, pipe: Box<dyn Pipe>, settings: Settings) -> Result<Self> {
        let mut store = match &settings.store {
            Some(wanted) => Some(open_store(wanted, &settings, role)?),
            None => None,
        };
        let marks = store.as_mut().map_or(Ok(Vec::new()), Store::marks)?;
        let pipe = match settings.shaped {
            Some(link) => Box::new(ShapedPipe::new(pipe, link)),
            None => pipe,
        };
        let session = match role {
            Role::Client => Session::connect(pipe, &settings.terms, &marks, &settings.limits)?,
            Role::Server => Session::accept(pipe, &settings.terms, &marks, &settings.limits)?,
        };
        let agreement = match (&mut store, session.peer_marks.is_empty()) {
            (None, true) => None,
            (Some(store), false) => Some(store.agree(&session.peer_marks)?),
            (ours, _) => {
                let who = if ours.is_some() { "we have" } else { "the peer has" };
                let reason = format!("only {who} a store of correlations, and its items come in pairs");
                return Err(Error::Disagreement { field: "store marks", reason });
            }
        };
        let (channel, transcript, network) = (session.channel, session.transcript, session.network);
        let mut rng = SecretRng::from_os();
        let config = settings.transfers(network)?;
        let transfers = Shared::new(Transfers::new(role, transcript, config, rng.fork()));
        let mut party = Party { role, channel, ot: Box::new(Nothing), triples: Box::new(Nothing), rng };
        let has_store = store.is_some();
        let encryption = party.step(SET_UP, |party| {
            if !has_store {
                transfers.get()?.ready(&mut party.channel)?;
            }
            Encryption::exchange(party, &transcript, &[], settings.threads)
        })?;
        let triples = Shared::new(match &encryption {
            Encryption::Client(keys) => EncryptedTriples::client(keys.secret.clone()).with_pool(keys.pool.clone()),
            Encryption::Server(keys) => EncryptedTriples::server(keys.public.clone()).with_pool(keys.pool.clone()),
        });
        let mut engine = Self {
            party,
            encryption,
            link: protocol::Link {
                bytes_per_second: network.bytes_per_second as f64,
                round_seconds: f64::from(network.round_microseconds) * 1e-6,
            },
            network,
            quiet: settings.limits.quiet,
            rotations: Vec::new(),
            transfers,
            triples,
            demand: Arc::default(),
            store: store.map(SharedStore::new),
            agreement,
            prepared: BTreeMap::new(),
        };
        engine.connect_supplies();
        Ok(engine)
    }

    /// Gives the party the supplies that its steps take from.
    fn connect_supplies(&mut self) {
        let (role, demand) = (self.party.role, &self.demand);
        let (transfers, triples) = (self.transfers.handle(), self.triples.handle());
        let Some(store) = &self.store else {
            self.party.ot = Box::new(Counted::new(role, demand, transfers));
            self.party.triples = Box::new(Counted::new(role, demand, triples));
            return;
        };
        let stored = || StoredOt::new(store.clone());
        let extends = self.agreement.as_ref().is_some_and(|a| a.policy.when_empty == WhenEmpty::Extend);
        let (ot, from_store) = if extends {
            (stored().or_transfers(Box::new(transfers)), stored().or_triples(Box::new(triples)))
        } else {
            (stored(), stored())
        };
        self.party.ot = Box::new(Counted::new(role, demand, ot));
        self.party.triples = Box::new(Counted::new(role, demand, from_store));
    }

    /// The product of a shared matrix (rows x columns) with one matrix of weights (columns x outputs) that the server
    /// passes: at the sum of the scales, off by at most one before it is truncated. `prepared` names the layer whose
    /// preparation is used, if one is left.
    pub fn product(
        &mut self,
        x: &[u64],
        shape: Shape,
        weight_bits: u32,
        weights: Option<&[i32]>,
        prepared: Option<&str>,
    ) -> Result<Vec<u64>> {
        if weights.is_some() == self.party.role.is_client() {
            return Err(whose_weights());
        }
        let plan = self.plan_single(shape, weight_bits)?;
        let Shape { rows, columns, outputs } = shape;
        if rows.checked_mul(columns) != Some(x.len()) {
            return Err(Error::BadArgument(format!("{} elements where {rows} x {columns} were expected", x.len())));
        }
        let weights = weights.map(|w| Matrix::from_i32(columns, outputs, weight_bits, w)).transpose()?;
        let ready = match prepared {
            Some(name) => self.take_prepared(name, &Linear::Single { shape, weight_bits })?,
            None => None,
        };
        let expected = plan.seconds(&work_alone_cost())?;
        self.patiently(expected, |engine| {
            let (party, encryption) = (&mut engine.party, &engine.encryption);
            match ready {
                Some(bytes) => {
                    let ready = single::Prepared::from_bytes(&plan, encryption, &bytes)?;
                    single::online(party, encryption, ready, x, weights)
                }
                None => single::multiply(party, encryption, &plan, x, weights),
            }
        })
    }

    /// n experts with weights of their own, one or more matrices on the same input: shares of
    /// `[expert][token][column]` in, the same for each matrix out, exact. `most_bytes` bounds what travels, at the price of
    /// work at the server; both parties say the same. `prepared` as in [`Engine::product`].
    pub fn batched_product(
        &mut self,
        x: &[u64],
        shape: BatchedShape,
        most_bytes: Option<usize>,
        weights: Option<&[ExpertWeights]>,
        prepared: Option<&str>,
    ) -> Result<Vec<Vec<u64>>> {
        if weights.is_some() == self.party.role.is_client() {
            return Err(whose_weights());
        }
        let plan = self.plan_experts(shape.clone(), most_bytes)?;
        if x.len() != shape.inputs() {
            return Err(Error::BadArgument(format!("{} values where {} were expected", x.len(), shape.inputs())));
        }
        let ready = match prepared {
            Some(name) => self.take_prepared(name, &Linear::Experts { shape, most_bytes })?,
            None => None,
        };
        let expected = plan.seconds(work_alone());
        self.patiently(expected, |engine| {
            if let Some(bytes) = ready {
                let ready = batched::Prepared::from_bytes(&plan, &engine.encryption, &bytes)?;
                return batched::online(&mut engine.party, &engine.encryption, ready, x, weights);
            }
            engine.add_rotations(plan.automorphisms())?;
            batched::multiply(&mut engine.party, &engine.encryption, &plan, x, weights)
        })
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

    /// Forgets the costs counted so far, and the demand.
    pub fn reset_costs(&mut self) {
        self.party.channel.reset_costs();
        *self.demand.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Demand::default();
    }

    /// Says goodbye, ends the session and closes the store. What was reserved and not used stays burnt.
    pub fn finish(mut self) -> Result<()> {
        let goodbye = self.party.channel.goodbye();
        (self.party.ot, self.party.triples) = (Box::new(Nothing), Box::new(Nothing));
        let closed = match self.store.take().map(SharedStore::close) {
            Some(Ok(outcome)) => outcome,
            // Another handle would be a bug here; dropping ours is what a crash would do, and safe.
            None | Some(Err(_)) => Ok(()),
        };
        goodbye.and(closed)
    }

    /// Runs a long product. A peer that works for long is not a silent one: it may take what the plan expects of one
    /// slow core on top of the usual limit.
    fn patiently<T>(&mut self, expected: f64, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.party.channel.set_quiet_limit(self.quiet + patience(expected));
        let outcome = body(self);
        self.party.channel.set_quiet_limit(self.quiet);
        outcome
    }

    fn add_rotations(&mut self, wanted: Vec<Automorphism>) -> Result<()> {
        self.encryption.add_rotations(&mut self.party, &self.rotations, &wanted)?;
        self.rotations.extend(wanted);
        self.rotations.sort_unstable();
        self.rotations.dedup();
        Ok(())
    }

    fn plan_single(&self, shape: Shape, weight_bits: u32) -> Result<single::Plan> {
        if weight_bits > 24 {
            return Err(Error::Unsupported(format!("weights of {weight_bits} bits; 24 is the most")));
        }
        single::Plan::new(shape, weight_bits, &self.cost_model())
    }

    fn plan_experts(&self, shape: BatchedShape, most_bytes: Option<usize>) -> Result<BatchedPlan> {
        let conditions = conditions(self.network, f64::from(self.network.cores));
        match most_bytes {
            Some(bytes) => BatchedPlan::within(shape, conditions, bytes),
            None => BatchedPlan::new(shape, conditions),
        }
    }

    fn cost_model(&self) -> CostModel {
        cost_model(self.network, f64::from(self.network.cores))
    }
}

/// How much slower than the cost model's a peer's core may be.
const SLOWER: f64 = 8.0;

/// The silence that is allowed on top of the usual for work that is expected to take so many seconds. The time on the
/// link is not in it: messages have their own slowest rate, and the link is what the peer says it is.
fn patience(expected: f64) -> Duration {
    Duration::from_secs_f64((SLOWER * expected).clamp(0.0, 86_400.0))
}

fn conditions(network: Network, cores: f64) -> Conditions {
    Conditions { bytes_per_second: network.bytes_per_second as f64, cores }
}

fn cost_model(network: Network, cores: f64) -> CostModel {
    CostModel { link_bits_per_second: network.bytes_per_second as f64 * 8.0, cores, ..CostModel::default() }
}

/// One core and a link that costs nothing: what a plan's work alone takes.
fn work_alone() -> Conditions {
    Conditions { bytes_per_second: f64::INFINITY, cores: 1.0 }
}

fn work_alone_cost() -> CostModel {
    CostModel { link_bits_per_second: f64::INFINITY, cores: 1.0, ..CostModel::default() }
}

fn whose_weights() -> Error {
    Error::BadArgument("the server passes the weights, the client none".into())
}
