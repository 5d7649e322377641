//! AES-128 as the workhorse of oblivious transfer: a keyed stream, the doubling step of seed trees, and the tweakable
//! correlation-robust hash that turns correlations into pads.
//!
//! Two implementations compute the same: AES-NI, eight blocks in flight, and the constant-time software AES of
//! the crate `aes` where the processor has none. Neither branches on, nor indexes by, its input.

use super::Block;
use aes::Aes128;
use aes::cipher::{BlockEncrypt, KeyInit};
use sha2::{Digest, Sha256};
use zeroize::Zeroize;

/// Blocks that one kernel step works on.
pub(super) const LANES: usize = 8;

/// AES-128 under one key.
pub(super) struct Aes(Keys);

enum Keys {
    #[cfg(target_arch = "x86_64")]
    Ni([u128; 11]),
    Portable(Box<Aes128>),
}

impl Drop for Aes {
    fn drop(&mut self) {
        match &mut self.0 {
            #[cfg(target_arch = "x86_64")]
            Keys::Ni(keys) => keys.zeroize(),
            // Wipes itself: the crate is built with its feature `zeroize`.
            Keys::Portable(_) => {}
        }
    }
}

impl Aes {
    /// The cipher under `key`.
    pub(super) fn new(key: Block) -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("aes") {
            // SAFETY: the processor has AES-NI, checked in the line above.
            return Self(Keys::Ni(unsafe { ni::schedule(key) }));
        }
        Self::portable(key)
    }

    /// The software cipher, whatever the processor has.
    pub(super) fn portable(key: Block) -> Self {
        Self(Keys::Portable(Box::new(Aes128::new(&key.to_le_bytes().into()))))
    }

    /// A cipher whose key is public, named by what it is for.
    pub(super) fn public(domain: &Domain, index: u64, part: u8) -> Self {
        Self::new(domain.derive(index, part))
    }

    /// `out[i]` is the encryption of the number `start + i`.
    pub(super) fn stream(&self, start: u64, out: &mut [Block]) {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            Keys::Ni(keys) => unsafe { ni::stream(keys, start, out) },
            Keys::Portable(cipher) => {
                for (i, block) in out.iter_mut().enumerate() {
                    *block = soft_encrypt(cipher, (start + i as u64) as u128);
                }
            }
        }
    }
}

fn soft_encrypt(cipher: &Aes128, x: Block) -> Block {
    let mut block = x.to_le_bytes().into();
    cipher.encrypt_block(&mut block);
    u128::from_le_bytes(block.into())
}

/// The doubling step of a seed tree: two fixed-key one-way functions x -> AES(x) ^ x, one for each child.
pub(super) struct Doubler {
    left: Aes,
    right: Aes,
}

impl Doubler {
    /// The step for the forest number `index` of a domain.
    pub(super) fn new(domain: &Domain, index: u64) -> Self {
        Self { left: Aes::public(domain, index, 1), right: Aes::public(domain, index, 2) }
    }

    /// The two children of one node.
    pub(super) fn children(&self, node: Block) -> [Block; 2] {
        let mut level = [node, 0];
        self.double(&mut level);
        level
    }

    /// Replaces the first half of `level` (a level of the tree) by the whole next level, in place. Returns the sums
    /// of all left and of all right children.
    pub(super) fn double(&self, level: &mut [Block]) -> [Block; 2] {
        let parents = level.len() / 2;
        match (&self.left.0, &self.right.0) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            (Keys::Ni(left), Keys::Ni(right)) => unsafe { ni::double(left, right, level, parents) },
            (Keys::Portable(left), Keys::Portable(right)) => {
                let mut sums = [0; 2];
                // From the back, so that no parent is overwritten before it is read.
                for i in (0..parents).rev() {
                    let parent = level[i];
                    for (side, hash) in [left, right].into_iter().enumerate() {
                        let child = soft_encrypt(hash, parent) ^ parent;
                        level[2 * i + side] = child;
                        sums[side] ^= child;
                    }
                }
                sums
            }
            #[cfg(target_arch = "x86_64")]
            _ => unreachable!("both keys are expanded by the same constructor"),
        }
    }
}

