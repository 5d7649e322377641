//! Silent transfers: a few hundred kilobytes for a million, by a pseudorandom correlation generator.
//!
//! Boyle and others (eprint 2019/1159) with the expand-convolute code of [`super::code`]. The *holder* has a secret
//! offset D and seed trees whose leaves are v; the *chooser* knows each tree but for one leaf, at a place that only
//! it knows, where it gets v + y D instead. So w = v + e D for the sparse vector e of the noise values y. The code
//! compresses v, w and e alike; the compressed e is the chooser's random choice u, and w = v + u D goes through the
//! hash. For 1-of-2 transfers y = 1 and u is a bit. For 1-of-16 transfers y and u are elements of GF(16) and D is a
//! vector over GF(16), so that one correlation gives sixteen pads H(v + c D) (a subfield VOLE).
//!
//! The small transfers for the trees come from SoftSpoken in the same direction. Cost in a batch of 2^18: 0.67 bytes each
//! for 1-of-2 and 1.51 for 1-of-16 transfers; the receiver speaks first, then the sender. Every batch has a new offset,
//! new noise, a new code and new keys of the hashes, so that what a batch shows is worth guessing at for this batch alone.
//! The chooser learns S + y D of a tree whose leaves add up to S, and S is as good as random to it (see [`super::tree`]).
//! No step branches on or indexes by the noise.

use super::Block;
use super::aes::{CorrelationHash, Domain, Doubler};
use super::code::{Code, PAD};
use super::softspoken::{self, Chooser, Holder};
use super::tree;
use crate::error::Result;
use crate::net::{Channel, Kind};
use crate::random::SecretRng;
use zeroize::{Zeroize, Zeroizing};

/// Trees of a batch of 1-of-2 transfers: the weight of the regular noise.
const TREES: usize = 512;

/// One line of the parameter table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoiseLine {
    /// Base-2 logarithm of the transfers of a batch; the code has twice this length.
    pub log_outputs: usize,
    /// Noise values, one in each interval of equal length.
    pub noise_weight: usize,
    /// Base-2 logarithm of an interval: the depth of a tree.
    pub depth: usize,
}

/// The sizes of batches of 1-of-2 transfers. For all: code rate 1/2, expander weight 7 (4 regular), two convolutions of
/// window 25.
///
/// The claim is 128 bits against linear tests, the attacks by which such codes are judged (eprint 2019/1159, section
/// 5; 2023/882, section 2): a test that sees a codeword of relative weight d has bias (1 - 2d)^weight, and over GF(16),
/// where a noise value is one of 15 alike, (1 - 16 d / 15)^weight. No distance is proven for these sizes. No code of
/// this rate can be expected to do better than a random one, whose relative distance is 0.11, so that is what the
/// noise is set for: 2^-183 with 512 values for bits, 2^-184 with 1024 for GF(16). Implementations that count with 0.15
/// or 0.2, because lighter codewords are not known to be findable, take half the noise or less. Decoding by
/// information sets succeeds with at most (1/2)^512 per try at rate 1/2, with regular noise too.
pub const NOISE_TABLE: [NoiseLine; 3] = [
    NoiseLine { log_outputs: 14, noise_weight: TREES, depth: 6 },
    NoiseLine { log_outputs: 16, noise_weight: TREES, depth: 8 },
    NoiseLine { log_outputs: 18, noise_weight: TREES, depth: 10 },
];

impl NoiseLine {
    /// The line for a batch of 1-of-16 transfers of the same size: twice the noise, in intervals half as long.
    fn sixteen(self) -> Self {
        Self { noise_weight: 2 * self.noise_weight, depth: self.depth - 1, ..self }
    }
}

/// The relative minimum distance that a noise weight needs for `bits` of security against linear tests.
pub fn distance_needed(noise_weight: usize, bits: f64) -> f64 {
    (1.0 - (-bits / noise_weight as f64).exp2()) / 2.0
}

/// c times a vector of 32 elements of GF(16) = GF(2)[z] / (z^4 + z + 1), four bits each, for c = 0 to 15.
fn multiples(vector: Block) -> [Block; 16] {
    const TOP: u128 = 0x88888888_88888888_88888888_88888888;
    let mut power = vector;
    let mut out = [0; 16];
    for bit in 0..4 {
        for (c, sum) in out.iter_mut().enumerate() {
            *sum ^= power & tree::bit_mask((c >> bit) as u8);
        }
        let over = (power & TOP) >> 3;
        power = ((power & !TOP) << 1) ^ over ^ (over << 1);
    }
    out
}

/// Bytes of the holder's message for one tree.
fn tree_bytes(line: NoiseLine, sixteen: bool) -> usize {
    tree::message_len(line.depth) + 16 + if sixteen { 64 } else { 0 }
}

