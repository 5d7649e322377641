//! Every decoder of bytes that come from elsewhere, in one list: the fuzz targets, the tests of bad inputs and the
//! tests of memory all go through it, so a decoder is tried by all of them or by none.
//!
//! What is decoded inside a protocol step, behind random choices of its own, is in [`super::replay`].

use crate::field::{self, P};
use crate::matmul::triples::foreign as triples;
use crate::net::Kind;
use crate::net::frame::{self, Due};
use crate::net::identity::{Fingerprint, Identity, KeyKind, keygen};
use crate::ot::foreign as base;
use crate::ot::store::{Lane, foreign as store};
use crate::party::Role;
use crate::random::SecretRng;
use crate::rlwe::params::Shape;
use crate::rlwe::{Answer, AnswerPlan, Automorphism, N, PublicKey, RotationKeys, SecretKey, SeededCiphertext};
use crate::session::{Confirm, Hello, Terms};

/// Writes again what was accepted.
pub type Encode = Box<dyn FnOnce() -> Vec<u8>>;
type Decode = Box<dyn Fn(&[u8]) -> Option<Encode> + Send + Sync>;

/// One decoder.
pub struct Decoder {
    /// What it reads.
    pub name: String,
    /// Messages that it accepts.
    pub good: Vec<Vec<u8>>,
    /// Where lengths and counters stand: place and width.
    pub numbers: Vec<(usize, usize)>,
    decode: Decode,
}

impl Decoder {
    fn new<T: 'static>(
        name: impl Into<String>,
        good: impl Into<Vec<Vec<u8>>>,
        read: impl Fn(&[u8]) -> Option<T> + Send + Sync + 'static,
        write: impl Fn(T) -> Vec<u8> + Clone + Send + Sync + 'static,
    ) -> Self {
        let decode: Decode = Box::new(move |bytes| {
            let value = read(bytes)?;
            let write = write.clone();
            Some(Box::new(move || write(value)))
        });
        Self { name: name.into(), good: good.into(), numbers: Vec::new(), decode }
    }

    /// For decoders that answer with the bytes themselves.
    fn rewriting(
        name: impl Into<String>,
        good: impl Into<Vec<Vec<u8>>>,
        read: impl Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, good, read, |bytes| bytes)
    }

    fn numbers(mut self, places: &[(usize, usize)]) -> Self {
        self.numbers = places.to_vec();
        self
    }

    /// Decodes. What is accepted can be written again.
    pub fn decode(&self, bytes: &[u8]) -> Option<Encode> {
        (self.decode)(bytes)
    }

    /// Whether it is accepted; panics if it is and would be written in another way.
    pub fn accepts(&self, bytes: &[u8]) -> bool {
        let Some(encode) = self.decode(bytes) else { return false };
        let again = encode();
        assert!(again == bytes, "{} accepts {:02x?} and writes {:02x?}", self.name, head(bytes), head(&again));
        true
    }
}

/// The beginning of a message, for a report.
pub fn head(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(512)]
}

/// All of them.
pub fn all() -> Vec<Decoder> {
    [session(), values(), lattice(), transfers(), stored()].into_iter().flatten().collect()
}

