//! A public key and rotation keys, the input laid over a body of the right length.
#![no_main]
use cloister_core::rlwe::{Automorphism, PublicKey, RotationKeys};
use libfuzzer_sys::fuzz_target;

fn over(length: usize, bytes: &[u8]) -> Vec<u8> {
    let mut body = vec![0; length];
    let n = bytes.len().min(length);
    body[..n].copy_from_slice(&bytes[..n]);
    body
}

fuzz_target!(|bytes: &[u8]| {
    let body = over(PublicKey::WIRE_LEN, bytes);
    if let Ok(key) = PublicKey::from_bytes(&body, &[7; 32]) {
        assert_eq!(key.to_bytes(), body);
    }
    let set = [Automorphism::new(1, false)];
    let body = over(RotationKeys::wire_len(set.len()), bytes);
    if let Ok(keys) = RotationKeys::from_bytes(&body, &set) {
        assert_eq!(keys.to_bytes(), body);
    }
    let _ = PublicKey::from_bytes(bytes, &[7; 32]);
    let _ = RotationKeys::from_bytes(bytes, &set);
});