/// Small transfers that one tree takes.
fn transfers_per_tree(line: NoiseLine, sixteen: bool) -> usize {
    line.depth + if sixteen { 4 } else { 0 }
}

/// What the two sides of both kinds share: domains and the number of the batch.
struct Batches {
    domain: Domain,
    rng: SecretRng,
    next: u64,
    sixteen: bool,
    #[cfg(test)]
    insecure_identity: bool,
}

impl Batches {
    fn new(session: &[u8; 32], sender: &str, sixteen: bool, rng: SecretRng) -> Self {
        let purpose = if sixteen { "silent 16" } else { "silent 2" };
        Self {
            domain: Domain::new(session, sender, purpose),
            rng,
            next: 0,
            sixteen,
            #[cfg(test)]
            insecure_identity: false,
        }
    }

    /// The noise of a batch of this kind.
    fn noise(&self, line: NoiseLine) -> NoiseLine {
        if self.sixteen { line.sixteen() } else { line }
    }

    /// The public functions of the next batch.
    fn begin(&mut self, line: NoiseLine) -> (Doubler, Code, CorrelationHash) {
        let number = self.next;
        self.next += 1;
        #[cfg_attr(not(test), allow(unused_mut))]
        let mut hash = CorrelationHash::new(&self.domain, number);
        #[cfg(test)]
        {
            hash.insecure_identity = self.insecure_identity;
        }
        (Doubler::new(&self.domain, number), Code::new(&self.domain, number, line.log_outputs), hash)
    }
}

/// The working memory of a batch, kept from batch to batch: fresh pages cost as much time as what is written to them.
#[derive(Default)]
pub(super) struct Scratch {
    leaves: Vec<Block>,
    sparse: Vec<u8>,
}

impl Scratch {
    /// Room for v or w with the code's zeros behind it, and for e; what is in both is to be overwritten.
    fn room(&mut self, line: NoiseLine) -> (&mut [Block], &mut [u8]) {
        let values = 2 << line.log_outputs;
        if self.sparse.len() < values {
            self.wipe();
            (self.leaves, self.sparse) = (vec![0; values + PAD], vec![0; values]);
        }
        let leaves = &mut self.leaves[..values + PAD];
        leaves[values..].fill(0);
        (leaves, &mut self.sparse[..values])
    }

    /// Wipes what a batch left: the caller has its copy, and the next batch overwrites the rest.
    fn wipe_outputs(&mut self, line: NoiseLine) {
        self.leaves[..1 << line.log_outputs].zeroize();
        self.sparse[..1 << line.log_outputs].zeroize();
    }

    fn wipe(&mut self) {
        self.leaves.zeroize();
        self.sparse.zeroize();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.wipe();
    }
}

/// The holder's compressed v, the multiples of the offset, and the hash of the batch.
type Correlated<'a> = (&'a [Block], Zeroizing<[Block; 16]>, CorrelationHash);

fn block(bytes: &[u8]) -> Block {
    u128::from_le_bytes(bytes.try_into().expect("the caller cuts 16 bytes"))
}

/// The side that knows all pads.
pub(super) struct SilentHolder {
    batches: Batches,
}

impl SilentHolder {
    /// For 1-of-2 or 1-of-16 transfers that `sender` sends.
    pub(super) fn new(session: &[u8; 32], sender: &str, sixteen: bool, rng: SecretRng) -> Self {
        Self { batches: Batches::new(session, sender, sixteen, rng) }
    }

    /// Leaves the hash out, to show what it is for.
    #[cfg(test)]
    pub(super) fn insecure_hash_off(&mut self) {
        self.batches.insecure_identity = true;
    }