/// Headers, the hello, identities.
pub fn session() -> Vec<Decoder> {
    let due = Due { kind: Kind::Opening, sequence: 5, least: 10, most: 1000 };
    let header = Decoder::new(
        "frame header",
        [10, 500, 1000].map(|n| frame::encode(due.kind, n, due.sequence).to_vec()),
        move |bytes| frame::decode(bytes.try_into().ok()?, &due).ok(),
        move |length| frame::encode(due.kind, length as u32, due.sequence).to_vec(),
    );
    let terms = Terms::new([3; 32], vec![33538049, 33292289, 33177601], 40, [9; 32]);
    let hellos = [&b""[..], b"store marks of some length"]
        .map(|marks| Hello::new(Role::Client, &terms, [5; 32], marks).encode());
    // Where the two bytes of each field's length stand.
    let (mut lengths, mut at) = (Vec::new(), 8);
    while at < hellos[0].len() {
        lengths.push((at + 1, 2));
        at += 3 + usize::from(u16::from_le_bytes([hellos[0][at + 1], hellos[0][at + 2]]));
    }
    let hello = Decoder::new("hello", hellos, |bytes| Hello::decode(bytes).ok(), |hello| hello.encode());
    let right = Confirm { tag: [1; 32], nonces: [2; 16], marks: [3; 16] };
    let wire = right.encode();
    let confirm = Decoder::new("confirmation", [wire.clone()], move |b| right.check(b).ok(), move |()| wire.clone());
    let print = Decoder::rewriting("fingerprint", [Fingerprint([0xa5; 32]).to_string().into_bytes()], |bytes| {
        let print: Fingerprint = std::str::from_utf8(bytes).ok()?.parse().ok()?;
        // Capital digits are read too; they are the one second spelling.
        Some(print.to_string().into_bytes()).filter(|text| text == bytes)
    });
    let made = keygen(KeyKind::P256).expect("a key can be made");
    let certificate = Decoder::rewriting("certificate", [made.certificate.clone().into_bytes()], move |bytes| {
        // Only that nothing panics: PEM has many spellings of one certificate.
        let text = std::str::from_utf8(bytes).ok()?;
        let read = Identity::from_pem(text, &made.key);
        read.ok().filter(|_| text == made.certificate).map(|_| bytes.to_vec())
    });
    vec![header.numbers(&[(0, 4), (8, 8)]), hello.numbers(&lengths), confirm, print, certificate]
}

/// Packed vectors.
pub fn values() -> Vec<Decoder> {
    let elements = |n: usize| {
        let mut rng = SecretRng::from_insecure_fixed_seed(n as u64);
        let good = [field::pack(&field::random_vector(&mut rng, n)), field::pack(&vec![P - 1; n])];
        let read = move |bytes: &[u8]| {
            let values = field::unpack(bytes, n).ok()?;
            assert!(values.len() == n && values.iter().all(|&v| v < P));
            Some(values)
        };
        Decoder::new(format!("field vector of {n}"), good, read, |values| field::pack(&values))
    };
    let packed = |bits: usize| {
        let good = [field::pack_bits(&(0..50).map(|i| i * 0x9e37_79b9_7f4a).collect::<Vec<_>>(), bits)];
        let read = move |bytes: &[u8]| field::unpack_bits(bytes, 50, bits).ok();
        Decoder::new(format!("50 values of {bits} bits"), good, read, move |values| field::pack_bits(&values, bits))
    };
    [1, 7, 100].map(elements).into_iter().chain([1, 5, 20, 33, 57].map(packed)).collect()
}

/// The plan of an answer in slots, and of one in coefficients.
fn plans() -> [AnswerPlan; 2] {
    let slots = Shape { level: 6, products: 4, nonzero: 16, magnitude: 1e12, rotations: 0 };
    let coefficients = Shape { level: 3, products: 8, nonzero: N, magnitude: 32768.0, rotations: 0 };
    [
        AnswerPlan::slots(&slots).expect("a plan of this shape fits"),
        AnswerPlan::coefficients(&coefficients).expect("a plan of this shape fits"),
    ]
}

/// Requests, answers and keys of the lattice encryption.
pub fn lattice() -> Vec<Decoder> {
    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    let key = SecretKey::generate(&mut rng);
    let mut out = Vec::new();
    for level in [1, 6] {
        let good = [key.encrypt(level, &vec![5; N], &mut rng).to_bytes()];
        let read = move |bytes: &[u8]| SeededCiphertext::from_bytes(bytes, level).ok();
        out.push(Decoder::new(format!("request of level {level}"), good, read, |r| r.to_bytes()).numbers(&[(0, 8)]));
    }
    out.push(
        // Nothing of it is written again: a short request is expanded at once.
        Decoder::rewriting("short request", [triples::good_short_request()], |bytes| {
            triples::short_request(bytes).then(|| bytes.to_vec())
        })
        .numbers(&[(0, 8)]),
    );
    let [slots, coefficients] = plans();
    for (what, plan, listed) in
        [("slots", slots, 1), ("slots", slots, 7), ("slots", slots, N), ("coefficients", coefficients, 33)]
    {
        let mut bytes = vec![0; plan.answer_len(listed)];
        rng.fill(&mut bytes);
        // The last bits are padding, which must be zero: the widest mask of the last byte that the decoder accepts.
        let good = (0..=0xffu8).rev().find_map(|mask| {
            let mut bytes = bytes.clone();
            *bytes.last_mut()? &= mask;
            Answer::from_bytes(&bytes, &plan, listed).ok().map(|_| bytes)
        });
        let good = [good.expect("zero is padding")];
        let read = move |bytes: &[u8]| Answer::from_bytes(bytes, &plan, listed).ok();
        out.push(Decoder::new(format!("answer of {listed} {what}"), good, read, move |a| a.to_bytes(&plan)));
    }
    let good = [key.public_key(&[7; 32], &mut rng).to_bytes()];
    out.push(Decoder::new("public key", good, |b| PublicKey::from_bytes(b, &[7; 32]).ok(), |key| key.to_bytes()));
    for set in
        [vec![], vec![Automorphism::new(1, false)], vec![Automorphism::new(1, false), Automorphism::new(2, true)]]
    {
        let good = [key.rotation_keys(&set, &mut rng).to_bytes()];
        let name = format!("{} rotation keys", set.len());
        out.push(Decoder::new(name, good, move |b| RotationKeys::from_bytes(b, &set).ok(), |keys| keys.to_bytes()));
    }
    out
}

