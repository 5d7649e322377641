//! Copies, backups, damage, other people's stores, and the proof that the checker can see a reuse at all.

use crate::disk::{Loss, MemoryDisk};
use crate::world::{Dealer, End, Given, Items, World, check, identity, open, place};
use cloister_core::net::{Channel, memory};
use cloister_core::ot::OtSupply;
use cloister_core::ot::store::{Disk, Lane, Place, RealDisk, Store};
use cloister_core::{Error, Role};
use std::path::Path;
use std::sync::Arc;

fn refused_by_both(ends: &[End; 2]) {
    for end in ends {
        assert!(matches!(end, End::Done(Err(Error::Store(_)))), "{ends:?}");
    }
}

fn store_error(end: &End) -> String {
    match end {
        End::Done(Err(Error::Store(reason))) => reason.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_checker_finds_a_planted_reuse() {
    let (mut channel, _peer) = memory::channels();
    let mut give = |seed, n| Items::Sent(Dealer::new(Role::Client, seed).send(&mut channel, n).unwrap());
    let given = |session, items| Given { session, lane: Lane::PadsFromClient, items };
    let honest = [given(1, give(1, 50)), given(2, give(2, 50))];
    assert_eq!(check(&honest, &[]), Ok(100));
    let planted = [given(1, give(1, 50)), given(2, give(2, 50)), given(3, give(1, 1))];
    assert!(check(&planted, &[]).unwrap_err().contains("twice"));
}

/// The attack that the guards are for, with the guards off: if *both* parties put back *both* places, nobody can know, and
/// the checker sees the reuse. Each guard alone then stops it.
#[test]
fn restoring_everything_everywhere_reuses_and_each_guard_alone_stops_it() {
    let mut world = World::new();
    world.good_session("first");
    let backup = [world.disks[0].copy(), world.disks[1].copy()];
    world.good_session("second");
    let now = [world.disks[0].copy(), world.disks[1].copy()];

    world.disks = [backup[0].copy(), backup[1].copy()];
    world.good_session("both restored");
    assert!(world.check().unwrap_err().contains("twice"));

    for party in 0..2 {
        // The peer's mark: one party restored both of its places.
        let mut world = World::new();
        world.disks = [now[0].copy(), now[1].copy()];
        world.disks[party] = backup[party].copy();
        refused_by_both(&world.session());
        // The epoch: one party restored the directory only.
        world.disks[party] = now[party].copy();
        world.disks[party].restore(&backup[party], &place().directory);
        let ends = world.session();
        assert!(store_error(&ends[party]).contains("copied or restored"));
        // The epoch alone restored: the mark is ahead of it.
        world.disks[party] = now[party].copy();
        world.disks[party].restore(&backup[party], &place().beside);
        let ends = world.session();
        assert!(store_error(&ends[party]).contains("copied or restored"));
    }
}

#[test]
fn of_two_copies_the_peer_accepts_one() {
    let mut world = World::new();
    world.good_session("first");
    let copy = world.disks[0].copy();
    // The copy may even have been opened more often than the original.
    for _ in 0..9 {
        drop(open(&copy, Role::Client).unwrap());
    }
    world.good_session("the original goes on");
    let original = std::mem::replace(&mut world.disks[0], copy);
    refused_by_both(&world.session());
    world.disks[0] = original;
    world.good_session("the original is not disturbed");
    world.check().unwrap();
}

#[test]
fn a_copied_directory_is_refused_beside_the_same_epoch_file() {
    let mut world = World::new();
    world.good_session("first");
    let disk = &world.disks[0];
    let elsewhere = Place { directory: "/disk/copy".into(), ..place() };
    let files = disk.files();
    disk.make_directory(&elsewhere.directory).unwrap();
    for (path, _) in files.iter().filter(|(p, _)| p.starts_with(&place().directory)) {
        let to = elsewhere.directory.join(path.file_name().unwrap());
        disk.create(&to).unwrap().write_at(0, &disk.bytes(path)).unwrap();
    }
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    // While the original is open the epoch file is locked; afterwards the copy is a generation behind.
    let original = open(disk, Role::Client).unwrap();
    let refused = Store::open(shared.clone(), &elsewhere, &identity(Role::Client));
    assert!(matches!(refused, Err(Error::StoreBusy(reason)) if reason.contains("another process")));
    drop(original);
    let refused = Store::open(shared, &elsewhere, &identity(Role::Client));
    assert!(matches!(refused, Err(Error::Store(reason)) if reason.contains("copied or restored")));
}

#[test]
fn a_store_is_opened_once_at_a_time() {
    let mut world = World::new();
    world.good_session("first");
    let first = open(&world.disks[0], Role::Client).unwrap();
    assert!(matches!(open(&world.disks[0], Role::Client), Err(Error::StoreBusy(r)) if r.contains("another process")));
    drop(first);
    drop(open(&world.disks[0], Role::Client).unwrap());
}

#[test]
fn another_partys_store_is_refused() {
    let mut world = World::new();
    world.good_session("first");
    let shared: Arc<dyn Disk> = Arc::new(world.disks[0].clone());
    for change in 0..4 {
        let mut other = identity(Role::Client);
        match change {
            0 => other.role = Role::Server,
            1 => other.own[3] ^= 1,
            2 => other.peer[3] ^= 1,
            _ => other.parameters[3] ^= 1,
        }
        let refused = Store::open(shared.clone(), &place(), &other);
        assert!(matches!(refused, Err(Error::StoreMismatch(r)) if r.contains("made ")), "{change}");
    }
    assert!(Store::create(shared, &place(), &identity(Role::Client)).is_err(), "a store is never made over another");
    // A peer that lost its store and made a new one is not the one that we know.
    world.disks[1] = MemoryDisk::default();
    refused_by_both(&world.session());
}

#[test]
fn what_others_can_reach_is_refused() {
    let mut world = World::new();
    world.good_session("first");
    let disk = world.disks[0].clone();
    let mut paths: Vec<_> = disk.files().into_iter().map(|(p, _)| p).filter(|p| !p.ends_with("lock")).collect();
    paths.extend([place().directory, place().beside]);
    for path in paths {
        let before = disk.mode(&path).unwrap();
        for bit in [0o040, 0o004, 0o020, 0o001] {
            disk.set_mode(&path, before | bit);
            assert!(matches!(open(&disk, Role::Client), Err(Error::StoreFolder(r)) if r.contains("others can reach")));
        }
        disk.set_mode(&path, before);
    }
    world.good_session("narrow again");
}

/// Every file, bits at many places: either the store refuses, or the session fails, or nothing wrong was given out.
#[test]
fn a_flipped_bit_is_found_or_does_not_matter() {
    let mut first = World::new();
    first.good_session("first");
    let files = first.disks[0].files();
    let (mut refused, mut harmless) = (0, 0);
    for (path, length) in files {
        // All of the heads and slots' fields, then samples.
        let step = |at: usize| if at % 4096 < 120 { 13 } else { length / 12 + 1 };
        let mut at = 0;
        while at < length {
            let mut world = World::new();
            world.sessions = 100;
            world.disks = [first.disks[0].copy(), first.disks[1].copy()];
            world.disks[0].edit(&path, |bytes| bytes[at] ^= 1 << (at % 8));
            let ends = world.session();
            match &ends[0] {
                End::Done(Err(Error::Store(_))) => refused += 1,
                // The older of two slots, a block that was wiped, or one that this session did not reach.
                End::Done(Ok(())) => harmless += 1,
                other => panic!("{path:?} at {at}: {other:?}"),
            }
            world.check().unwrap_or_else(|e| panic!("{path:?} at {at}: {e}"));
            at += step(at);
        }
    }
    println!("flipped bits: {refused} refused, {harmless} harmless");
    assert!(refused > 50);
}

#[test]
fn a_deleted_or_shortened_file_is_refused() {
    let mut first = World::new();
    first.good_session("first");
    for (path, length) in first.disks[0].files() {
        for keep in [None, Some(0), Some(length.saturating_sub(1))] {
            let disk = first.disks[0].copy();
            match keep {
                None => disk.remove(&path).unwrap(),
                Some(n) => disk.edit(&path, |bytes| bytes.truncate(n)),
            }
            // A deleted epoch file looks like no store at all, and making one over the remains gives nothing old.
            let opened = Store::open(Arc::new(disk), &place(), &identity(Role::Client));
            assert!(opened.is_err() || path.ends_with("lock"), "{path:?} {keep:?}");
        }
    }
}

/// What was consumed is on the disk no more: neither as it was given nor as it was stored.
#[test]
fn consumed_blocks_are_overwritten() {
    let mut world = World::new();
    world.good_session("first");
    let segment = |disk: &MemoryDisk, name: &str| {
        let (path, _) = disk.files().into_iter().find(|(p, _)| p.to_string_lossy().contains(name)).unwrap();
        disk.bytes(Path::new(&path))
    };
    // 700 + 900 + 1 items: two blocks of 1024 are gone, and with them the first batch; the second is whole.
    let names: Vec<_> = world.disks[0].files().into_iter().map(|(p, _)| p).collect();
    assert!(!names.iter().any(|p| p.to_string_lossy().contains("pads-from-client.0000000000000000")));
    assert!(names.iter().any(|p| p.to_string_lossy().contains("pads-from-client.0000000000000800")));
    // 500 of 2048: the first of two blocks is zeros, the second is not.
    let bytes = segment(&world.disks[1], "pads16-from-server.");
    let block = 16 * 1024 + 16;
    assert!(bytes[512..512 + block].iter().all(|&b| b == 0));
    assert!(bytes[512 + block..].iter().any(|&b| b != 0));
    world.disks[1].boot(Loss::Unsynced);
    assert_eq!(segment(&world.disks[1], "pads16-from-server."), bytes, "the overwriting was synced");
}

#[test]
fn marks_from_a_hostile_peer_never_panic_and_never_pass_when_changed() {
    let mut world = World::new();
    world.good_session("first");
    let mut client = open(&world.disks[0], Role::Client).unwrap();
    let mut server = open(&world.disks[1], Role::Server).unwrap();
    let honest = server.marks().unwrap();
    assert!(honest.len() <= cloister_core::ot::store::MAX_MARKS);
    let mut bad: Vec<Vec<u8>> = (0..honest.len()).map(|n| honest[..n].to_vec()).collect();
    bad.push([&honest[..], &[0]].concat());
    bad.push(vec![0xff; 5000]);
    for marks in &bad {
        client.marks().unwrap();
        assert!(matches!(client.agree(marks), Err(Error::BadMessage { .. })));
    }
    let (mut passed, mut refused) = (0, 0);
    for bit in 0..honest.len() * 8 {
        let mut changed = honest.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let disk = world.disks[0].copy();
        let mut client = open(&disk, Role::Client).unwrap();
        client.marks().unwrap();
        match client.agree(&changed) {
            // Counters that another run could have had; the first reservation then finds the difference.
            Ok(_) => passed += 1,
            Err(Error::BadMessage { .. } | Error::Store(_) | Error::StoreMismatch(_)) => refused += 1,
            Err(other) => panic!("bit {bit}: {other:?}"),
        }
    }
    println!("marks with one bit flipped: {refused} refused, {passed} with another meaning");
    assert!(refused > passed);
    client.marks().unwrap();
    client.agree(&honest).unwrap();
}

/// A peer that reserves another range than we do: both stop, and nothing of ours was read.
#[test]
fn different_ranges_end_the_session_for_both() {
    let mut world = World::new();
    world.good_session("first");
    let (a, b) = memory::channels();
    let run = |disk: &MemoryDisk, role, mut channel: Channel, blocks| {
        let mut store = open(disk, role).unwrap();
        store.meet(&mut channel).unwrap();
        let outcome = store.reserve(&mut channel, &[(Lane::Pads16FromServer, blocks)]);
        assert!(store.next_block(Lane::Pads16FromServer).is_err());
        outcome
    };
    let (x, y) = std::thread::scope(|scope| {
        let server = scope.spawn(|| run(&world.disks[1], Role::Server, b, 0));
        (run(&world.disks[0], Role::Client, a, 1), server.join().unwrap())
    });
    assert!(matches!(x, Err(Error::Disagreement { .. })) && matches!(y, Err(Error::Disagreement { .. })));
    world.good_session("afterwards");
    world.check().unwrap();
}

#[test]
fn a_real_disk_keeps_files_to_their_owner_and_locks() {
    use std::os::unix::fs::PermissionsExt;
    let root = std::env::temp_dir().join(format!("cloister-store-{}", std::process::id()));
    std::fs::create_dir(&root).unwrap();
    let place = Place { directory: root.join("store"), beside: root.join("beside") };
    let store = Store::create(Arc::new(RealDisk), &place, &identity(Role::Client)).unwrap();
    let second = Store::open(Arc::new(RealDisk), &place, &identity(Role::Client));
    assert!(matches!(second, Err(Error::StoreBusy(r)) if r.contains("another process")));
    for (path, mode) in [("store", 0o700), ("beside", 0o700), ("store/mark", 0o600), ("beside/epoch", 0o600)] {
        assert_eq!(std::fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o777, mode, "{path}");
    }
    drop(store);
    std::fs::set_permissions(&place.beside, std::fs::Permissions::from_mode(0o750)).unwrap();
    let wider = Store::open(Arc::new(RealDisk), &place, &identity(Role::Client));
    assert!(matches!(wider, Err(Error::StoreFolder(r)) if r.contains("others can reach")));
    std::fs::remove_dir_all(root).unwrap();
}
