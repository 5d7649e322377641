//! Death at every named point and at random calls, and every call failing once.

use crate::disk::{Fault, LOSSES, Loss};
use crate::world::{End, World};
use cloister_core::Error;
use std::collections::BTreeSet;
use std::io::ErrorKind;

/// All points that a first and a later session pass, with how often the later one passes them.
fn points(role: usize) -> (BTreeSet<&'static str>, Vec<(&'static str, u64)>) {
    let mut world = World::new();
    world.good_session("first");
    let mut all: BTreeSet<_> = world.disks[role].points().into_keys().collect();
    world.disks[role].plan(Fault::None);
    world.good_session("second");
    let later: Vec<_> = world.disks[role].points().into_iter().collect();
    all.extend(later.iter().map(|(name, _)| *name));
    (all, later)
}

fn died(ends: &[End; 2], role: usize) -> bool {
    matches!(ends[role], End::Died)
}

#[test]
fn a_death_at_any_named_point_never_gives_an_item_twice() {
    let mut runs = 0;
    for role in 0..2 {
        let (all, later) = points(role);
        assert!(all.len() >= 24, "{all:?}");
        for family in ["create", "open", "agree", "reserve", "exchange", "use", "wipe", "fill", "compact", "close"] {
            assert!(all.iter().any(|p| p.starts_with(family)), "no point in {family}");
        }
        for (number, &point) in all.iter().enumerate() {
            for loss in LOSSES {
                let mut world = World::new();
                let occurrences = later.iter().find(|(name, _)| *name == point).map_or(0, |(_, n)| *n);
                if occurrences > 0 {
                    world.good_session("before");
                }
                // The first passage, the last, or one between.
                let nth = [1, occurrences.max(1), occurrences / 2 + 1][number % 3];
                world.disks[role].plan(Fault::DieAtPoint(point, nth.min(occurrences.max(1))));
                let ends = world.session();
                assert!(died(&ends, role), "{point} was not reached: {ends:?}");
                world.disks[role].boot(loss);
                for _ in 0..2 {
                    world.good_session(&format!("after {point} {loss:?} of {role}"));
                }
                world.check().unwrap_or_else(|e| panic!("{point} {loss:?} of {role}: {e}"));
                runs += 1;
            }
        }
    }
    println!("{runs} deaths at named points survived");
    assert!(runs >= 144);
}

/// The second death comes while the store recovers from the first.
#[test]
fn a_death_during_recovery_is_survived() {
    for role in 0..2 {
        let (all, _) = points(role);
        let early: Vec<_> = all.iter().filter(|p| p.contains("mark-") || p.contains("epoch-written")).collect();
        let late: Vec<_> = all.iter().filter(|p| p.starts_with("open") || p.starts_with("agree")).copied().collect();
        let (mut second, mut at) = (0, 0);
        for &first in early {
            for point in late.iter().copied().chain(["open.catching-up", "open.caught-up"]) {
                at += 1;
                let mut world = World::new();
                world.good_session("before");
                world.disks[role].plan(Fault::DieAtPoint(first, 1));
                world.session();
                world.disks[role].boot(Loss::Nothing);
                world.disks[role].plan(Fault::DieAtPoint(point, 1));
                second += u64::from(died(&world.session(), role));
                world.disks[role].boot(Loss::Torn(at));
                world.good_session(&format!("after {first} and {point}"));
                world.check().unwrap();
            }
        }
        assert!(second > 100, "{second}");
    }
}

/// `lives` deaths at random calls of random parties, in worlds of five deaths each.
fn random_deaths(lives: u64, seed: u64) {
    let mut random = seed | 1;
    let mut draw = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) % n
    };
    let (mut deaths, mut items) = (0, 0);
    while deaths < lives {
        let mut world = World::new();
        for _ in 0..5 {
            let (a, b) = (draw(2) as usize, draw(4) == 0);
            for role in 0..2 {
                if role == a || b {
                    world.disks[role].plan(Fault::DieAt(1 + draw(250)));
                }
            }
            let ends = world.session();
            deaths += ends.iter().filter(|end| matches!(end, End::Died)).count() as u64;
            for disk in &world.disks {
                let loss = match draw(3) {
                    0 => Loss::Nothing,
                    1 => Loss::Unsynced,
                    _ => Loss::Torn(draw(1 << 40)),
                };
                // A process that ended without dying keeps its machine.
                disk.boot(if disk.died() { loss } else { Loss::Nothing });
            }
        }
        world.good_session("after five deaths");
        items += world.check().unwrap();
    }
    println!("{deaths} random deaths survived, {items} items given out, none twice");
}

#[test]
fn two_hundred_random_deaths() {
    random_deaths(200, 0x5eed);
}

#[test]
#[ignore = "the long version of two_hundred_random_deaths"]
fn two_thousand_random_deaths() {
    random_deaths(2000, 0x1009);
}

#[test]
fn every_call_may_fail_once() {
    for kind in [ErrorKind::Other, ErrorKind::StorageFull] {
        for role in 0..2 {
            let mut world = World::new();
            world.good_session("first");
            let mut failures = 0;
            for n in 1.. {
                world.disks[role].plan(Fault::FailAt(n, kind));
                let ends = world.session();
                if world.disks[role].calls() < n {
                    break;
                }
                failures += 1;
                // The first call asks whether there is a store; a failure there looks like a missing one.
                let typed = match kind {
                    ErrorKind::StorageFull if n > 1 => matches!(&ends[role], End::Done(Err(Error::DiskFull(_)))),
                    _ => matches!(&ends[role], End::Done(Err(Error::StoreFolder(_)))),
                };
                assert!(typed, "call {n} failing with {kind:?} gave {ends:?}");
                for disk in &world.disks {
                    disk.boot(Loss::Unsynced);
                }
                world.good_session(&format!("after call {n} failed with {kind:?}"));
            }
            world.check().unwrap();
            assert!(failures > 100, "{failures}");
            println!("party {role}: {failures} calls failed with {kind:?}");
        }
    }
}

#[test]
fn a_read_only_disk_is_refused_and_harmless() {
    let mut world = World::new();
    world.good_session("first");
    world.disks[1].plan(Fault::ReadOnly);
    let ends = world.session();
    assert!(matches!(&ends[1], End::Done(Err(Error::StoreFolder(_)))), "{ends:?}");
    world.disks[1].boot(Loss::Nothing);
    world.good_session("writable again");
    world.check().unwrap();
}
