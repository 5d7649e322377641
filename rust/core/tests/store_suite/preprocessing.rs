//! Filling ahead: resumed after a kill, counted apart, extended or refused when the stock ends.

use crate::disk::{Fault, Loss};
use crate::world::{Dealer, World, open};
use cloister_core::net::{Channel, memory};
use cloister_core::ot::OtSupply;
use cloister_core::ot::store::{Lane, SharedStore, StoredOt, WhenEmpty};
use cloister_core::preprocess::{Plan, fill, split};
use cloister_core::random::SecretRng;
use cloister_core::{Error, Party, Result, Role};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

fn plan() -> Plan {
    Plan { pads_from_server: 10 * 2048, batch_items: 2048, ..Plan::default() }
}

/// Runs both parties over the world's disks; each gets its party, its met store and its number.
fn both<T: Send>(
    world: &World,
    seed: u64,
    work: impl Fn(&mut Party, SharedStore) -> Result<T> + Sync,
) -> [std::thread::Result<Result<T>>; 2] {
    let (a, b) = memory::pipes(Duration::from_secs(20));
    let work = &work;
    std::thread::scope(|scope| {
        let ends = [(Role::Client, a), (Role::Server, b)].map(|(role, pipe)| {
            scope.spawn(move || {
                let store = SharedStore::new(open(&world.disks[usize::from(!role.is_client())], role)?);
                let mut party = Party {
                    role,
                    channel: Channel::new(Box::new(pipe)),
                    ot: Box::new(Dealer::new(role, seed)),
                    triples: Box::new(Dealer::new(role, seed)),
                    rng: SecretRng::from_os(),
                };
                store.meet(&mut party.channel)?;
                work(&mut party, store)
            })
        });
        ends.map(|thread| thread.join())
    })
}

#[test]
fn a_killed_fill_resumes_and_makes_only_what_is_missing() {
    for role in 0..2 {
        for (loss, point) in [
            (Loss::Nothing, "fill.renamed"),
            (Loss::Unsynced, "fill.confirmed"),
            (Loss::Torn(5), "fill.mark-written"),
            (Loss::Unsynced, "fill.epoch-fsynced"),
        ] {
            let world = World::new();
            world.disks[role].plan(Fault::DieAtPoint(point, 5));
            let ends = both(&world, 1, |party, store| fill(party, &store, &plan(), &mut |_| Ok(())));
            assert!(ends[role].is_err(), "it died");
            world.disks[role].boot(loss);
            let made = [AtomicU64::new(0), AtomicU64::new(0)];
            let ends = both(&world, 2, |party, store| {
                fill(party, &store, &plan(), &mut |progress| {
                    made[usize::from(!party_role(&store).is_client())].fetch_add(1, SeqCst);
                    assert!(progress.stored <= progress.wanted && progress.lane == Lane::PadsFromServer);
                    Ok(())
                })?;
                assert_eq!(store.lock()?.remaining(Lane::PadsFromServer), plan().pads_from_server);
                Ok(())
            });
            ends.into_iter().for_each(|end| end.unwrap().unwrap());
            // Four batches were complete at both, or five; the rest is made now.
            let made = made.map(|n| n.into_inner());
            assert!(made[0] == made[1] && (5..=6).contains(&made[0]), "{point}: {made:?}");
        }
    }
}

fn party_role(store: &SharedStore) -> Role {
    store.lock().unwrap().role()
}

#[test]
fn costs_are_split_and_are_what_the_doc_says() {
    let world = World::new();
    let ends = both(&world, 1, |party, store| {
        let met = party.channel.costs();
        fill(party, &store, &plan(), &mut |_| Ok(()))?;
        let filled = split(&party.channel.costs());
        let mut stored = StoredOt::new(store);
        if party.role.is_client() {
            stored.receive(&mut party.channel, 5000)?;
        } else {
            stored.send(&mut party.channel, 5000)?;
        }
        Ok((split(&met), filled, split(&party.channel.costs())))
    });
    for end in ends {
        let (met, filled, used) = end.unwrap().unwrap();
        assert_eq!((met.online.rounds, met.preprocess.rounds), (1, 0));
        // Two rounds a batch; the dealer needs none.
        assert_eq!((filled.online.rounds, filled.preprocess.rounds), (1, 2 * 10));
        // One round and one message of 35 bytes and a header for all of the 20 blocks (fewer than the read-ahead).
        assert_eq!((used.online.rounds, used.preprocess.rounds), (2, 20));
        assert_eq!(used.online.bytes_sent - filled.online.bytes_sent, 16 + 16 + 3 + 8 + 8);
        assert_eq!(used.total.bytes_sent, used.online.bytes_sent + used.preprocess.bytes_sent);
    }
}

