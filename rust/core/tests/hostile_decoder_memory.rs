//! What a bad message can make a decoder hold: at most twice the bytes received, by a counting allocator.
#![cfg(feature = "insecure-test-dealer")]

mod hostile_common;

use cloister_core::random::SecretRng;
use cloister_core::testing::decoders;
use hostile_common::counting::{Counting, growth};
use hostile_common::mutate;

#[global_allocator]
static COUNTING: Counting = Counting;

/// For the words of an error, and for tables that are made once.
const WORDS: usize = 4 << 10;

/// One test, because the counters are those of the whole process.
#[test]
fn what_is_refused_never_costs_twice_its_bytes() {
    let mut rng = SecretRng::from_os();
    // Of the store, only what the peer sends: records on the disk are our own.
    let peers = [decoders::session(), decoders::values(), decoders::lattice(), decoders::transfers()];
    for decoder in peers.iter().flatten().chain(&decoders::stored()[..1]) {
        // The first time, tables are made.
        decoder.good.iter().for_each(|good| assert!(decoder.accepts(good)));
        let (mut worst, mut cases) = (0.0f64, 0);
        let longest = decoder.good.iter().map(Vec::len).max().unwrap_or(0);
        for case in 0..(20_000_000 / longest.max(1)).clamp(40, 5000) {
            let bad = match case % 8 {
                // The last value is the wrong one, so that everything before it has been read.
                0 => {
                    let mut bad = decoder.good[0].clone();
                    bad.iter_mut().rev().take(4).for_each(|byte| *byte = 0xff);
                    bad
                }
                _ => mutate(&decoder.good, &mut rng),
            };
            let (outcome, most) = growth(|| decoder.decode(&bad));
            if outcome.is_none() {
                assert!(most <= 2 * bad.len() + WORDS, "{}: {most} bytes for {} received", decoder.name, bad.len());
                worst = worst.max(most.saturating_sub(WORDS) as f64 / bad.len().max(1) as f64);
                cases += 1;
            }
        }
        let good = &decoder.good[0];
        let (_kept, most) = growth(|| decoder.decode(good));
        println!(
            "{}: {cases} refused, at most {worst:.2} times their bytes; a good one holds {:.2} times",
            decoder.name,
            most as f64 / good.len() as f64
        );
    }
}