/// A name that separates every public key of a session: the session's transcript, the direction and the purpose.
pub(super) struct Domain([u8; 32]);

impl Domain {
    /// The domain of `purpose` in the direction in which `sender` sends, within a session.
    pub(super) fn new(session: &[u8; 32], sender: &str, purpose: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"cloister oblivious transfer 1\0");
        hash.update(session);
        for name in [sender, purpose] {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
        }
        Self(hash.finalize().into())
    }

    /// Sixteen public bytes that belong to (this domain, index, part) alone.
    pub(super) fn derive(&self, index: u64, part: u8) -> Block {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(index.to_le_bytes());
        hash.update([part]);
        let digest: [u8; 32] = hash.finalize().into();
        u128::from_le_bytes(digest[..16].try_into().expect("16 of 32 bytes"))
    }

    /// A 16-byte secret from secret bytes, separated by the domain, an index and a part.
    pub(super) fn extract(&self, index: u64, part: u8, secrets: &[&[u8]]) -> Block {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(index.to_le_bytes());
        hash.update([part]);
        for secret in secrets {
            hash.update((secret.len() as u64).to_le_bytes());
            hash.update(secret);
        }
        let mut digest: [u8; 32] = hash.finalize().into();
        let block = u128::from_le_bytes(digest[..16].try_into().expect("16 of 32 bytes"));
        digest.zeroize();
        block
    }
}

/// The tweakable correlation-robust hash H(x, i) = P(P(x) ^ i) ^ P(x) with P = AES under a public key that belongs to
/// (session, direction, purpose); eprint 2019/074, section 7.4. The tweak i is the running number of the transfer.
pub(super) struct TweakedHash {
    cipher: Aes,
    high: u128,
    next: u64,
    #[cfg(test)]
    pub(super) insecure_identity: bool,
}

impl TweakedHash {
    /// The hash of a domain; its counter starts at 0.
    pub(super) fn new(domain: &Domain) -> Self {
        let high = domain.derive(0, 0) << 64;
        Self {
            cipher: Aes::public(domain, 0, 3),
            high,
            next: 0,
            #[cfg(test)]
            insecure_identity: false,
        }
    }