#[test]
fn an_empty_store_refuses_or_extends() {
    let world = World::new();
    let small = Plan { pads_from_client: 1024, triples: 1024, ..Plan::default() };
    let transfers = |party: &mut Party, stored: &mut StoredOt, n| -> Result<Vec<u128>> {
        match party.role {
            Role::Client => Ok(stored.send(&mut party.channel, n)?.iter().map(|p| p[0] ^ p[1]).collect()),
            Role::Server => Ok(stored.receive(&mut party.channel, n)?.pads),
        }
    };
    let ends = both(&world, 1, |party, store| {
        fill(party, &store, &small, &mut |_| Ok(()))?;
        let mut stored = StoredOt::new(store.clone());
        assert!(matches!(transfers(party, &mut stored, 1025), Err(Error::Exhausted(_))));
        assert_eq!(stored.remaining(Lane::PadsFromClient)?, 1024, "a refusal uses nothing");
        transfers(party, &mut stored, 1000)?;
        assert_eq!(stored.remaining(Lane::PadsFromClient)?, 24);
        let inner = || Box::new(Dealer::new(party.role, 77));
        let mut stored = StoredOt::new(store).or_transfers(inner()).or_triples(inner());
        assert_eq!(stored.when_empty(), WhenEmpty::Extend);
        assert_eq!(transfers(party, &mut stored, 100)?.len(), 100);
        assert_eq!(stored.remaining(Lane::PadsFromClient)?, 0);
        let triples = cloister_core::party::TripleSupply::triples(&mut stored, &mut party.channel, 1500)?;
        assert_eq!((triples.a.len(), triples.b.len(), triples.c.len()), (1500, 1500, 1500));
        assert!(matches!(transfers(party, &mut StoredOt::new(lock_of(&stored)), 1), Err(Error::Exhausted(_))));
        Ok(())
    });
    ends.into_iter().for_each(|end| end.unwrap().unwrap());
}

fn lock_of(stored: &StoredOt) -> SharedStore {
    stored.store().clone()
}

/// A million transfers, all from the store, in uneven calls over several sessions: the sender's and the receiver's
/// halves fit, and no pad comes twice.
#[test]
fn a_million_transfers_each_once() {
    let world = World::new();
    let wanted = 5 << 18;
    let plan = Plan { pads_from_server: wanted, batch_items: 1 << 17, ..Plan::default() };
    let mut seen = std::collections::HashSet::new();
    let mut sessions = 0;
    let mut total = 0;
    while total < 1_000_000 {
        sessions += 1;
        let ends = both(&world, sessions, |party, store| {
            if sessions == 1 {
                fill(party, &store, &plan, &mut |_| Ok(()))?;
            }
            let mut stored = StoredOt::new(store.clone());
            let mut pads = Vec::new();
            for n in [1, 99_000, 1023, 1024, 70_000, 163_000] {
                if stored.remaining(Lane::PadsFromServer)? < n as u64 {
                    continue;
                }
                match party.role {
                    Role::Client => {
                        let got = stored.receive(&mut party.channel, n)?;
                        pads.extend(got.choices.iter().zip(&got.pads).map(|(&c, &p)| [u128::from(c), p]));
                    }
                    Role::Server => pads.extend(stored.send(&mut party.channel, n)?),
                }
            }
            drop(stored);
            store.close().unwrap_or_else(|_| panic!("shared"))?;
            Ok(pads)
        });
        let [client, server] = ends.map(|end| end.unwrap().unwrap());
        assert_eq!(client.len(), server.len());
        for (got, both) in client.iter().zip(&server) {
            assert_eq!(got[1], both[got[0] as usize]);
            assert!(seen.insert(both[0]), "twice");
        }
        total += client.len();
    }
    println!("{total} transfers in {sessions} sessions");
    assert_eq!(sessions, 3, "what a session leaves reserved is bounded");
}