    /// The compressed v and the multiples of the offset.
    fn correlate<'a>(
        &mut self,
        channel: &mut Channel,
        small: &mut Holder,
        line: NoiseLine,
        scratch: &'a mut Scratch,
    ) -> Result<Correlated<'a>> {
        let (sixteen, line) = (self.batches.sixteen, self.batches.noise(line));
        let trees = line.noise_weight;
        let (step, code, hash) = self.batches.begin(line);
        let mut bytes = Zeroizing::new([0; 16]);
        self.batches.rng.fill(&mut bytes[..]);
        let offsets = Zeroizing::new(multiples(block(&bytes[..])));
        let each = transfers_per_tree(line, sixteen);
        let needed = softspoken::rounded(trees * each);
        let mut pads = Zeroizing::new(Vec::with_capacity(needed));
        small.extend(channel, needed, &mut pads)?;
        let flips = if sixteen { channel.receive(Kind::OtExtension, trees)? } else { Vec::new() };
        if flips.iter().any(|&f| f > 15) {
            return Err(channel.refuse("a correction of noise values has more than four bits"));
        }
        let (leaves, _) = scratch.room(line);
        let mut message = Vec::with_capacity(trees * tree_bytes(line, sixteen));
        for (j, (own, pads)) in
            leaves.chunks_exact_mut(1 << line.depth).zip(pads.chunks_exact(each)).take(trees).enumerate()
        {
            let (path, value) = pads.split_at(line.depth);
            let total = tree::grow(&step, path, own, &mut message);
            if sixteen {
                let mut mask = Zeroizing::new(0);
                for (bit, pair) in value.iter().enumerate() {
                    message.extend_from_slice(&(pair[0] ^ pair[1] ^ offsets[1 << bit]).to_le_bytes());
                    let [zero, one] = *pair;
                    *mask ^= zero ^ ((zero ^ one) & tree::bit_mask(flips[j] >> bit));
                }
                message.extend_from_slice(&(total ^ *mask).to_le_bytes());
            } else {
                message.extend_from_slice(&(total ^ offsets[1]).to_le_bytes());
            }
        }
        channel.send(Kind::OtExtension, &message)?;
        channel.flush()?;
        code.compress(leaves);
        Ok((&leaves[..1 << line.log_outputs], offsets, hash))
    }

    /// A batch of 1-of-2 transfers, appended to `out`.
    pub(super) fn extend(
        &mut self,
        channel: &mut Channel,
        small: &mut Holder,
        line: NoiseLine,
        scratch: &mut Scratch,
        out: &mut Vec<[Block; 2]>,
    ) -> Result<()> {
        debug_assert!(!self.batches.sixteen);
        let (values, offsets, hash) = self.correlate(channel, small, line, scratch)?;
        for part in values.chunks_exact(128) {
            let start = out.len();
            out.extend(part.iter().map(|v| [*v, v ^ offsets[1]]));
            hash.hash(out[start..].as_flattened_mut());
        }
        scratch.wipe_outputs(line);
        Ok(())
    }

    /// A batch of 1-of-16 transfers, appended to `out`.
    pub(super) fn extend16(
        &mut self,
        channel: &mut Channel,
        small: &mut Holder,
        line: NoiseLine,
        scratch: &mut Scratch,
        out: &mut Vec<[u8; 16]>,
    ) -> Result<()> {
        debug_assert!(self.batches.sixteen);
        let (values, offsets, hash) = self.correlate(channel, small, line, scratch)?;
        let mut pads = Zeroizing::new([[0; 16]; 128]);
        for part in values.chunks_exact(128) {
            hash.sixteen(part, &offsets, &mut pads[..]);
            out.extend_from_slice(&pads[..]);
        }
        scratch.wipe_outputs(line);
        Ok(())
    }
}

/// The side that knows one pad and the choice.
pub(super) struct SilentChooser {
    batches: Batches,
}

impl SilentChooser {
    /// For 1-of-2 or 1-of-16 transfers that `sender` sends.
    pub(super) fn new(session: &[u8; 32], sender: &str, sixteen: bool, rng: SecretRng) -> Self {
        Self { batches: Batches::new(session, sender, sixteen, rng) }
    }

    /// Leaves the hash out, to show what it is for.
    #[cfg(test)]
    pub(super) fn insecure_hash_off(&mut self) {
        self.batches.insecure_identity = true;
    }

