//! A request ciphertext. The input is laid over a body of the right length, so that residues are reached.
#![no_main]
use cloister_core::rlwe::SeededCiphertext;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(read) = SeededCiphertext::from_bytes(bytes, 1) {
        assert_eq!(read.to_bytes(), bytes);
    }
    let mut body = vec![0; SeededCiphertext::wire_len(1)];
    let n = bytes.len().min(body.len());
    body[..n].copy_from_slice(&bytes[..n]);
    if let Ok(read) = SeededCiphertext::from_bytes(&body, 1) {
        assert_eq!(read.to_bytes(), body);
    }
});