    /// The number of the next transfer.
    #[cfg(test)]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Hashes in place. Each `PER` consecutive blocks belong to one transfer and share its tweak; the numbers used
    /// are never used again.
    pub(super) fn hash<const PER: usize>(&mut self, blocks: &mut [Block]) {
        debug_assert!(blocks.len().is_multiple_of(PER));
        let first = self.next;
        // 2^64 transfers take centuries; running over would repeat a tweak, so it must stop the process.
        self.next = first.checked_add((blocks.len() / PER) as u64).expect("fewer than 2^64 transfers");
        #[cfg(test)]
        if self.insecure_identity {
            return;
        }
        match &self.cipher.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            Keys::Ni(keys) => unsafe { ni::tweaked_hash::<PER>(keys, self.high, first, blocks) },
            Keys::Portable(cipher) => {
                for (i, block) in blocks.iter_mut().enumerate() {
                    let once = soft_encrypt(cipher, *block);
                    *block = soft_encrypt(cipher, once ^ self.high ^ (first + (i / PER) as u64) as u128) ^ once;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod ni {
    use super::{Block, LANES};
    use std::arch::x86_64::*;

    type Schedule = [__m128i; 11];

    fn vectors<const N: usize>(blocks: [u128; N]) -> [__m128i; N] {
        // SAFETY: both are N times 16 bytes without padding, and every bit pattern is valid in both.
        unsafe { std::mem::transmute_copy(&blocks) }
    }

    fn numbers<const N: usize>(vectors: [__m128i; N]) -> [u128; N] {
        // SAFETY: both are N times 16 bytes without padding, and every bit pattern is valid in both.
        unsafe { std::mem::transmute_copy(&vectors) }
    }

    /// Eleven round keys (FIPS 197, section 5.2).
    #[target_feature(enable = "aes")]
    pub(super) fn schedule(key: Block) -> [u128; 11] {
        let [mut last] = vectors([key]);
        let mut keys = [last; 11];
        macro_rules! round {
            ($i:literal, $constant:literal) => {{
                let word = _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<$constant>(last));
                last = _mm_xor_si128(last, _mm_slli_si128::<4>(last));
                last = _mm_xor_si128(last, _mm_slli_si128::<8>(last));
                last = _mm_xor_si128(last, word);
                keys[$i] = last;
            }};
        }
        round!(1, 0x01);
        round!(2, 0x02);
        round!(3, 0x04);
        round!(4, 0x08);
        round!(5, 0x10);
        round!(6, 0x20);
        round!(7, 0x40);
        round!(8, 0x80);
        round!(9, 0x1b);
        round!(10, 0x36);
        numbers(keys)
    }

    /// Encrypts N blocks in place, one round of all before the next, so that the pipeline stays full.
    macro_rules! encrypt {
        ($keys:expr, $state:expr) => {{
            for x in $state.iter_mut() {
                *x = _mm_xor_si128(*x, $keys[0]);
            }
            for key in &$keys[1..10] {
                for x in $state.iter_mut() {
                    *x = _mm_aesenc_si128(*x, *key);
                }
            }
            for x in $state.iter_mut() {
                *x = _mm_aesenclast_si128(*x, $keys[10]);
            }
        }};
    }

    #[target_feature(enable = "aes")]
    pub(super) fn stream(keys: &[u128; 11], start: u64, out: &mut [Block]) {
        let keys: Schedule = vectors(*keys);
        for (step, chunk) in out.chunks_mut(LANES).enumerate() {
            let first = start + (step * LANES) as u64;
            let mut state: [__m128i; LANES] = std::array::from_fn(|i| _mm_set_epi64x(0, (first + i as u64) as i64));
            encrypt!(keys, state);
            let blocks = numbers(state);
            chunk.copy_from_slice(&blocks[..chunk.len()]);
        }
    }

    #[target_feature(enable = "aes")]
    pub(super) fn double(left: &[u128; 11], right: &[u128; 11], level: &mut [Block], parents: usize) -> [Block; 2] {
        const HALF: usize = LANES / 2;
        let (left, right): (Schedule, Schedule) = (vectors(*left), vectors(*right));
        let mut sums = [0u128; 2];
        // From the back, so that no parent is overwritten before it is read.
        let mut end = parents;
        while end > 0 {
            let count = (end - 1) % HALF + 1;
            let begin = end - count;
            let mut nodes = [0u128; HALF];
            nodes[..count].copy_from_slice(&level[begin..end]);
            let parent = vectors(nodes);
            let mut a = parent;
            let mut b = parent;
            for i in 0..HALF {
                a[i] = _mm_xor_si128(a[i], left[0]);
                b[i] = _mm_xor_si128(b[i], right[0]);
            }
            for round in 1..10 {
                for i in 0..HALF {
                    a[i] = _mm_aesenc_si128(a[i], left[round]);
                    b[i] = _mm_aesenc_si128(b[i], right[round]);
                }
            }
            for i in 0..HALF {
                a[i] = _mm_xor_si128(_mm_aesenclast_si128(a[i], left[10]), parent[i]);
                b[i] = _mm_xor_si128(_mm_aesenclast_si128(b[i], right[10]), parent[i]);
            }
            let (a, b) = (numbers(a), numbers(b));
            for (i, pair) in level[2 * begin..2 * end].chunks_exact_mut(2).enumerate() {
                pair[0] = a[i];
                pair[1] = b[i];
                sums[0] ^= a[i];
                sums[1] ^= b[i];
            }
            end = begin;
        }
        sums
    }

    #[target_feature(enable = "aes")]
    pub(super) fn tweaked_hash<const PER: usize>(keys: &[u128; 11], high: u128, first: u64, blocks: &mut [Block]) {
        let keys: Schedule = vectors(*keys);
        let high = (high >> 64) as i64;
        let mut chunks = blocks.chunks_exact_mut(LANES);
        let step = |chunk: &mut [Block; LANES], at: usize| {
            let mut once = vectors(*chunk);
            encrypt!(keys, once);
            let mut twice = once;
            for (i, x) in twice.iter_mut().enumerate() {
                *x = _mm_xor_si128(*x, _mm_set_epi64x(high, (first + ((at + i) / PER) as u64) as i64));
            }
            encrypt!(keys, twice);
            for (x, y) in twice.iter_mut().zip(&once) {
                *x = _mm_xor_si128(*x, *y);
            }
            *chunk = numbers(twice);
        };
        let mut at = 0;
        for chunk in &mut chunks {
            step(chunk.try_into().expect("a chunk of exactly this length"), at);
            at += LANES;
        }
        let rest = chunks.into_remainder();
        if !rest.is_empty() {
            let mut padded = [0; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            step(&mut padded, at);
            rest.copy_from_slice(&padded[..rest.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn portable_twin(hash: &TweakedHash, domain: &Domain) -> TweakedHash {
        TweakedHash {
            cipher: Aes::portable(domain.derive(0, 3)),
            high: hash.high,
            next: hash.next,
            insecure_identity: false,
        }
    }

    #[test]
    fn the_cipher_is_aes_128() {
        // FIPS 197, appendix B, with the counter block in the place of the plaintext checked through the hash.
        let key = u128::from_le_bytes([
            0x2b, 0x7e, 0x15, 0x16, 0x28, 0xae, 0xd2, 0xa6, 0xab, 0xf7, 0x15, 0x88, 0x09, 0xcf, 0x4f, 0x3c,
        ]);
        for cipher in [Aes::new(key), Aes::portable(key)] {
            let mut out = [0; 21];
            cipher.stream(7, &mut out);
            let reference = Aes128::new(&key.to_le_bytes().into());
            for (i, &block) in out.iter().enumerate() {
                assert_eq!(block, soft_encrypt(&reference, 7 + i as u128));
            }
        }
        let text = u128::from_le_bytes([
            0x32, 0x43, 0xf6, 0xa8, 0x88, 0x5a, 0x30, 0x8d, 0x31, 0x31, 0x98, 0xa2, 0xe0, 0x37, 0x07, 0x34,
        ]);
        let cipher = [0x39, 0x25, 0x84, 0x1d, 0x02, 0xdc, 0x09, 0xfb, 0xdc, 0x11, 0x85, 0x97, 0x19, 0x6a, 0x0b, 0x32];
        assert_eq!(soft_encrypt(&Aes128::new(&key.to_le_bytes().into()), text).to_le_bytes(), cipher);
    }

    #[test]
    fn the_kernels_agree_with_the_portable_twin() {
        let domain = Domain::new(&[3; 32], "client", "test");
        for length in [1usize, 2, 7, 8, 9, 16, 33] {
            let mut fast = TweakedHash::new(&domain);
            let mut slow = portable_twin(&fast, &domain);
            let mut a: Vec<Block> = (0..length as u128 * 2).map(|i| i * 77 + (i << 100)).collect();
            let mut b = a.clone();
            fast.hash::<2>(&mut a);
            slow.hash::<2>(&mut b);
            assert_eq!(a, b);
            assert_eq!(fast.next(), length as u64);

            let step = Doubler::new(&domain, 5);
            let twin = Doubler { left: Aes::portable(domain.derive(5, 1)), right: Aes::portable(domain.derive(5, 2)) };
            let (mut a, mut b) = (a, b);
            assert_eq!(step.double(&mut a), twin.double(&mut b));
            assert_eq!(a, b);
        }
    }

    #[test]
    fn another_index_session_direction_or_purpose_gives_another_output() {
        let mut seen = std::collections::HashSet::new();
        for session in [[1; 32], [2; 32]] {
            for sender in ["client", "server"] {
                for purpose in ["soft", "silent"] {
                    let mut hash = TweakedHash::new(&Domain::new(&session, sender, purpose));
                    let mut same = [42; 1000];
                    hash.hash::<1>(&mut same);
                    assert!(same.iter().all(|&x| seen.insert(x)), "the same input was hashed to the same output");
                    let mut once_more = [42; 1000];
                    hash.hash::<1>(&mut once_more);
                    assert!(once_more.iter().all(|&x| seen.insert(x)), "a tweak was used twice");
                }
            }
        }
    }
}
