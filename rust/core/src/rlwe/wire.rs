//! The bytes of requests, answers and keys: packed bit by bit, one encoding for one value. Every decoder knows the
//! length beforehand and refuses another, a residue that is not below its prime, and padding that is not zero.

use super::answer::Answer;
use super::cipher::{SeededCiphertext, canonical};
use super::keys::{PublicKey, transcript_polynomial};
use super::params::{AnswerPlan, LEVELS, N, RESIDUE_BITS, check_level};
use super::rotate::{Key, RotationKeys, random_part};
use super::slots::Automorphism;
use crate::error::{Error, Result};
use crate::field::{pack_bits, packed_len, unpack_bits};
use crate::random::PublicSeed;

/// Residues at 25 bits each, as [`pack_bits`] would write them, but a word at a time.
fn pack_rows(rows: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(packed_len(rows.len(), RESIDUE_BITS) + 8);
    let (mut word, mut have) = (0u64, 0);
    for &x in rows {
        word |= u64::from(x) << have;
        have += RESIDUE_BITS;
        if have >= 32 {
            out.extend_from_slice(&(word as u32).to_le_bytes());
            word >>= 32;
            have -= 32;
        }
    }
    out.extend_from_slice(&word.to_le_bytes()[..have.div_ceil(8)]);
    out
}

/// Rows of residues, all canonical. N is a multiple of 8, so there is no padding.
fn unpack_rows(bytes: &[u8], level: usize) -> Result<Vec<u32>> {
    expect_len(bytes, packed_len(level * N, RESIDUE_BITS))?;
    let mut rows = vec![0u32; level * N];
    // Eight residues are 25 bytes.
    for (values, bytes) in rows.chunks_exact_mut(8).zip(bytes.chunks_exact(RESIDUE_BITS)) {
        for (k, x) in values.iter_mut().enumerate() {
            let (byte, bit) = (k * RESIDUE_BITS / 8, k * RESIDUE_BITS % 8);
            // The last residue begins in bit 7 of byte 21: four bytes always hold all of one.
            let word = u32::from_le_bytes([bytes[byte], bytes[byte + 1], bytes[byte + 2], bytes[byte + 3]]);
            *x = word >> bit & ((1 << RESIDUE_BITS) - 1);
        }
    }
    if canonical(&rows) { Ok(rows) } else { Err(Error::BadArgument("a residue is not below its modulus".into())) }
}

fn expect_len(bytes: &[u8], length: usize) -> Result<()> {
    if bytes.len() == length {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("{} bytes where {length} were expected", bytes.len())))
    }
}

fn seed(bytes: &[u8]) -> PublicSeed {
    PublicSeed(bytes.try_into().expect("the caller cuts 32 bytes"))
}

impl SeededCiphertext {
    /// Bytes of one request ciphertext: the number of its stream and c0.
    pub const fn wire_len(level: usize) -> usize {
        8 + packed_len(level * N, RESIDUE_BITS)
    }

    /// The bytes of a request.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.index.to_le_bytes().to_vec();
        out.extend(pack_rows(&self.c0));
        out
    }

    /// Reads a request of a level that is known beforehand.
    pub fn from_bytes(bytes: &[u8], level: usize) -> Result<Self> {
        check_level(level)?;
        expect_len(bytes, Self::wire_len(level))?;
        let index = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        Ok(Self { level, index, c0: unpack_rows(&bytes[8..], level)? })
    }
}

impl Answer {
    /// The bytes of an answer: [`AnswerPlan::answer_len`] of them.
    pub fn to_bytes(&self, plan: &AnswerPlan) -> Vec<u8> {
        let mut out = pack_bits(&self.c1, plan.c1_bits);
        out.extend(pack_bits(&self.c0, plan.c0_bits));
        out
    }

    /// Reads an answer of which `listed` coefficients of c0 travel (N for slots).
    pub fn from_bytes(bytes: &[u8], plan: &AnswerPlan, listed: usize) -> Result<Self> {
        expect_len(bytes, plan.answer_len(listed))?;
        let (c1, c0) = bytes.split_at(packed_len(N, plan.c1_bits));
        Ok(Self { c0: unpack_bits(c0, listed, plan.c0_bits)?, c1: unpack_bits(c1, N, plan.c1_bits)? })
    }
}

impl PublicKey {
    /// Bytes of a public key: the seed of requests, and b.
    pub const WIRE_LEN: usize = 32 + packed_len(LEVELS * N, RESIDUE_BITS);

    /// The bytes of a public key. The random polynomial does not travel: it is the transcript's.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.seed.0.to_vec();
        out.extend(pack_rows(&self.b));
        out
    }

    /// Reads the public key of a session with this transcript.
    pub fn from_bytes(bytes: &[u8], transcript: &[u8; 32]) -> Result<Self> {
        expect_len(bytes, Self::WIRE_LEN)?;
        let b = unpack_rows(&bytes[32..], LEVELS)?;
        Ok(Self { seed: seed(&bytes[..32]), a: transcript_polynomial(transcript), b, budget: Default::default() })
    }
}

impl RotationKeys {
    const KEY_LEN: usize = LEVELS * packed_len(LEVELS * N, RESIDUE_BITS);

    /// Bytes of the keys of so many different automorphisms, which both sides know.
    pub const fn wire_len(automorphisms: usize) -> usize {
        32 + automorphisms * Self::KEY_LEN
    }

    /// The bytes of the keys, in the order of the automorphisms.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.seed.0.to_vec();
        for key in self.keys.values() {
            key.b.chunks_exact(LEVELS * N).for_each(|digit| out.extend(pack_rows(digit)));
        }
        out
    }

    /// Reads the keys of a set of automorphisms that both sides know.
    pub fn from_bytes(bytes: &[u8], automorphisms: &[Automorphism]) -> Result<Self> {
        let mut sorted = automorphisms.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        expect_len(bytes, Self::wire_len(sorted.len()))?;
        let seed = seed(&bytes[..32]);
        let read = |bytes: &[u8]| -> Result<Vec<u32>> {
            let mut b = Vec::with_capacity(LEVELS * LEVELS * N);
            for digit in bytes.chunks_exact(Self::KEY_LEN / LEVELS) {
                b.extend(unpack_rows(digit, LEVELS)?);
            }
            Ok(b)
        };
        // First everything that can be refused, and only then the memory of what is made from the seed.
        let read: Vec<_> = bytes[32..].chunks_exact(Self::KEY_LEN).map(read).collect::<Result<_>>()?;
        let keys = sorted.into_iter().zip(read).map(|(automorphism, b)| {
            (automorphism, Key { b, a: random_part(&seed, automorphism), permutation: automorphism.permutation() })
        });
        Ok(Self { seed, keys: keys.collect() })
    }
}
