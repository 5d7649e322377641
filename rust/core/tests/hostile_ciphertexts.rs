//! The decoders of requests, answers and keys against bad inputs; see `hostile_decoders.rs` for the method.

mod hostile_common;

use cloister_core::random::SecretRng;
use cloister_core::rlwe::params::Shape;
use cloister_core::rlwe::{Answer, AnswerPlan, Automorphism, N, PublicKey, RotationKeys, SecretKey, SeededCiphertext};
use hostile_common::torture;

fn key() -> (SecretKey, SecretRng) {
    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    (SecretKey::generate(&mut rng), rng)
}

#[test]
fn requests() {
    let (key, mut rng) = key();
    let good = [key.encrypt(1, &vec![5; N], &mut rng).to_bytes()];
    torture("request", &good, &[(0, 8)], |bytes| Some(SeededCiphertext::from_bytes(bytes, 1).ok()?.to_bytes()));
    for level in [0, 7, 1000, usize::MAX] {
        assert!(SeededCiphertext::from_bytes(&good[0], level).is_err());
    }
}

#[test]
fn answers() {
    let shape = Shape { level: 6, products: 4, nonzero: 16, magnitude: 1e12, rotations: 0 };
    let plan = AnswerPlan::slots(&shape).unwrap();
    for (name, listed) in [("answer of one coefficient", 1), ("answer of seven coefficients", 7)] {
        let mut bytes = vec![0; plan.answer_len(listed)];
        SecretRng::from_insecure_fixed_seed(2).fill(&mut bytes);
        // The last bits of each part are padding, which must be zero: take what the decoder makes of the masked bytes.
        let good = (0..=0xffu8).rev().find_map(|mask| {
            let mut bytes = bytes.clone();
            *bytes.last_mut().unwrap() &= mask;
            Answer::from_bytes(&bytes, &plan, listed).ok().map(|_| bytes)
        });
        torture(name, &[good.unwrap()], &[], |bytes| {
            Some(Answer::from_bytes(bytes, &plan, listed).ok()?.to_bytes(&plan))
        });
    }
}

#[test]
fn public_keys() {
    let (key, mut rng) = key();
    let good = key.public_key(&[7; 32], &mut rng).to_bytes();
    let decode = |bytes: &[u8]| PublicKey::from_bytes(bytes, &[7; 32]);
    // 150 kB each: every length, and damage at places spread over the whole.
    for end in 0..good.len() {
        assert!(decode(&good[..end]).is_err());
    }
    assert!(decode(&[good.as_slice(), &[0]].concat()).is_err());
    for place in (0..8 * good.len()).step_by(8 * good.len() / 500) {
        let mut bad = good.clone();
        bad[place / 8] ^= 1 << (place % 8);
        if let Ok(key) = decode(&bad) {
            assert!(key.to_bytes() == bad);
        }
    }
    let mut outside = good;
    outside[32..].fill(0xff);
    assert!(decode(&outside).is_err());
}

#[test]
fn rotation_keys() {
    let (key, mut rng) = key();
    let sets = [vec![], vec![Automorphism::new(1, false)]];
    for set in sets {
        let good = key.rotation_keys(&set, &mut rng).to_bytes();
        assert_eq!(good.len(), RotationKeys::wire_len(set.len()));
        for end in (0..good.len()).step_by(17).chain(good.len().saturating_sub(5)..good.len()) {
            assert!(RotationKeys::from_bytes(&good[..end], &set).is_err());
        }
        for place in (0..8 * good.len()).step_by(8 * good.len() / 60 + 1) {
            let mut bad = good.clone();
            bad[place / 8] ^= 1 << (place % 8);
            if let Ok(keys) = RotationKeys::from_bytes(&bad, &set) {
                assert!(keys.to_bytes() == bad);
            }
        }
        let mut outside = good;
        outside[32..].fill(0xff);
        assert_eq!(RotationKeys::from_bytes(&outside, &set).is_err(), !set.is_empty());
    }
}
