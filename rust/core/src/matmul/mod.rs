//! Products of shared matrices with weights that only the server knows, and of two shared matrices.
//!
//! A session makes its [`Encryption`] once: the client keeps the secret key, the server gets the public key and the keys of the
//! rotations that the plans of the session need. Every kind of product takes it.

pub mod batched;
mod kernel;
mod kernel_transform;
mod kernel_vector;
pub mod layout;
pub mod plan;
pub mod shared;
pub mod single;
mod ticket;
pub mod triples;
pub mod weights;
mod work;

pub use kernel::multiply_add_rate;
pub use plan::{BatchedPlan, BatchedShape, Conditions};
pub use weights::{ExpertWeights, Numbers};
pub use work::{Phase, Work};

use crate::error::{Error, Result};
use crate::net::Kind;
use crate::party::{Party, Role};
use crate::rlwe::{Automorphism, HidingBudget, PublicKey, RotationKeys, SecretKey};
use rayon::ThreadPool;
use std::sync::Arc;
use ticket::Tickets;

/// What the client keeps for a session's products.
pub struct ClientKeys {
    /// Decrypts; never leaves.
    pub secret: Arc<SecretKey>,
    /// The threads that work for this party.
    pub pool: Arc<ThreadPool>,
    /// What they spent their time on.
    pub(crate) work: Work,
    /// Numbers the products made ahead.
    tickets: Tickets,
}

/// What the server keeps for a session's products.
pub struct ServerKeys {
    /// Hides answers and expands requests.
    pub public: Arc<PublicKey>,
    /// Turns ciphertexts.
    pub(crate) rotations: RotationKeys,
    /// The threads that work for this party.
    pub pool: Arc<ThreadPool>,
    /// What they spent their time on.
    pub(crate) work: Work,
    /// Numbers the products made ahead.
    tickets: Tickets,
}

/// One party's keys of a session, and its threads.
pub enum Encryption {
    /// The client's.
    Client(ClientKeys),
    /// The server's.
    Server(ServerKeys),
}

impl Encryption {
    /// Makes and exchanges the keys of a session: one message, before the first product.
    ///
    /// `transcript` is the hash of the session's hello, from which the public key's random polynomial comes;
    /// `automorphisms` are those of every plan that the session will use, in any order, the same at both parties.
    pub fn exchange(
        party: &mut Party,
        transcript: &[u8; 32],
        automorphisms: &[Automorphism],
        threads: usize,
    ) -> Result<Self> {
        party.step("encryption keys", |party| Self::exchange_inside(party, transcript, automorphisms, threads))
    }

    fn exchange_inside(
        party: &mut Party,
        transcript: &[u8; 32],
        automorphisms: &[Automorphism],
        threads: usize,
    ) -> Result<Self> {
        let mut needed = automorphisms.to_vec();
        needed.sort_unstable();
        needed.dedup();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .build()
            .map_err(|error| Error::Unsupported(format!("threads cannot be started: {error}")))?;
        let pool = Arc::new(pool);
        let (work, tickets) = (Work::default(), Tickets::new(transcript));
        match party.role {
            Role::Client => {
                let secret = SecretKey::generate(&mut party.rng);
                let mut bytes = secret.public_key(transcript, &mut party.rng).to_bytes();
                bytes.extend(secret.rotation_keys(&needed, &mut party.rng).to_bytes());
                party.channel.send(Kind::Keys, &bytes)?;
                party.channel.flush()?;
                Ok(Encryption::Client(ClientKeys { secret: Arc::new(secret), pool, work, tickets }))
            }
            Role::Server => {
                let length = PublicKey::WIRE_LEN + RotationKeys::wire_len(needed.len());
                let bytes = party.channel.receive(Kind::Keys, length)?;
                let (public, rotations) = bytes.split_at(PublicKey::WIRE_LEN);
                let read = PublicKey::from_bytes(public, transcript)
                    .and_then(|public| Ok((public, RotationKeys::from_bytes(rotations, &needed)?)));
                let (public, rotations) = read.map_err(|_| party.channel.refuse("keys that are none"))?;
                Ok(Encryption::Server(ServerKeys { public: Arc::new(public), rotations, pool, work, tickets }))
            }
        }
    }

    /// How long this party's threads worked on each phase of the batched products so far.
    pub fn work(&self) -> &Work {
        match self {
            Encryption::Client(keys) => &keys.work,
            Encryption::Server(keys) => &keys.work,
        }
    }

    fn tickets(&self) -> &Tickets {
        match self {
            Encryption::Client(keys) => &keys.tickets,
            Encryption::Server(keys) => &keys.tickets,
        }
    }

    /// How much of what floods can hide the answers of this session have used.
    pub fn budget(&self) -> &HidingBudget {
        match self {
            Encryption::Client(keys) => keys.secret.budget(),
            Encryption::Server(keys) => keys.public.budget(),
        }
    }

    /// Makes sure that the server can turn ciphertexts in all these ways: one message if keys are missing, else none.
    pub fn add_rotations(&mut self, party: &mut Party, have: &[Automorphism], wanted: &[Automorphism]) -> Result<()> {
        let mut missing: Vec<Automorphism> = wanted.iter().filter(|a| !have.contains(a)).copied().collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return Ok(());
        }
        party.step("encryption keys", |party| match self {
            Encryption::Client(keys) => {
                let bytes = keys.secret.rotation_keys(&missing, &mut party.rng).to_bytes();
                party.channel.send(Kind::Keys, &bytes)?;
                party.channel.flush()
            }
            Encryption::Server(keys) => {
                let bytes = party.channel.receive(Kind::Keys, RotationKeys::wire_len(missing.len()))?;
                let more = RotationKeys::from_bytes(&bytes, &missing);
                let more = more.map_err(|_| party.channel.refuse("rotation keys that are none"))?;
                keys.rotations.merge(more);
                Ok(())
            }
        })
    }

    /// Whose keys these are.
    pub fn role(&self) -> Role {
        match self {
            Encryption::Client(_) => Role::Client,
            Encryption::Server(_) => Role::Server,
        }
    }
}
