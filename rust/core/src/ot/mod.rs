//! Oblivious transfer: random correlations in bulk, from which every non-linear step is made.
//!
//! The interface is what the protocols need and no more: random 1-of-2 transfers with 128-bit pads, random 1-of-16
//! transfers with 8-bit pads. Where they come from (extended now, or read from a store made ahead) does not show.
//!
//! From the bottom up: `aes` (streams and the tweakable hash), `transpose`, `tree` (punctured seed trees), `base` and
//! `base_mlkem` (the public-key transfers that everything grows from), `softspoken` and `silent` with its `code` (the
//! two extensions), [`supply`] (both directions, with a stock), [`store`] (made ahead, on disk).
//! Semi-honest security, 128 bits; as usual for hashes with a fixed key, divided by the targets of one key (a silent
//! batch, or a session's SoftSpoken transfers).

use crate::Result;
use crate::net::Channel;

mod aes;
mod base;
mod base_mlkem;
mod code;
#[cfg(any(test, feature = "insecure-test-dealer"))]
pub mod foreign;
mod silent;
mod softspoken;
pub mod store;
pub mod supply;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_hostile;
mod transpose;
mod tree;

pub use base::BaseKind;
pub use silent::{NOISE_TABLE, NoiseLine, distance_needed};
pub use softspoken::GroupBits;
pub use supply::{ExtendedOt, OtConfig, OtCounts, OtKind, STOCK_LIMIT};

/// A 128-bit pad.
pub type Block = u128;

/// The sender's side of random 1-of-2 transfers: both pads of each.
pub type SentPads = Vec<[Block; 2]>;

/// The receiver's side of random 1-of-2 transfers.
pub struct ReceivedPads {
    /// The random choice bits, 0 or 1.
    pub choices: Vec<u8>,
    /// `pads[i]` is the sender's `pads[i][choices[i]]`.
    pub pads: Vec<Block>,
}

/// The receiver's side of random 1-of-16 transfers.
pub struct ReceivedPads16 {
    /// The random choices, 0 to 15.
    pub choices: Vec<u8>,
    /// `pads[i]` is the sender's `pads[i][choices[i]]`.
    pub pads: Vec<u8>,
}

/// A supply of random oblivious transfers in both directions. Each is given out once.
///
/// When one party calls a `send_` function the other calls the `receive_` twin with the same count. A call may talk
/// to the peer (an extension) when the stock is low.
pub trait OtSupply: Send {
    /// The sender's side of `n` random 1-of-2 transfers.
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads>;
    /// The receiver's side of `n` random 1-of-2 transfers.
    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads>;
    /// The sender's side of `n` random 1-of-16 transfers with 8-bit pads.
    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>>;
    /// The receiver's side of `n` random 1-of-16 transfers with 8-bit pads.
    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16>;
}
