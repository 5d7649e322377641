//! The header of a frame, as pure functions: what a fuzzer can reach without a socket.

use super::Kind;
use crate::error::{Error, Result};

/// Bytes of a frame header: length (4), kind (2), zero (2), sequence number (8), all little endian.
pub const HEADER: usize = 16;

/// What the receiver knows about the next frame before it arrives.
#[derive(Clone, Copy, Debug)]
pub struct Due {
    /// The kind that the protocol is waiting for.
    pub kind: Kind,
    /// The number of the frame, counted from zero in each direction.
    pub sequence: u64,
    /// The shortest body allowed.
    pub least: usize,
    /// The longest body allowed.
    pub most: usize,
}

/// The header of a frame with a body of `length` bytes.
pub fn encode(kind: Kind, length: u32, sequence: u64) -> [u8; HEADER] {
    let mut header = [0u8; HEADER];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4..6].copy_from_slice(&(kind as u16).to_le_bytes());
    header[8..].copy_from_slice(&sequence.to_le_bytes());
    header
}

/// The length of the body that follows, if the header is exactly the one that is due.
///
/// `Error::BadArgument` with the reason if not; `Error::Link` with `UnexpectedEof` for a goodbye in good form where
/// something else was due, which means that the peer left in order in the middle of a step.
pub fn decode(header: &[u8; HEADER], due: &Due) -> Result<usize> {
    let [l0, l1, l2, l3, k0, k1, r0, r1, ..] = *header;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let number = u16::from_le_bytes([k0, k1]);
    let reserved = u16::from_le_bytes([r0, r1]);
    let sequence = u64::from_le_bytes(header[8..].try_into().expect("the last 8 of 16 bytes"));
    let refuse = |reason: String| Err(Error::BadArgument(reason));
    if reserved != 0 {
        return refuse("a reserved field is not zero".into());
    }
    if sequence != due.sequence {
        return refuse(format!("message number {sequence} where {} was due", due.sequence));
    }
    match Kind::from_number(number) {
        Some(kind) if kind == due.kind => {}
        Some(Kind::Goodbye) if length == 0 => return Err(Error::Link(std::io::ErrorKind::UnexpectedEof.into())),
        _ => return refuse(format!("kind {number} where {:?} was due", due.kind)),
    }
    if length < due.least || length > due.most {
        return refuse(format!("{length} bytes where {} to {} were due", due.least, due.most));
    }
    Ok(length)
}
