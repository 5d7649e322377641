//! The one place that touches the outside world: framed messages over a duplex pipe, each byte and round counted
//! under the protocol step that caused it.
//!
//! A frame is a 16-byte header (length, kind, zero, sequence number) and a body. The receiver always knows the kind
//! and, but for the hello, the exact length it waits for, so nothing is allocated on a peer's word.

mod channel;
mod kind;
pub mod memory;

pub use channel::{Channel, Pipe, StepCost};
pub use kind::Kind;
