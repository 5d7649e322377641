//! A decoder on trial: systematic and random damage to good messages.

use cloister_core::random::SecretRng;
use std::time::{Duration, Instant};

const LEAST: usize = 40_000;
const EXTREMES: [u64; 12] =
    [0, 1, 2, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0xffff_ffff_ffff_ffff];

/// A decoder on trial. `decode` gives back the encoding of what it accepted.
struct Trial<F> {
    name: &'static str,
    decode: F,
    cases: usize,
    accepted: usize,
    slowest: Duration,
}

impl<F: Fn(&[u8]) -> Option<Vec<u8>>> Trial<F> {
    fn input(&mut self, bytes: &[u8]) {
        let started = Instant::now();
        let outcome = (self.decode)(bytes);
        self.slowest = self.slowest.max(started.elapsed());
        self.cases += 1;
        if let Some(again) = outcome {
            self.accepted += 1;
            assert!(again == bytes, "{} accepted {bytes:02x?}, but writes {again:02x?}", self.name);
        }
    }

    /// The systematic damage.
    fn damage(&mut self, message: &[u8], lengths: &[(usize, usize)]) {
        for end in 0..message.len() {
            self.input(&message[..end]);
        }
        for bit in 0..8 * message.len().min(4096) {
            let mut bad = message.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            self.input(&bad);
        }
        for &(at, width) in lengths {
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

    /// Random damage, up to the number of cases that a decoder must have seen.
    fn fill_up(&mut self, good: &[Vec<u8>]) {
        let mut rng = SecretRng::from_insecure_fixed_seed(7);
        let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
        while self.cases < LEAST {
            let mut bad = good[below(good.len())].clone();
            for _ in 0..1 + below(6) {
                if bad.is_empty() {
                    break;
                }
                let at = below(bad.len());
                match below(5) {
                    0 => bad[at] = below(256) as u8,
                    1 => drop(bad.remove(at)),
                    2 => bad.insert(at, below(256) as u8),
                    3 => bad.truncate(at),
                    _ => bad[at..].iter_mut().for_each(|b| *b = below(256) as u8),
                }
            }
            self.input(&bad);
        }
    }
}

/// Puts a decoder on trial: whatever it accepts of the damaged messages must be encoded as the same bytes.
pub fn torture(
    name: &'static str,
    good: &[Vec<u8>],
    lengths: &[(usize, usize)],
    decode: impl Fn(&[u8]) -> Option<Vec<u8>>,
) {
    let mut trial = Trial { name, decode, cases: 0, accepted: 0, slowest: Duration::ZERO };
    for message in good {
        assert_eq!((trial.decode)(message).as_deref(), Some(&message[..]), "{name}: a good message comes back");
        trial.damage(message, lengths);
    }
    trial.fill_up(good);
    let Trial { cases, accepted, slowest, .. } = trial;
    println!("{name}: {cases} bad inputs, {accepted} of them well-formed, slowest {slowest:?}");
    assert!(slowest < Duration::from_secs(1));
}
