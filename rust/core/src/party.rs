//! One party of a running computation: its role, its channel, its randomness and its supply of correlations. Every
//! protocol step takes `&mut Party` first; both parties call the same function with the same public arguments.

use crate::net::Channel;
use crate::ot::OtSupply;
use crate::random::SecretRng;

/// Which of the two parties this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Holds the prompt and the decryption key.
    Client,
    /// Holds the weights.
    Server,
}

impl Role {
    /// The other party.
    pub fn other(self) -> Role {
        match self {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        }
    }

    /// True for exactly one of the two parties, for "one of us adds the constant".
    pub fn is_client(self) -> bool {
        self == Role::Client
    }
}

/// One party of a running computation.
pub struct Party {
    /// Who we are.
    pub role: Role,
    /// The framed, metered, authenticated link to the peer.
    pub channel: Channel,
    /// Where random oblivious transfers come from.
    pub ot: Box<dyn OtSupply>,
    /// Where multiplication triples in Z_p come from.
    pub triples: Box<dyn TripleSupply>,
    /// This party's own secret randomness.
    pub rng: SecretRng,
}

impl Party {
    /// Runs `body` with its costs counted under `name`, inside the step that is running; see [`Channel::step`].
    pub fn step<T>(&mut self, name: &str, body: impl FnOnce(&mut Party) -> crate::Result<T>) -> crate::Result<T> {
        let begun = self.channel.begin(name);
        let outcome = body(self);
        self.channel.end(begun, &outcome);
        outcome
    }
}

/// Shares of uniform a, b and of c = a * b in Z_p, one-time.
pub struct Triples {
    /// Shares of a.
    pub a: Vec<u64>,
    /// Shares of b.
    pub b: Vec<u64>,
    /// Shares of a * b.
    pub c: Vec<u64>,
}

/// A source of multiplication triples. Never gives one twice.
pub trait TripleSupply: Send {
    /// The next `n` triples; both parties call with the same `n`. May talk to the peer when the stock is low.
    fn triples(&mut self, channel: &mut Channel, n: usize) -> crate::Result<Triples>;
}
