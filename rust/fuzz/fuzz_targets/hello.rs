//! The hello: what is accepted has one encoding. The input is also laid over a good hello from some place on, because
//! nothing behind the magic word is found by chance.
#![no_main]
use cloister_core::Role;
use cloister_core::session::{Hello, Terms};
use libfuzzer_sys::fuzz_target;

fn check(bytes: &[u8]) {
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
}

fuzz_target!(|input: (u16, bool, &[u8])| {
    let (at, cut, bytes) = input;
    check(bytes);
    let terms = Terms::new([3; 32], vec![33538049, 33292289], 40, [9; 32]);
    let mut laid = Hello::new(Role::Client, &terms, [5; 32], b"marks").encode();
    let at = usize::from(at) % laid.len();
    let end = (at + bytes.len()).min(laid.len());
    laid.splice(at..if cut { laid.len() } else { end }, bytes.iter().copied());
    check(&laid);
});
