//! Tight bodies of messages: a writer and a reader of bit strings. The receiver knows the length of every body
//! beforehand; what a reader hands out is masked to its width, and non-zero padding is refused.

use crate::error::Result;
use crate::field;
use crate::net::{Channel, Kind};

/// A body under construction.
pub(super) struct Writer {
    out: Vec<u8>,
    word: u64,
    have: u32,
}

impl Writer {
    /// An empty body with room for `bits` bits.
    pub fn with_capacity(bits: usize) -> Self {
        Self { out: Vec::with_capacity(bits.div_ceil(8) + 16), word: 0, have: 0 }
    }

    /// Appends the low `bits` bits (1 to 63) of a value whose other bits are zero.
    #[inline(always)]
    pub fn put(&mut self, value: u64, bits: u32) {
        debug_assert!((1..64).contains(&bits) && value >> bits == 0);
        self.word |= value << self.have;
        let have = self.have + bits;
        if have >= 64 {
            self.out.extend_from_slice(&self.word.to_le_bytes());
            // have - 64 of the value's bits are left; the shift is below 64 because bits is.
            self.word = (value >> 1) >> (bits - 1 - (have - 64));
            self.have = have - 64;
        } else {
            self.have = have;
        }
    }

    /// Appends each value with `bits` bits.
    pub fn values(&mut self, values: &[u64], bits: u32) {
        for &v in values {
            self.put(v, bits);
        }
    }

    /// Appends one bit for each flag (0 or 1), eight at a time; the body must be at a byte's border.
    pub fn flags(&mut self, flags: &[u8]) {
        self.align();
        let mut eights = flags.chunks_exact(8);
        for eight in &mut eights {
            self.out.push(gather(u64::from_le_bytes(eight.try_into().expect("a chunk of 8"))));
        }
        for (i, &flag) in eights.remainder().iter().enumerate() {
            self.word |= u64::from(flag) << i;
        }
        self.have = eights.remainder().len() as u32;
        self.align();
    }

    /// Fills up to a byte's border with zeros.
    pub fn align(&mut self) {
        let bytes = self.have.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.word.to_le_bytes()[..bytes]);
        self.word = 0;
        self.have = 0;
    }

    /// The finished body.
    pub fn finish(mut self) -> Vec<u8> {
        self.align();
        self.out
    }
}

/// The lowest bit of each of eight bytes that are 0 or 1, as one byte, first byte lowest.
#[inline(always)]
pub(super) fn gather(eight: u64) -> u8 {
    (eight.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

/// A body that is being read. Reads past the end give zeros, so callers check lengths with the frame.
pub(super) struct Reader {
    bytes: Vec<u8>,
    length: usize,
    at: usize,
}

impl Reader {
    /// Receives a body of exactly `bytes` bytes.
    pub fn receive(channel: &mut Channel, kind: Kind, bytes: usize) -> Result<Self> {
        let mut body = channel.receive(kind, bytes)?;
        body.resize(bytes + 8, 0);
        Ok(Self { bytes: body, length: bytes, at: 0 })
    }

    /// The next `bits` bits (1 to 57).
    #[inline(always)]
    pub fn take(&mut self, bits: u32) -> u64 {
        debug_assert!(bits <= 57);
        let from = self.at >> 3;
        let word = u64::from_le_bytes(self.bytes[from..from + 8].try_into().expect("8 bytes"));
        let value = (word >> (self.at & 7)) & ((1 << bits) - 1);
        self.at += bits as usize;
        value
    }

    /// The next `n` flags; the reader must be at a byte's border, and skips to the next one.
    pub fn flags(&mut self, n: usize) -> Vec<u8> {
        debug_assert!(self.at.is_multiple_of(8));
        let from = self.at / 8;
        let mut out = vec![0; n];
        for (byte, eight) in self.bytes[from..].iter().zip(out.chunks_mut(8)) {
            for (i, flag) in eight.iter_mut().enumerate() {
                *flag = (byte >> i) & 1;
            }
        }
        self.at = (self.at + n).next_multiple_of(8);
        out
    }

    /// Refuses a body that has more than its padding left, or padding that is not zero.
    pub fn finish(self, channel: &mut Channel) -> Result<()> {
        let left = self.length * 8 - self.at.min(self.length * 8);
        let last = self.bytes[self.length.saturating_sub(1)];
        if self.at > self.length * 8 || left >= 8 || (left > 0 && last >> (8 - left) != 0) {
            return Err(channel.refuse("the padding of a message is not zero"));
        }
        Ok(())
    }
}

/// Sends field elements, 41 bits each.
pub(super) fn send_field(channel: &mut Channel, kind: Kind, values: &[u64]) -> Result<()> {
    let mut body = Writer::with_capacity(values.len() * field::P_BITS);
    body.values(values, field::P_BITS as u32);
    channel.send(kind, &body.finish())
}

/// Receives `n` field elements; one that is not below p ends the session.
pub(super) fn receive_field(channel: &mut Channel, kind: Kind, n: usize) -> Result<Vec<u64>> {
    let mut body = Reader::receive(channel, kind, field::packed_len(n, field::P_BITS))?;
    let values: Vec<u64> = (0..n).map(|_| body.take(field::P_BITS as u32)).collect();
    body.finish(channel)?;
    below_p(channel, &values)?;
    Ok(values)
}

/// Refuses received values that are not field elements.
pub(super) fn below_p(channel: &mut Channel, values: &[u64]) -> Result<()> {
    // One pass without an early end, so that it vectorises.
    let most = values.iter().fold(0, |most, &v| most.max(v));
    if most >= field::P { Err(channel.refuse("a field element is not below p")) } else { Ok(()) }
}
