//! Every decoder that reads a peer's bytes or a store's, against at least 40,000 bad inputs each: every truncation,
//! flips of one bit, extreme values in every number, values outside the modulus, bytes after the end, random damage; and
//! then other random damage in every run, for as long as `CLOISTER_FUZZ_SECONDS` says.
//!
//! The twin of the fuzz targets in `rust/fuzz`, for a stable compiler; both read one list of decoders. A decoder must
//! accept exactly what the encoder writes: whatever it accepts is encoded again and must be the same bytes.
#![cfg(feature = "insecure-test-dealer")]

mod hostile_common;

use cloister_core::field::{self, P, P_BITS};
use cloister_core::net::Kind;
use cloister_core::net::frame::{self, Due};
use cloister_core::random::SecretRng;
use cloister_core::rlwe::SeededCiphertext;
use cloister_core::session::{Hello, Terms};
use cloister_core::testing::decoders;
use cloister_core::{Role, rlwe};
use hostile_common::{mutate, seconds_allowed, torture};
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

#[test]
fn of_the_session() {
    torture(&decoders::session());
}

#[test]
fn of_values() {
    torture(&decoders::values());
}

#[test]
fn of_the_encryption() {
    torture(&decoders::lattice());
}

#[test]
fn of_base_transfers() {
    torture(&decoders::transfers());
}

#[test]
fn of_the_store() {
    torture(&decoders::stored());
}

/// Damage that no earlier run has seen: no fixed seed. What fails is printed, so nothing else has to be known.
#[test]
fn any_damage_in_the_time_allowed() {
    let all = decoders::all();
    let each = seconds_allowed() / all.len() as u32;
    let mut rng = SecretRng::from_os();
    for decoder in &all {
        let (started, mut cases) = (Instant::now(), 0u64);
        while started.elapsed() < each {
            let bad = mutate(&decoder.good, &mut rng);
            if catch_unwind(AssertUnwindSafe(|| decoder.accepts(&bad))).is_err() {
                panic!("{} panics, see above, at {} bytes: {:02x?}", decoder.name, bad.len(), decoders::head(&bad));
            }
            cases += 1;
        }
        println!("{}: {cases} inputs with damage of this run", decoder.name);
    }
}

#[test]
fn numbers_outside_the_modulus() {
    for at in 0..9 {
        for outside in [P, P + 1, P + 2, (1 << P_BITS) - 1] {
            let mut values = vec![0; 9];
            values[at] = outside;
            assert!(field::unpack(&field::pack_bits(&values, P_BITS), 9).is_err());
        }
    }
    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    let good = rlwe::SecretKey::generate(&mut rng).encrypt(1, &vec![5; rlwe::N], &mut rng).to_bytes();
    for level in [0, 7, 1000, usize::MAX] {
        assert!(SeededCiphertext::from_bytes(&good, level).is_err());
    }
    for at in (8..good.len() - 7).step_by(1001) {
        let mut outside = good.clone();
        outside[at..at + 7].fill(0xff);
        assert!(SeededCiphertext::from_bytes(&outside, 1).is_err(), "25 bits of ones are above every prime");
    }
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
        let mut terms = Terms::new(digest, primes, bits, digest);
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
