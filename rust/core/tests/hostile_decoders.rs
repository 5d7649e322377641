//! Every decoder that reads a peer's bytes, against at least 40,000 bad inputs each: every truncation, every flip of
//! one bit, extreme values in every length, numbers outside the modulus, bytes after the end, and random damage.
//!
//! The twin of the fuzz targets in `rust/fuzz`, for a stable compiler. A decoder must accept exactly what the encoder
//! writes: whatever it accepts is encoded again and must be the same bytes.

mod session_common;

use cloister_core::Role;
use cloister_core::field::{self, P, P_BITS};
use cloister_core::net::Kind;
use cloister_core::net::frame::{self, Due};
use cloister_core::net::identity::{Fingerprint, Identity};
use cloister_core::random::SecretRng;
use cloister_core::session::{Confirm, Hello};
use proptest::prelude::*;
use session_common::*;
use std::time::{Duration, Instant};

const LEAST: usize = 40_000;
const EXTREMES: [u64; 12] =
    [0, 1, 2, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0xffff_ffff_ffff_ffff];

/// A decoder on trial. `decode` gives back the encoding of what it accepted.
struct Trial<F> {
    name: &'static str,
    decode: F,
    cases: usize,
    accepted: usize,
    slowest: Duration,
}

impl<F: Fn(&[u8]) -> Option<Vec<u8>>> Trial<F> {
    fn input(&mut self, bytes: &[u8]) {
        let started = Instant::now();
        let outcome = (self.decode)(bytes);
        self.slowest = self.slowest.max(started.elapsed());
        self.cases += 1;
        if let Some(again) = outcome {
            self.accepted += 1;
            assert!(again == bytes, "{} accepted {bytes:02x?}, but writes {again:02x?}", self.name);
        }
    }

