//! Every decoder of the list, the input laid over a good message: what has no target of its own is fuzzed here (base
//! transfers, short requests, certificates), and a decoder that is added to the list is fuzzed without a line of code.
#![no_main]
use cloister_core::testing::decoders::{Decoder, all, lay_over};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static ALL: LazyLock<Vec<Decoder>> = LazyLock::new(all);

fuzz_target!(|input: (u8, u8, u32, bool, &[u8])| {
    let (which, message, at, cut, bytes) = input;
    let decoder = &ALL[usize::from(which) % ALL.len()];
    let good = &decoder.good[usize::from(message) % decoder.good.len()];
    decoder.accepts(bytes);
    decoder.accepts(&lay_over(good, at as usize, cut, bytes));
});
