//! The confirmation: only the one that is due is accepted.
#![no_main]
use cloister_core::session::Confirm;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let due = Confirm { tag: [1; 32], nonces: [2; 16], marks: [3; 16] };
    assert_eq!(due.check(bytes).is_ok(), due.encode() == bytes);
});