    /// The systematic damage.
    fn damage(&mut self, message: &[u8], lengths: &[(usize, usize)]) {
        for end in 0..message.len() {
            self.input(&message[..end]);
        }
        for bit in 0..8 * message.len().min(4096) {
            let mut bad = message.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            self.input(&bad);
        }
        for &(at, width) in lengths {
            for value in EXTREMES {
                let mut bad = message.to_vec();
                bad[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                self.input(&bad);
            }
        }
        for more in 1..100 {
            for byte in [0, 1, 0xff] {
                self.input(&[message, &vec![byte; more]].concat());
            }
        }
    }

    /// Random damage, up to the number of cases that a decoder must have seen.
    fn fill_up(&mut self, good: &[Vec<u8>]) {
        let mut rng = SecretRng::from_insecure_fixed_seed(7);
        let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
        while self.cases < LEAST {
            let mut bad = good[below(good.len())].clone();
            for _ in 0..1 + below(6) {
                if bad.is_empty() {
                    break;
                }
                let at = below(bad.len());
                match below(5) {
                    0 => bad[at] = below(256) as u8,
                    1 => drop(bad.remove(at)),
                    2 => bad.insert(at, below(256) as u8),
                    3 => bad.truncate(at),
                    _ => bad[at..].iter_mut().for_each(|b| *b = below(256) as u8),
                }
            }
            self.input(&bad);
        }
    }
}

fn torture(
    name: &'static str,
    good: &[Vec<u8>],
    lengths: &[(usize, usize)],
    decode: impl Fn(&[u8]) -> Option<Vec<u8>>,
) {
    let mut trial = Trial { name, decode, cases: 0, accepted: 0, slowest: Duration::ZERO };
    for message in good {
        assert_eq!((trial.decode)(message).as_deref(), Some(&message[..]), "{name}: a good message comes back");
        trial.damage(message, lengths);
    }
    trial.fill_up(good);
    let Trial { cases, accepted, slowest, .. } = trial;
    println!("{name}: {cases} bad inputs, {accepted} of them well-formed, slowest {slowest:?}");
    assert!(slowest < Duration::from_secs(1));
}

#[test]
fn frame_header() {
    let due = Due { kind: Kind::Opening, sequence: 5, least: 10, most: 1000 };
    let good: Vec<_> = [10, 500, 1000].map(|n| frame::encode(due.kind, n, due.sequence).to_vec()).into();
    torture("frame header", &good, &[(0, 4), (8, 8)], |bytes| {
        let length = frame::decode(bytes.try_into().ok()?, &due).ok()?;
        assert!((due.least..=due.most).contains(&length));
        Some(frame::encode(due.kind, length as u32, due.sequence).to_vec())
    });
}

#[test]
fn hello() {
    let good: Vec<_> = [&b""[..], b"store marks of some length"]
        .map(|marks| Hello::new(Role::Client, &terms(), [5; 32], marks).encode())
        .into();
    // Where the two bytes of each field's length stand.
    let mut lengths = Vec::new();
    let mut at = 8;
    while at < good[0].len() {
        lengths.push((at + 1, 2));
        at += 3 + usize::from(u16::from_le_bytes([good[0][at + 1], good[0][at + 2]]));
    }
    assert_eq!(lengths.len(), 15);
    torture("hello", &good, &lengths, |bytes| Some(Hello::decode(bytes).ok()?.encode()));
}

#[test]
fn confirmation() {
    let right = Confirm { tag: [1; 32], nonces: [2; 16], marks: [3; 16] };
    let wire = right.encode();
    torture("confirmation", std::slice::from_ref(&wire), &[], |bytes| right.check(bytes).ok().map(|()| wire.clone()));
}

#[test]
fn field_vectors() {
    for (name, n) in [("field vector of 1", 1), ("field vector of 7", 7), ("field vector of 100", 100)] {
        let mut rng = SecretRng::from_insecure_fixed_seed(n as u64);
        let good = [field::pack(&field::random_vector(&mut rng, n)), field::pack(&vec![P - 1; n])];
        torture(name, &good, &[], |bytes| {
            let values = field::unpack(bytes, n).ok()?;
            assert!(values.len() == n && values.iter().all(|&v| v < P));
            Some(field::pack(&values))
        });
    }
    // Numbers outside the modulus, in every place.
    for at in 0..9 {
        for outside in [P, P + 1, P + 2, (1 << P_BITS) - 1] {
            let mut values = vec![0; 9];
            values[at] = outside;
            assert!(field::unpack(&field::pack_bits(&values, P_BITS), 9).is_err());
        }
    }
}

#[test]
fn packed_bits() {
    for (name, bits) in [("1 bit", 1), ("5 bits", 5), ("20 bits", 20), ("33 bits", 33), ("57 bits", 57)] {
        let good = [field::pack_bits(&(0..50).map(|i| i * 0x9e37_79b9_7f4a).collect::<Vec<_>>(), bits)];
        torture(name, &good, &[], |bytes| Some(field::pack_bits(&field::unpack_bits(bytes, 50, bits).ok()?, bits)));
    }
}

#[test]
fn fingerprint_text() {
    let good = [Fingerprint([0xa5; 32]).to_string().into_bytes()];
    torture("fingerprint", &good, &[], |bytes| {
        let print: Fingerprint = std::str::from_utf8(bytes).ok()?.parse().ok()?;
        // Capital digits are read too; they are the one second spelling.
        Some(print.to_string().into_bytes()).filter(|text| text == bytes)
    });
}

#[test]
fn identity_files() {
    let made = someone(cloister_core::net::identity::KeyKind::P256).files;
    let good = [made.certificate.clone().into_bytes()];
    torture("certificate file", &good, &[], |bytes| {
        // Only that nothing panics: PEM has many spellings of one certificate.
        let text = std::str::from_utf8(bytes).ok()?;
        let read = Identity::from_pem(text, &made.key);
        read.ok().filter(|_| text == made.certificate).map(|_| bytes.to_vec())
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_as_a_hello(bytes in proptest::collection::vec(any::<u8>(), 0..600), good in any::<bool>()) {
        let bytes = if good { [&b"CLOISTER\x01\x02\x00\x01\x00"[..], &bytes].concat() } else { bytes };
        if let Ok(hello) = Hello::decode(&bytes) {
            prop_assert_eq!(hello.encode(), bytes);
        }
    }

    #[test]
    fn any_hello_comes_back(
        digest in any::<[u8; 32]>(), p in any::<u64>(), degree in any::<u32>(),
        primes in proptest::collection::vec(any::<u64>(), 0..16), bits in any::<u16>(),
        f in any::<u8>(), nonce in any::<[u8; 32]>(), marks in proptest::collection::vec(any::<u8>(), 0..4096),
    ) {
        let mut terms = cloister_core::session::Terms::new(digest, primes, bits, digest);
        (terms.p, terms.ring_degree, terms.fraction_bits) = (p, degree, f);
        let hello = Hello::new(Role::Server, &terms, nonce, &marks);
        prop_assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
    }

    #[test]
    fn any_bytes_as_a_vector(bytes in proptest::collection::vec(any::<u8>(), 0..200), n in 0usize..40, bits in 1usize..=57) {
        if let Ok(values) = field::unpack_bits(&bytes, n, bits) {
            prop_assert_eq!(field::pack_bits(&values, bits), bytes);
        }
    }

    #[test]
    fn any_bytes_as_a_frame_header(bytes in any::<[u8; 16]>(), sequence in any::<u64>(), most in any::<u32>()) {
        let due = Due { kind: Kind::Answer, sequence, least: 0, most: most as usize };
        if let Ok(length) = frame::decode(&bytes, &due) {
            prop_assert!(length <= most as usize);
        }
    }
}