/// What base transfers read.
pub fn transfers() -> Vec<Decoder> {
    let mut rng = SecretRng::from_insecure_fixed_seed(2);
    let points: Vec<Vec<u8>> = (0..4u8).map(|i| base::good_point(&[i + 1; 64])).collect();
    let mut vector = vec![0; 1152];
    rng.fill(&mut vector);
    // The high nibble of every second number at most 12, and the other way round: below 3329 in any case.
    vector.chunks_exact_mut(3).for_each(|three| {
        three[1] = three[1] & 0xf0 | three[1] & 0x0f & 0x0b;
        three[2] &= 0xbf;
    });
    vec![
        Decoder::rewriting("point of a base transfer", points, base::point),
        Decoder::rewriting("key of a base transfer", [vector], base::key_vector),
    ]
}

/// What the store of correlations reads, from the peer and from the disk.
pub fn stored() -> Vec<Decoder> {
    let counters: Vec<_> = (0..3).flat_map(|lane| (0..4).map(move |k| (128 + 51 * lane + 3 + 8 * k, 8))).collect();
    let blocks = [
        (Lane::PadsFromClient, Role::Client),
        (Lane::PadsFromClient, Role::Server),
        (Lane::Pads16FromServer, Role::Client),
        (Lane::Triples, Role::Client),
    ];
    let mut out = vec![
        Decoder::rewriting("store marks", store::good_marks(), store::marks).numbers(&counters),
        Decoder::rewriting("slot of a mark", store::good_mark_slots(), store::mark_slot),
        Decoder::rewriting("sealed slot of a mark", store::good_mark_slots(), store::sealed_mark_slot),
        Decoder::rewriting("head of an epoch file", [store::good_epoch_head()], store::epoch_head),
        Decoder::rewriting("slot of an epoch file", [store::good_epoch()], store::epoch),
        Decoder::rewriting("head of a segment", store::good_segment_heads(), store::segment_head).numbers(&[
            (31, 8),
            (39, 8),
            (47, 4),
        ]),
        Decoder::rewriting("sealed block", [store::good_sealed_block()], store::sealed_block),
    ];
    for (lane, role) in blocks {
        let good = [store::good_block(lane, role)];
        let name = format!("block of {} at the {role:?}", lane.name());
        out.push(Decoder::rewriting(name, good, move |bytes| store::block(lane, role, bytes)));
    }
    out
}

/// Lays `bytes` over a message at a place, and cuts the message after them if told to: how a fuzzer gets behind magic
/// words, MACs and right lengths.
pub fn lay_over(message: &[u8], at: usize, cut: bool, bytes: &[u8]) -> Vec<u8> {
    let mut out = message.to_vec();
    let at = at % (out.len() + 1);
    let end = (at + bytes.len()).min(out.len());
    out.splice(at..if cut { message.len() } else { end }, bytes.iter().copied());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decoder_accepts_its_good_messages_and_no_two_have_one_name() {
        let all = all();
        for decoder in &all {
            for good in &decoder.good {
                assert!(decoder.accepts(good), "{}", decoder.name);
                assert!(decoder.numbers.iter().all(|&(at, width)| at + width <= good.len()) || good.len() < 300);
            }
        }
        let names: std::collections::BTreeSet<_> = all.iter().map(|d| &d.name).collect();
        assert_eq!(names.len(), all.len());
    }
}
