//! A public key or rotation keys, the input laid over a body of the right length at some place.
#![no_main]
use cloister_core::rlwe::{Automorphism, PublicKey, RotationKeys};
use cloister_core::testing::decoders::lay_over;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, u32, &[u8])| {
    let (rotation, at, bytes) = input;
    if rotation {
        let set = [Automorphism::new(1, false)];
        let body = lay_over(&vec![0; RotationKeys::wire_len(set.len())], at as usize, false, bytes);
        if let Ok(keys) = RotationKeys::from_bytes(&body, &set) {
            assert_eq!(keys.to_bytes(), body);
        }
        let _ = RotationKeys::from_bytes(bytes, &set);
    } else {
        let body = lay_over(&vec![0; PublicKey::WIRE_LEN], at as usize, false, bytes);
        if let Ok(key) = PublicKey::from_bytes(&body, &[7; 32]) {
            assert_eq!(key.to_bytes(), body);
        }
        let _ = PublicKey::from_bytes(bytes, &[7; 32]);
    }
});
