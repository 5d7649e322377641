//! A decoder on trial: systematic damage to good messages, and random damage for as long as is allowed.
#![allow(dead_code)] // Each test binary uses a part of it.

pub mod counting;

use cloister_core::random::SecretRng;
use cloister_core::testing::decoders::Decoder;
use std::time::{Duration, Instant};

/// The least number of bad inputs.
pub const LEAST: usize = 40_000;
/// Flips of single bits may take so long; a slow decoder of long messages sees them spread over the message.
const FLIPPING: Duration = Duration::from_millis(1500);
const EXTREMES: [u64; 12] =
    [0, 1, 2, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0xffff_ffff_ffff_ffff];

/// Seconds that all random damage together may take: `CLOISTER_FUZZ_SECONDS`, five without it.
pub fn seconds_allowed() -> Duration {
    let given = std::env::var("CLOISTER_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs_f64(given.unwrap_or(5.0))
}

/// A decoder and what it has seen.
pub struct Trial<'a> {
    decoder: &'a Decoder,
    /// Bad inputs so far.
    pub cases: usize,
    /// Those of them that are well-formed after all.
    pub accepted: usize,
    /// The longest that one took.
    pub slowest: Duration,
}

impl<'a> Trial<'a> {
    pub fn new(decoder: &'a Decoder) -> Self {
        Self { decoder, cases: 0, accepted: 0, slowest: Duration::ZERO }
    }

    pub fn input(&mut self, bytes: &[u8]) {
        let started = Instant::now();
        self.accepted += usize::from(self.decoder.accepts(bytes));
        self.slowest = self.slowest.max(started.elapsed());
        self.cases += 1;
    }

    /// Every truncation, every flip of one bit (of the first four kilobytes, if they are fast), extreme values in every
    /// number, bytes after the end.
    pub fn damage(&mut self, message: &[u8]) {
        for end in 0..message.len() {
            self.input(&message[..end]);
        }
        let bits = 8 * message.len();
        let first = self.flip(message, 0);
        let affordable = (FLIPPING.as_nanos() / first.as_nanos().max(1)) as usize;
        if affordable >= bits.min(8 * 4096) {
            (1..bits.min(8 * 4096)).for_each(|bit| _ = self.flip(message, bit));
        } else {
            (1..bits).step_by(bits.div_ceil(affordable.max(1))).for_each(|bit| _ = self.flip(message, bit));
        }
        for &(at, width) in self.decoder.numbers.iter().filter(|&(at, width)| at + width <= message.len()) {
            for value in EXTREMES {
                let mut bad = message.to_vec();
                bad[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                self.input(&bad);
            }
        }
        for more in 1..100 {
            for byte in [0, 1, 0xff] {
                self.input(&[message, &vec![byte; more]].concat());
            }
        }
    }

    fn flip(&mut self, message: &[u8], bit: usize) -> Duration {
        let mut bad = message.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        let started = Instant::now();
        self.input(&bad);
        started.elapsed()
    }
}

/// Random damage to one of some good messages.
pub fn mutate(good: &[Vec<u8>], rng: &mut SecretRng) -> Vec<u8> {
    let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
    let mut bad = good[below(good.len())].clone();
    for _ in 0..1 + below(6) {
        if bad.is_empty() {
            break;
        }
        // Near the beginning as often as anywhere: there stand the magic words and the numbers.
        let most = if below(2) == 0 { bad.len().min(256) } else { bad.len() };
        let at = below(most);
        match below(8) {
            0 => bad[at] = below(256) as u8,
            1 => drop(bad.remove(at)),
            2 => bad.insert(at, below(256) as u8),
            3 => bad.truncate(at),
            4 => {
                let value = EXTREMES[below(EXTREMES.len())].to_le_bytes();
                bad[at..].iter_mut().zip(value).for_each(|(old, new)| *old = new);
            }
            5 => {
                let other = &good[below(good.len())];
                let from = below(other.len() + 1);
                bad.truncate(at);
                bad.extend_from_slice(&other[from..]);
            }
            6 => bad[at] ^= 1 << below(8),
            _ => {
                let end = (at + 1 + below(32)).min(bad.len());
                bad[at..end].iter_mut().for_each(|b| *b = below(256) as u8);
            }
        }
    }
    bad
}

/// Puts decoders on trial with at least [`LEAST`] bad inputs each: whatever one accepts must be written as the same bytes.
pub fn torture(decoders: &[Decoder]) {
    for decoder in decoders {
        let mut trial = Trial::new(decoder);
        for message in &decoder.good {
            assert!(decoder.accepts(message), "{}: a good message comes back", decoder.name);
            trial.damage(message);
        }
        let mut rng = SecretRng::from_insecure_fixed_seed(7);
        while trial.cases < LEAST {
            trial.input(&mutate(&decoder.good, &mut rng));
        }
        let Trial { cases, accepted, slowest, .. } = trial;
        println!("{}: {cases} bad inputs, {accepted} of them well-formed, slowest {slowest:?}", decoder.name);
        assert!(slowest < Duration::from_secs(2), "{}", decoder.name);
    }
}
