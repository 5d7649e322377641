//! Everything that is not linear, from oblivious transfer: each step on additive shares, with its plain twin and its
//! error bound.
//!
//! Three kinds of share, all plain vectors so that linear work needs no protocol at all:
//!
//! * a *value*: one `u64` below p at each party, the sum modulo p is the value ([`crate::field`]);
//! * a *ring value*: one `u64` below 2^kappa at each party, the sum modulo 2^kappa is the value;
//! * a *bit*: one `u8`, 0 or 1, at each party, the exclusive or is the bit ([`Bits`]).
//!
//! Both parties call the same function with the same public arguments. A step's cost is stated as rounds (both
//! parties speak at once unless "there and back" is said), bits an element on the wire, both directions together and
//! without frame headers, and transfers an element (random 1-of-2, and 1-of-16 where named). Tests hold the statements
//! to what the channel counted. No step has secret-dependent branches or indexes; corrections that both parties see
//! may be branched on.

mod activation;
mod boolean;
mod compare;
mod correlate;
mod exponential;
mod lookup;
mod multiply;
mod norm;
mod onehot;
mod piecewise;
mod rank;
mod reciprocal;
mod reveal;
mod select;
mod softmax;
mod sort;
mod strand;
mod tables;
mod wire;
mod wrap;

pub use activation::{gelu, relu, silu};
pub use boolean::{and, not, or, xor};
pub use compare::{equal, is_negative, less_than, ring_is_negative};
pub use exponential::exponential;
pub use multiply::{inner_products, multiply, multiply_truncate, square};
pub use norm::{NormPlan, layer_norm, rms_norm};
pub use onehot::{BitTable, MAX_LOOKUP_BITS, index_bits, lookup_bits, one_hot, one_hot_values};
pub use rank::{Rows, dispatch_bits, dispatch_ranks, maximum, rank, rank_all_pairs, top_k_mask};
pub use reciprocal::{reciprocal, rsqrt};
pub use reveal::{reveal_to, reveal_to_both, share_from};
pub use select::{bits_to_field, bits_to_ring, select, select_ring};
pub use softmax::softmax;
pub use sort::{Link, MAX_ALL_PAIRS, MAX_NETWORK, Plan, plan};
pub use wrap::{MAX_KAPPA, from_ring, to_ring, truncate};

use crate::error::{Error, Result};
use crate::party::Party;

/// XOR shares of bits, one byte each, 0 or 1.
pub type Bits = Vec<u8>;

/// Runs `body` with its costs counted under `name`. A failure ends the session, unless it is the caller's own mistake and
/// nothing has been sent; see [`crate::net::Channel::step`].
pub(crate) fn step<T>(party: &mut Party, name: &str, body: impl FnOnce(&mut Party) -> Result<T>) -> Result<T> {
    party.step(name, body)
}

/// [`step`] on `n` elements; for none of them nothing is sent and the result is empty.
pub(crate) fn step_on<T: Default>(
    party: &mut Party,
    name: &str,
    n: usize,
    body: impl FnOnce(&mut Party) -> Result<T>,
) -> Result<T> {
    if n == 0 { Ok(T::default()) } else { step(party, name, body) }
}

/// Refuses a caller's vectors of different lengths.
pub(crate) fn same_length(what: &str, a: usize, b: usize) -> Result<()> {
    if a == b {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("{what}: {a} and {b} elements where as many were due")))
    }
}

#[cfg(test)]
mod function_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cost;
#[cfg(test)]
mod tests_flush;
#[cfg(test)]
mod tests_hostile;
#[cfg(test)]
mod tests_order;
