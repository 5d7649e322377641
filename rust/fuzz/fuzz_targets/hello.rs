//! The hello: what is accepted has one encoding.
#![no_main]
use cloister_core::session::Hello;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
});
