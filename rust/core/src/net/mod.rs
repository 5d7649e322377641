//! The one place that touches the outside world: framed messages over a duplex pipe, each byte and round counted
//! under the protocol step that caused it.
//!
//! A frame is a 16-byte header (length, kind, zero, sequence number) and a body. The receiver always knows the kind
//! and, but for the hello, the exact length it waits for, and a body grows as its bytes arrive, so nothing is
//! allocated on a peer's word.

mod channel;
pub mod cost;
#[cfg(any(test, feature = "insecure-test-dealer"))]
pub mod faults;
pub mod frame;
pub mod identity;
mod kind;
pub mod memory;
mod pipe;
pub mod shaped;
mod socket;
pub mod tcp;
pub mod tls;

pub use channel::{Begun, Channel};
pub use cost::StepCost;
pub use kind::Kind;
pub use pipe::Pipe;
pub use socket::SocketPipe;
pub use tcp::Limits;