    /// A batch of either kind: the choices (bits, or four bits), and the 128-bit pads.
    fn correlate<'a>(
        &mut self,
        channel: &mut Channel,
        small: &mut Chooser,
        line: NoiseLine,
        scratch: &'a mut Scratch,
    ) -> Result<(&'a [u8], &'a [Block])> {
        let (sixteen, line) = (self.batches.sixteen, self.batches.noise(line));
        let trees = line.noise_weight;
        let (step, code, hash) = self.batches.begin(line);
        let each = transfers_per_tree(line, sixteen);
        let needed = softspoken::rounded(trees * each);
        let (mut bits, mut pads) =
            (Zeroizing::new(Vec::with_capacity(needed)), Zeroizing::new(Vec::with_capacity(needed)));
        small.extend(channel, needed, &mut bits, &mut pads)?;
        let mut noise = Zeroizing::new(vec![1u8; trees]);
        if sixteen {
            let mut flips = Vec::with_capacity(trees);
            for (y, bits) in noise.iter_mut().zip(bits.chunks_exact(each)) {
                // Uniform over the 15 values that are not zero; a rejected draw tells nothing about the next.
                *y = 0;
                while *y == 0 {
                    *y = (self.batches.rng.next_u64() & 15) as u8;
                }
                let value = &bits[line.depth..];
                flips.push(*y ^ (value[0] | value[1] << 1 | value[2] << 2 | value[3] << 3));
            }
            channel.send(Kind::OtExtension, &flips)?;
        }
        let own_bytes = tree_bytes(line, sixteen);
        let message = channel.receive(Kind::OtExtension, trees * own_bytes)?;
        let (leaves, sparse) = scratch.room(line);
        let intervals = leaves.chunks_exact_mut(1 << line.depth).zip(sparse.chunks_exact_mut(1 << line.depth));
        let transfers = bits.chunks_exact(each).zip(pads.chunks_exact(each));
        for (((leaves, sparse), (bits, pads)), (message, &y)) in
            intervals.zip(transfers).zip(message.chunks_exact(own_bytes).zip(noise.iter()))
        {
            let (sums, rest) = message.split_at(tree::message_len(line.depth));
            let (path, total) = tree::regrow(&step, &bits[..line.depth], &pads[..line.depth], sums, leaves);
            let (products, closing) = rest.split_at(rest.len() - 16);
            let mut value = Zeroizing::new(block(closing) ^ total);
            for (bit, product) in products.chunks_exact(16).enumerate() {
                *value ^= pads[line.depth + bit] ^ (block(product) & tree::bit_mask(y >> bit));
            }
            tree::add_to_node(leaves, path, *value);
            for (place, e) in sparse.iter_mut().enumerate() {
                // One where the places are equal, which leaves zero, else zero.
                let here = ((place ^ path) as u32).wrapping_sub(1) >> 31;
                *e = (here as u8).wrapping_neg() & y;
            }
        }
        code.compress_both(leaves, sparse);
        let outputs = 1 << line.log_outputs;
        hash.hash(&mut leaves[..outputs]);
        Ok((&sparse[..outputs], &leaves[..outputs]))
    }

    /// A batch of 1-of-2 transfers, appended to `choices` and `pads`.
    pub(super) fn extend(
        &mut self,
        channel: &mut Channel,
        small: &mut Chooser,
        line: NoiseLine,
        scratch: &mut Scratch,
        choices: &mut Vec<u8>,
        pads: &mut Vec<Block>,
    ) -> Result<()> {
        debug_assert!(!self.batches.sixteen);
        let (chosen, values) = self.correlate(channel, small, line, scratch)?;
        choices.extend_from_slice(chosen);
        pads.extend_from_slice(values);
        scratch.wipe_outputs(line);
        Ok(())
    }

    /// A batch of 1-of-16 transfers, appended to `choices` and `pads`.
    pub(super) fn extend16(
        &mut self,
        channel: &mut Channel,
        small: &mut Chooser,
        line: NoiseLine,
        scratch: &mut Scratch,
        choices: &mut Vec<u8>,
        pads: &mut Vec<u8>,
    ) -> Result<()> {
        debug_assert!(self.batches.sixteen);
        let (chosen, values) = self.correlate(channel, small, line, scratch)?;
        choices.extend_from_slice(chosen);
        pads.extend(values.iter().map(|&pad| pad as u8));
        scratch.wipe_outputs(line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_claims_what_its_noise_gives() {
        for line in NOISE_TABLE {
            assert_eq!(line.noise_weight << line.depth, 2 << line.log_outputs);
            let sixteen = line.sixteen();
            assert_eq!(sixteen.noise_weight << sixteen.depth, 2 << line.log_outputs);
            assert!(distance_needed(line.noise_weight, 128.0) < 0.08);
            // The distance of a random code of rate 1/2: where the binary entropy is 1/2.
            let d = 0.11f64;
            assert!((-d * d.log2() - (1.0 - d) * (1.0 - d).log2() - 0.5).abs() < 1e-3);
            let bits = line.noise_weight as f64 * (1.0 - 2.0 * d).log2();
            let elements = sixteen.noise_weight as f64 * (1.0 - 16.0 / 15.0 * d).log2();
            assert!(bits < -180.0 && elements < -180.0, "{bits} {elements}");
        }
    }

    #[test]
    fn multiples_form_the_field_of_sixteen() {
        // One element, in the lowest four bits: the table must be the multiplication table of a field.
        let table: Vec<[Block; 16]> = (0..16).map(multiples).collect();
        for a in 0..16usize {
            assert_eq!((table[a][0], table[a][1]), (0, a as u128));
            for b in 0..16usize {
                assert_eq!(table[a][b], table[b][a]);
                assert!(a == 0 || b == 0 || table[a][b] != 0);
                for c in 0..16usize {
                    assert_eq!(table[a][b ^ c], table[a][b] ^ table[a][c]);
                    assert_eq!(table[table[a][b] as usize][c], table[a][table[b][c] as usize]);
                }
            }
        }
        let vector = 0x0123456789abcdef_f00dcafedeadbeef;
        for (c, &product) in multiples(vector).iter().enumerate() {
            for place in 0..32 {
                assert_eq!(product >> (4 * place) & 15, table[(vector >> (4 * place) & 15) as usize][c]);
            }
        }
    }
}
