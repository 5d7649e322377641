//! Packed vectors of any width: what is accepted is canonical.
#![no_main]
use cloister_core::field;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (n, bits, bytes) = input;
    let (n, bits) = (usize::from(n), 1 + usize::from(bits) % 57);
    if let Ok(values) = field::unpack_bits(bytes, n, bits) {
        assert_eq!(field::pack_bits(&values, bits), bytes);
    }
    if let Ok(values) = field::unpack(bytes, n) {
        assert!(values.iter().all(|&v| v < field::P));
        assert_eq!(field::pack(&values), bytes);
    }
});
