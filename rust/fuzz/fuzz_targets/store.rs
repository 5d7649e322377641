//! What the store of correlations reads: the marks in the peer's hello, compared by both parties, and every record on
//! the disk, with the MAC made right (a mock cipher), so that what lies behind it is reached.
#![no_main]
use cloister_core::testing::decoders::{Decoder, lay_over, stored};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static STORED: LazyLock<Vec<Decoder>> = LazyLock::new(stored);

fuzz_target!(|input: (u8, u8, u16, bool, &[u8])| {
    let (which, message, at, cut, bytes) = input;
    let decoder = &STORED[usize::from(which) % STORED.len()];
    let good = &decoder.good[usize::from(message) % decoder.good.len()];
    decoder.accepts(bytes);
    decoder.accepts(&lay_over(good, at.into(), cut, bytes));
});
