//! AES-128 as the workhorse of oblivious transfer: a keyed stream, the doubling step of seed trees, and the tweakable
//! correlation-robust hashes that turn correlations into pads.
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

/// The doubling step of a seed tree, one AES call for two children: left = H(x), right = H(x) ^ x with the circular
/// correlation-robust hash H(x) = P(s(x)) ^ s(x), s(high, low) = (high ^ low, high) and P = AES under a public key (the
/// half-tree of eprint 2022/1431; for H, eprint 2019/074, section 7.3).
pub(super) struct Doubler(Aes);

/// The linear s of [`Doubler`]: itself and its sum with the identity are permutations.
fn orthomorphism(x: Block) -> Block {
    let (high, low) = (x >> 64, x & u128::from(u64::MAX));
    (high ^ low) << 64 | high
}

impl Doubler {
    /// The step for the forest number `index` of a domain.
    pub(super) fn new(domain: &Domain, index: u64) -> Self {
        Self(Aes::public(domain, index, 1))
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
        match &self.0.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            Keys::Ni(keys) => unsafe { ni::double(keys, level, parents) },
            Keys::Portable(cipher) => {
                let mut sums = [0; 2];
                // From the back, so that no parent is overwritten before it is read.
                for i in (0..parents).rev() {
                    let parent = level[i];
                    let mixed = orthomorphism(parent);
                    let left = soft_encrypt(cipher, mixed) ^ mixed;
                    for (side, child) in [left, left ^ parent].into_iter().enumerate() {
                        level[2 * i + side] = child;
                        sums[side] ^= child;
                    }
                }
                sums
            }
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

/// The correlation-robust hash H(x) = P(x) ^ x with P = AES under a public key that belongs to one batch of one
/// (session, direction, purpose); eprint 2019/074, section 7.2. It has no tweak: it is for inputs that are random but for
/// the correlation, as a batch's outputs are, where no two are the same.
pub(super) struct CorrelationHash {
    cipher: Aes,
    #[cfg(test)]
    pub(super) insecure_identity: bool,
}

impl CorrelationHash {
    /// The hash of the batch number `index` of a domain.
    pub(super) fn new(domain: &Domain, index: u64) -> Self {
        Self {
            cipher: Aes::public(domain, index, 7),
            #[cfg(test)]
            insecure_identity: false,
        }
    }

    /// Hashes in place.
    pub(super) fn hash(&self, blocks: &mut [Block]) {
        #[cfg(test)]
        if self.insecure_identity {
            return;
        }
        match &self.cipher.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            Keys::Ni(keys) => unsafe { ni::hash(keys, blocks) },
            Keys::Portable(cipher) => blocks.iter_mut().for_each(|x| *x ^= soft_encrypt(cipher, *x)),
        }
    }

    /// For each value, the lowest bytes of the hashes of it plus each of the offsets.
    pub(super) fn sixteen(&self, values: &[Block], offsets: &[Block; 16], out: &mut [[u8; 16]]) {
        debug_assert_eq!(values.len(), out.len());
        match &self.cipher.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is built only where the processor has AES-NI.
            Keys::Ni(keys) if !self.is_identity() => unsafe { ni::sixteen(keys, values, offsets, out) },
            _ => {
                for (out, value) in out.iter_mut().zip(values) {
                    let mut all = offsets.map(|offset| value ^ offset);
                    self.hash(&mut all);
                    *out = all.map(|pad| pad as u8);
                    all.zeroize();
                }
            }
        }
    }

    #[cfg(test)]
    fn is_identity(&self) -> bool {
        self.insecure_identity
    }

    #[cfg(not(test))]
    fn is_identity(&self) -> bool {
        false
    }
}

#[cfg(target_arch = "x86_64")]
mod ni;

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
            let twin = Doubler(Aes::portable(domain.derive(5, 1)));
            assert_eq!(step.double(&mut a), twin.double(&mut b));
            assert_eq!(a, b);

            let fast = CorrelationHash::new(&domain, 5);
            let slow = CorrelationHash { cipher: Aes::portable(domain.derive(5, 7)), insecure_identity: false };
            let offsets = std::array::from_fn(|c| (c as u128 + 1) << (7 * c));
            let (mut bytes, mut twins) = (vec![[0; 16]; a.len()], vec![[0; 16]; a.len()]);
            fast.sixteen(&a, &offsets, &mut bytes);
            slow.sixteen(&b, &offsets, &mut twins);
            assert_eq!(bytes, twins);
            fast.hash(&mut a);
            slow.hash(&mut b);
            assert_eq!(a, b);
        }
    }

    #[test]
    fn children_are_what_the_half_tree_says() {
        let domain = Domain::new(&[3; 32], "client", "test");
        let cipher = Aes128::new(&domain.derive(5, 1).to_le_bytes().into());
        let step = Doubler::new(&domain, 5);
        for node in [0, 1, 1 << 64, u128::MAX, 0x0123456789abcdef_f00dcafedeadbeef] {
            let mixed = orthomorphism(node);
            let [left, right] = step.children(node);
            assert_eq!((left, left ^ right), (soft_encrypt(&cipher, mixed) ^ mixed, node));
        }
        // Both s and s + identity are one-to-one: the images of the unit vectors are independent.
        let units = || (0..128).map(|i| 1u128 << i);
        for map in [|x| orthomorphism(x), |x| orthomorphism(x) ^ x] {
            let mut basis: Vec<Block> = Vec::new();
            for mut image in units().map(map) {
                for &b in &basis {
                    image = image.min(image ^ b);
                }
                assert_ne!(image, 0, "an image depends on the others");
                basis.push(image);
            }
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
                    for batch in 0..100 {
                        let mut same = [42];
                        CorrelationHash::new(&Domain::new(&session, sender, purpose), batch).hash(&mut same);
                        assert!(seen.insert(same[0]), "a batch's hash was used twice");
                    }
                }
            }
        }
    }
}
