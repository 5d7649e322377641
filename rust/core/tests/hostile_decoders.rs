//! Every decoder that reads a peer's bytes, against at least 40,000 bad inputs each: every truncation, every flip of
//! one bit, extreme values in every length, numbers outside the modulus, bytes after the end, and random damage.
//!
//! The twin of the fuzz targets in `rust/fuzz`, for a stable compiler. A decoder must accept exactly what the encoder
//! writes: whatever it accepts is encoded again and must be the same bytes.

mod hostile_common;
mod session_common;

use cloister_core::Role;
use cloister_core::field::{self, P, P_BITS};
use cloister_core::net::Kind;
use cloister_core::net::frame::{self, Due};
use cloister_core::net::identity::{Fingerprint, Identity};
use cloister_core::random::SecretRng;
use cloister_core::session::{Confirm, Hello};
use hostile_common::torture;
use proptest::prelude::*;
use session_common::*;

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
    assert_eq!(lengths.len(), 16);
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
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

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
