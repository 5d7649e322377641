//! Every protocol step of one party against the recorded messages of an honest peer, damaged in a new way in every run,
//! for as long as `CLOISTER_FUZZ_SECONDS` says: a value or a typed error, soon, and no panic.
//!
//! The twin of the fuzz targets `steps` and `products` for a stable compiler. `hostile_protocols.rs` has both parties
//! alive and the link between them hostile; here more is tried, because nobody has to be waited for.
#![cfg(feature = "insecure-test-dealer")]

mod hostile_common;

use cloister_core::random::SecretRng;
use cloister_core::testing::replay::{Damage, Recording, SLOW_STEPS, STEPS};
use cloister_core::{Error, Role};
use hostile_common::seconds_allowed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// However slow the machine and whatever else it does.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn any_damage_to_a_recorded_run_ends_in_a_value_or_a_typed_error() {
    let each = seconds_allowed() / (2 * (STEPS.len() + SLOW_STEPS.len()) as u32);
    let mut rng = SecretRng::from_os();
    let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
    for step in STEPS.into_iter().chain(SLOW_STEPS) {
        let recording = Recording::of(step);
        for role in [Role::Client, Role::Server] {
            let heard = recording.heard(role);
            let (started, mut cases, mut refused) = (Instant::now(), 0, 0);
            while !heard.is_empty() && (cases < 4 || started.elapsed() < each) {
                let changes: Vec<(usize, usize, Vec<u8>)> = (0..1 + below(4))
                    .map(|_| {
                        let bytes = if below(4) == 0 {
                            vec![0xff; 1 + below(64)]
                        } else {
                            vec![below(256) as u8; 1 + below(8)]
                        };
                        (below(1 << 20), below(1 << 30), bytes)
                    })
                    .collect();
                let cut = (below(8) == 0).then(|| below(heard.len()));
                let begun = Instant::now();
                let outcome = catch_unwind(AssertUnwindSafe(|| match cut {
                    Some(at) => recording.replay(role, heard[..at].to_vec()),
                    None => {
                        let damage: Vec<Damage> = changes.iter().map(|(m, at, b)| (*m, *at, &b[..])).collect();
                        recording.damaged(role, &damage)
                    }
                }));
                let what = || format!("{} at the {role:?}, cut {cut:?}, changes {changes:02x?}", recording.name);
                let outcome = outcome.unwrap_or_else(|_| panic!("panics, see above: {}", what()));
                assert!(!matches!(outcome, Err(Error::BadArgument(_))), "the caller is blamed: {}", what());
                assert!(cut.is_none() || outcome.is_err(), "half a run was enough: {}", what());
                assert!(begun.elapsed() < SOON, "{:?}: {}", begun.elapsed(), what());
                cases += 1;
                refused += usize::from(outcome.is_err());
            }
            println!("{} at the {role:?}: {cases} damaged runs, {refused} refused", recording.name);
        }
    }
}
