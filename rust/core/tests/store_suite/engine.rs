//! The engine on its store: what one session makes another uses, once; whatever happens to a party or its disk between.

use crate::disk::{Died, Fault, Loss, MemoryDisk};
use crate::world::place;
use cloister_core::engine::{Engine, Layer, LayerWeights, Linear, Security, Settings, StoreSettings};
use cloister_core::matmul::single::Shape;
use cloister_core::matmul::{BatchedShape, ExpertWeights, Numbers};
use cloister_core::net::{StepCost, memory};
use cloister_core::ot::store::{MADE_NOW, Policy, WhenBehind, WhenEmpty};
use cloister_core::preprocess::{Demand, Phase, Tell, split};
use cloister_core::{Error, Result, Role, field, protocol};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

type Outcome<T> = std::thread::Result<Result<T>>;

struct Pair {
    disks: [MemoryDisk; 2],
    policies: [Policy; 2],
}

const START_OVER: Policy = Policy { when_empty: WhenEmpty::Extend, when_behind: WhenBehind::StartOver };
const REFUSE: Policy = Policy { when_empty: WhenEmpty::Refuse, when_behind: WhenBehind::Refuse };

/// A store belongs to one set of weights.
const MODEL: [u8; 32] = [7; 32];

fn quiet() -> impl FnMut(cloister_core::preprocess::Progress) -> Result<()> {
    |progress| {
        assert!(progress.stored <= progress.wanted);
        Ok(())
    }
}

impl Pair {
    fn new(policy: Policy) -> Self {
        Self { disks: Default::default(), policies: [policy; 2] }
    }

    fn copy(&self) -> Self {
        Self { disks: [self.disks[0].copy(), self.disks[1].copy()], policies: self.policies }
    }

    /// A session of both parties; each runs `work` and says goodbye.
    fn session<T: Send>(&self, work: impl Fn(&mut Engine) -> Result<T> + Sync) -> [Outcome<T>; 2] {
        let (a, b) = memory::pipes(Duration::from_secs(20));
        let work = &work;
        std::thread::scope(|scope| {
            let ends = [(0, Role::Client, a), (1, Role::Server, b)].map(|(i, role, pipe)| {
                let (disk, policy) = (Arc::new(self.disks[i].clone()), self.policies[i]);
                scope.spawn(move || {
                    let mut settings = Settings::new(Security::InsecureLoopback);
                    settings.terms.model = MODEL;
                    settings.threads = 1;
                    settings.store = Some(StoreSettings { place: place(), policy, disk });
                    let mut engine = Engine::set_up(role, Box::new(pipe), settings)?;
                    let out = work(&mut engine)?;
                    engine.finish()?;
                    Ok(out)
                })
            });
            ends.map(|thread| thread.join())
        })
    }

    /// A session that must work.
    fn good<T: Send>(&self, work: impl Fn(&mut Engine) -> Result<T> + Sync) -> [T; 2] {
        self.session(work).map(|end| end.expect("it lived").unwrap())
    }
}

/// What both must say who meet a store that is not what it should be.
fn refused<T>(ends: [Outcome<T>; 2]) -> String {
    let reasons = ends.map(|end| match end {
        Ok(Err(Error::Store(reason))) => reason,
        Ok(Err(other)) => panic!("{other}"),
        _ => panic!("accepted, or died"),
    });
    assert_eq!(reasons[0], reasons[1]);
    reasons[0].clone()
}

/// Some transfers, by the names under which their two halves can be compared: the client sends.
fn transfers(engine: &mut Engine, n: usize) -> Result<Vec<[u128; 2]>> {
    let party = &mut engine.party;
    if party.role.is_client() {
        party.ot.send(&mut party.channel, n)
    } else {
        let got = party.ot.receive(&mut party.channel, n)?;
        Ok(got.choices.iter().zip(&got.pads).map(|(&c, &pad)| [u128::from(c), pad]).collect())
    }
}

/// Both halves fit together, and none was seen before.
fn check(seen: &mut HashSet<u128>, [client, server]: [Vec<[u128; 2]>; 2]) {
    assert_eq!(client.len(), server.len());
    for (sent, got) in client.iter().zip(&server) {
        assert_eq!(sent[got[0] as usize], got[1]);
        assert!(seen.insert(sent[0]), "the same transfer twice");
    }
}

fn bytes(costs: &StepCost) -> u64 {
    costs.bytes_sent + costs.bytes_received
}

#[test]
fn what_one_session_makes_the_next_ones_use_each_a_part_of_its_own() {
    let pair = Pair::new(REFUSE);
    let x: Vec<i64> = (0..300).map(|i| (i - 150) * 1000).collect();
    let share = |role: Role| -> Vec<u64> {
        let mine = |i: usize| field::mul(i as u64 + 1, 987_654_321);
        let own = |(i, &x): (usize, &i64)| match role {
            Role::Client => mine(i),
            Role::Server => field::sub(field::from_signed(x), mine(i)),
        };
        x.iter().enumerate().map(own).collect()
    };
    let run = |engine: &mut Engine| -> Result<Vec<u64>> {
        let mine = share(engine.party.role);
        let bits = protocol::is_negative(&mut engine.party, &mine, 40, 0)?;
        let zero_or_x = protocol::select(&mut engine.party, &bits, &mine)?;
        protocol::square(&mut engine.party, &zero_or_x)
    };
    // The demand is learnt from a run without a store; both parties count the same.
    let (a, b) = memory::pipes(Duration::from_secs(20));
    let [wanted, also] = std::thread::scope(|scope| {
        let ends = [(Role::Client, a), (Role::Server, b)].map(|(role, pipe)| {
            scope.spawn(move || {
                let mut engine =
                    Engine::set_up(role, Box::new(pipe), Settings::new(Security::InsecureLoopback)).unwrap();
                engine.reset_costs();
                run(&mut engine).unwrap();
                assert!(split(&engine.party.channel.costs()).preprocess.bytes_sent == 0);
                engine.demand()
            })
        });
        ends.map(|thread| thread.join().unwrap())
    });
    assert_eq!(wanted, also);
    assert!(wanted.pads_from_client > 0 && wanted.triples == 300, "{wanted:?}");

    let twice = Demand {
        pads_from_client: wanted.pads_from_client + (64 << 10),
        pads_from_server: wanted.pads_from_server + (64 << 10),
        pads16_from_client: wanted.pads16_from_client + (64 << 10),
        pads16_from_server: wanted.pads16_from_server + (64 << 10),
        triples: wanted.triples + (64 << 10),
    };
    let made = pair.good(|engine| {
        engine.preprocess(&twice, &mut quiet())?;
        let costs = split(&engine.party.channel.costs());
        Ok((engine.stored()?, bytes(&costs.preprocess), bytes(&costs.online)))
    });
    assert!(made[0].0 == made[1].0 && made[0].0.triples >= twice.triples);
    assert!(made[0].1 > 100_000 && made[0].2 == 0, "{made:?}");
    let mut last = made[0].0;
    for _ in 0..2 {
        let used = pair.good(|engine| {
            let before = engine.stored()?;
            engine.reserve(&wanted)?;
            let reserved = engine.party.channel.costs();
            let opened = run(engine)?;
            // The steps stop for the store no more.
            let store = |c: &&StepCost| c.step.ends_with("/store");
            assert_eq!(
                engine.party.channel.costs().iter().filter(store).count(),
                reserved.iter().filter(store).count()
            );
            engine.reserve(&Demand::default())?;
            let costs = engine.party.channel.costs();
            assert!(costs.iter().all(|c| !c.step.contains("ot setup") && !c.step.contains(MADE_NOW)));
            Ok((before, engine.stored()?, opened, split(&costs)))
        });
        for (i, &x) in x.iter().enumerate() {
            let square = field::to_signed(field::add(used[0].2[i], used[1].2[i]));
            assert_eq!(square, if x < 0 { x * x } else { 0 });
        }
        assert_eq!(used[0].0, used[1].0);
        assert!(used[0].0.pads_from_client <= last.pads_from_client && used[0].1.triples < used[0].0.triples);
        let reservation = 16 + 16 + 5 * (3 + 8 + 8);
        assert!(bytes(&used[0].3.preprocess) <= 2 * reservation, "nothing is made in the session that uses it");
        assert!(used[0].3.online.bytes_sent > 0 && bytes(&used[0].3.total) > bytes(&used[0].3.online));
        last = used[0].1;
    }
    // What is left does not suffice, and making more while somebody waits was not allowed.
    for end in pair.session(|engine| transfers(engine, 1 << 20).map(drop)) {
        assert!(matches!(end, Ok(Err(Error::Exhausted(_)))));
    }
}

#[test]
fn a_dry_store_is_extended_in_a_step_of_its_own_name() {
    let pair = Pair::new(Policy::default());
    let mut seen = HashSet::new();
    pair.good(|engine| engine.preprocess(&Demand { pads_from_client: 2048, ..Demand::default() }, &mut quiet()));
    let ends = pair.good(|engine| {
        engine.reset_costs();
        let got = transfers(engine, 3000)?;
        let costs = engine.party.channel.costs();
        let now = costs.iter().find(|c| c.step == format!("{MADE_NOW}/ot extension"));
        assert!(now.is_some_and(|c| Phase::of(&c.step) == Phase::Online && bytes(c) > 0), "{costs:?}");
        assert_eq!(engine.demand().pads_from_client, 3000);
        Ok(got)
    });
    check(&mut seen, ends);
    // A session without anything stored works too, and makes other ones.
    check(&mut seen, pair.good(|engine| transfers(engine, 500)));
}

#[test]
fn a_party_that_dies_at_any_point_loses_what_it_reserved_and_uses_nothing_twice() {
    let demand = Demand { pads_from_client: 96 << 10, ..Demand::default() };
    for point in ["reserve.mark-fsynced", "exchange.sent", "exchange.received", "use.block-read", "use.block-given"] {
        for who in 0..2 {
            let pair = Pair::new(Policy::default());
            let mut seen = HashSet::new();
            pair.good(|engine| engine.preprocess(&demand, &mut quiet()));
            check(&mut seen, pair.good(|engine| transfers(engine, 1500)));
            pair.disks[who].plan(Fault::DieAtPoint(point, 1));
            let ends = pair.session(|engine| transfers(engine, 5000));
            assert!(ends[who].as_ref().is_err_and(|thrown| thrown.is::<Died>()), "{point}");
            // What the survivor was given counts as used, whether or not it could do anything with it.
            if let (0, [_, Ok(Ok(_))]) | (1, [Ok(Ok(_)), _]) = (who, &ends) {
                panic!("{point}: nobody says goodbye to the dead");
            }
            pair.disks[who].boot(Loss::Unsynced);
            for _ in 0..2 {
                check(
                    &mut seen,
                    pair.good(|engine| {
                        assert!(engine.agreement().is_some_and(|a| a.started_over.is_none()));
                        transfers(engine, 1500)
                    }),
                );
            }
        }
    }
}

#[test]
fn a_copied_or_restored_store_is_refused_by_both_or_everything_stored_is_thrown_away() {
    let demand = Demand { pads_from_client: 256 << 10, triples: 2048, ..Demand::default() };
    for who in 0..2 {
        let mut pair = Pair::new(Policy::default());
        let mut seen = HashSet::new();
        pair.good(|engine| engine.preprocess(&demand, &mut quiet()));
        let backup = pair.copy();
        check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
        let now = pair.copy();

        // A copy of the whole store, both places: its own files look well, the peer knows better.
        pair.disks[who] = backup.disks[who].copy();
        assert!(refused(pair.session(|engine| transfers(engine, 10))).contains("copied or restored"));
        // One party's wish to go on is not enough.
        pair.policies[who] = START_OVER;
        assert!(refused(pair.session(|engine| transfers(engine, 10))).contains("copied or restored"));
        // Both wish it: everything is burnt, however old, and the session works on new transfers.
        pair.policies = [START_OVER; 2];
        let again = pair.good(|engine| {
            assert!(engine.agreement().is_some_and(|a| a.started_over.is_some_and(|why| why.contains("restored"))));
            assert_eq!(engine.stored()?, Demand::default());
            engine.preprocess(&Demand { pads_from_client: 96 << 10, ..Demand::default() }, &mut quiet())?;
            transfers(engine, 1000)
        });
        check(&mut seen, again);
        check(
            &mut seen,
            pair.good(|engine| {
                assert!(engine.agreement().is_some_and(|a| a.started_over.is_none()));
                transfers(engine, 1000)
            }),
        );
        // The original of the copy comes back: it is the one that is behind now.
        pair.policies = [Policy::default(); 2];
        pair.disks[who] = now.disks[who].copy();
        refused(pair.session(|engine| transfers(engine, 10)));
        // A party that lost its store and made another is told from one that never had any.
        pair.disks[who] = MemoryDisk::default();
        assert!(refused(pair.session(|engine| transfers(engine, 10))).contains("not the one"));
    }
}

/// Going on behind the larger of two marks is not enough if both parties restored, each to another time. Starting over is.
#[test]
fn two_parties_restored_to_different_times_use_nothing_twice() {
    let mut pair = Pair::new(START_OVER);
    let demand = Demand { pads_from_client: 512 << 10, ..Demand::default() };
    let mut seen = HashSet::new();
    pair.good(|engine| engine.preprocess(&demand, &mut quiet()));
    let first = pair.copy();
    check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
    let second = pair.copy();
    check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
    pair.disks = [first.disks[0].copy(), second.disks[1].copy()];
    check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
    check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
}

#[test]
fn a_crash_while_starting_over_leaves_a_store_that_opens() {
    for point in ["agree.mark-fsynced", "agree.epoch-fsynced", "wipe.begin", "wipe.before-fsync", "compact.removed"] {
        for loss in [Loss::Nothing, Loss::Unsynced] {
            let mut pair = Pair::new(START_OVER);
            let demand = Demand { pads_from_client: 256 << 10, ..Demand::default() };
            let mut seen = HashSet::new();
            pair.good(|engine| engine.preprocess(&demand, &mut quiet()));
            let backup = pair.copy();
            check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
            pair.disks[0] = backup.disks[0].copy();
            pair.disks[1].plan(Fault::DieAtPoint(point, 1));
            assert!(pair.session(|engine| transfers(engine, 10))[1].is_err(), "{point} was not reached");
            pair.disks[1].boot(loss);
            for _ in 0..2 {
                check(&mut seen, pair.good(|engine| transfers(engine, 1000)));
            }
        }
    }
}

const SINGLE: Shape = Shape { rows: 5, columns: 40, outputs: 30 };

fn layers() -> Vec<Layer> {
    let shape = BatchedShape { experts: 4, tokens: 3, columns_in: 6, columns_out: vec![5, 2] };
    vec![
        Layer { name: "query".into(), linear: Linear::Single { shape: SINGLE, weight_bits: 16 } },
        Layer { name: "experts".into(), linear: Linear::Experts { shape, most_bytes: None } },
    ]
}

fn weights(number: usize) -> LayerWeights {
    let some = |n: usize, seed: usize| (0..n).map(move |i| ((i * 7919 + seed * 31) % 2001) as i32 - 1000);
    match number {
        0 => LayerWeights::Single(some(40 * 30, 1).collect()),
        _ => LayerWeights::Experts([5, 2].map(|out| some(4 * out * 6, out).map(|w| w as i16).collect()).into()),
    }
}

fn inputs(n: usize, role: Role) -> Vec<u64> {
    (0..n).map(|i| if role.is_client() { i as u64 * 3 } else { 7 }).collect()
}

/// Both layers once; with `named` from what was prepared.
fn forward(engine: &mut Engine, named: bool) -> Result<[Vec<u64>; 2]> {
    let role = engine.party.role;
    let (x, y) = (inputs(5 * 40, role), inputs(4 * 3 * 6, role));
    let of = |number| if role.is_client() { None } else { Some(weights(number)) };
    let (single, experts) = (of(0), of(1));
    let single = single.as_ref().map(|w| if let LayerWeights::Single(w) = w { &w[..] } else { unreachable!() });
    let first = engine.product(&x, SINGLE, 16, single, named.then_some("query"))?;
    let Linear::Experts { shape, .. } = &layers()[1].linear else { unreachable!() };
    let matrices: Option<Vec<ExpertWeights>> = experts.as_ref().map(|w| {
        let LayerWeights::Experts(all) = w else { unreachable!() };
        let each = all.iter().zip(&shape.columns_out);
        each.map(|(w, &out)| ExpertWeights::new(Numbers::I16(w), 4, out, 6).unwrap()).collect()
    });
    let second = engine.batched_product(&y, shape.clone(), None, matrices.as_deref(), named.then_some("experts"))?;
    Ok([first, second.concat()])
}

fn prepare(engine: &mut Engine, passes: u64, tell: Tell) -> Result<()> {
    let mut fetch = |number| Ok(weights(number));
    let fetch: Option<&mut dyn FnMut(usize) -> Result<LayerWeights>> =
        if engine.party.role.is_client() { None } else { Some(&mut fetch) };
    engine.prepare(&layers(), passes, fetch, tell)
}

fn opened([client, server]: &[[Vec<u64>; 2]; 2]) -> Vec<i64> {
    let both = |k: usize| client[k].iter().zip(&server[k]).map(|(&a, &b)| field::to_signed(field::add(a, b)));
    both(0).chain(both(1)).collect()
}

#[test]
fn linear_layers_made_ahead_are_the_layers_and_cost_one_message_and_one_reservation() {
    let pair = Pair::new(Policy::default());
    let whole = opened(&pair.good(|engine| forward(engine, false)));
    let mut told = pair.good(|engine| {
        let mut last = 0;
        prepare(engine, 2, &mut |progress| {
            assert!(progress.stored > last && progress.wanted == 4);
            last = progress.stored;
            Ok(())
        })?;
        let costs = split(&engine.party.channel.costs());
        assert!(bytes(&costs.online) == 0 && costs.preprocess.bytes_sent > 10_000);
        // Nothing is missing, so nothing is made.
        engine.reset_costs();
        prepare(engine, 2, &mut quiet())?;
        assert_eq!(bytes(&split(&engine.party.channel.costs()).total), 0);
        Ok(last)
    });
    told.sort_unstable();
    assert_eq!(told, [4, 4]);
    for left in [1, 0] {
        let ends = pair.good(|engine| {
            engine.reset_costs();
            let out = forward(engine, true)?;
            let costs = split(&engine.party.channel.costs());
            assert_eq!(engine.prepared(&layers()[0])?, left);
            assert_eq!(engine.prepared(&layers()[1])?, left);
            Ok((out, costs))
        });
        let [(a, costs), (b, theirs)] = ends;
        for (got, want) in opened(&[a, b]).iter().zip(&whole) {
            assert!((got - want).abs() <= 2, "each preparation of the first layer is off by at most one");
        }
        assert_eq!(bytes(&costs.preprocess), 0);
        // x - r of both layers, each with a header and its number, and the one reservation of the pass in both directions.
        let inputs = field::packed_len(5 * 40, field::P_BITS) + field::packed_len(4 * 3 * 6, field::P_BITS);
        assert_eq!(costs.online.bytes_sent as usize, inputs + 2 * (16 + 8) + (16 + 16 + 3 + 8 + 8));
        assert_eq!((costs.online.rounds, theirs.online.bytes_sent), (1, 16 + 16 + 3 + 8 + 8));
    }
    // None is left: the layers are computed as a whole, and the same comes out.
    let ends = pair.good(|engine| forward(engine, true));
    assert!(opened(&ends).iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 2));
}

#[test]
fn lists_of_layers_have_streams_of_their_own_and_a_list_out_of_order_burns_what_it_skips() {
    let pair = Pair::new(Policy::default());
    let [query, experts] = <[Layer; 2]>::try_from(layers()).unwrap();
    let key = Layer { name: "key".into(), linear: query.linear.clone() };
    let ahead = |engine: &mut Engine, list: &[&Layer]| {
        let list: Vec<Layer> = list.iter().map(|&layer| layer.clone()).collect();
        let mut fetch =
            |number: usize| Ok(weights(if matches!(list[number].linear, Linear::Single { .. }) { 0 } else { 1 }));
        let fetch: Option<&mut dyn FnMut(usize) -> Result<LayerWeights>> =
            if engine.party.role.is_client() { None } else { Some(&mut fetch) };
        engine.prepare(&list, 2, fetch, &mut quiet())
    };
    let left = |engine: &Engine| [&query, &experts, &key].map(|layer| engine.prepared(layer).unwrap());
    let use_key = |engine: &mut Engine| {
        let x = inputs(5 * 40, engine.party.role);
        let LayerWeights::Single(w) = weights(0) else { unreachable!() };
        let w = (!engine.party.role.is_client()).then_some(&w[..]);
        engine.product(&x, SINGLE, 16, w, Some("key"))
    };
    pair.good(|engine| {
        ahead(engine, &[&query, &experts])?;
        ahead(engine, &[&key])?;
        assert_eq!(left(engine), [2, 2, 2]);
        use_key(engine)?;
        assert_eq!(left(engine), [2, 2, 1]);
        forward(engine, true)?;
        assert_eq!(left(engine), [1, 1, 1]);
        // Topped up, each in its own stream.
        ahead(engine, &[&key])?;
        ahead(engine, &[&query, &experts])?;
        assert_eq!(left(engine), [2, 2, 2]);
        Ok(())
    });
    let pair = Pair::new(Policy::default());
    pair.good(|engine| {
        ahead(engine, &[&query, &key])?;
        use_key(engine)?;
        assert_eq!(left(engine), [1, 0, 1], "the query before it is burnt");
        Ok(())
    });
}

#[test]
fn a_layer_that_is_not_there_is_refused_where_that_was_asked_for_and_a_mistake_burns_nothing() {
    let pair = Pair::new(REFUSE);
    pair.good(|engine| prepare(engine, 1, &mut quiet()));
    pair.good(|engine| {
        assert!(matches!(engine.product(&[1, 2], SINGLE, 16, None, Some("query")), Err(Error::BadArgument(_))));
        assert_eq!(engine.prepared(&layers()[0])?, 1);
        forward(engine, true)
    });
    for end in pair.session(|engine| forward(engine, true)) {
        assert!(matches!(end, Ok(Err(Error::Exhausted(reason))) if reason.contains("query")));
    }
}

#[test]
fn a_fill_whose_listener_fails_ends_and_the_next_session_goes_on() {
    let pair = Pair::new(Policy::default());
    let demand = Demand { pads_from_client: 3 << 18, ..Demand::default() };
    let ends = pair.session(|engine| {
        let mut batches = 0;
        engine.preprocess(&demand, &mut |_| {
            batches += 1;
            if batches == 2 { Err(Error::SessionOver) } else { Ok(()) }
        })
    });
    assert!(ends.iter().all(|end| matches!(end, Ok(Err(_)))));
    let stored = pair.good(|engine| Ok(engine.stored()?.pads_from_client));
    assert_eq!(stored, [2 << 18; 2]);
}

#[test]
fn a_session_with_a_store_on_one_side_only_is_refused_by_both() {
    let (a, b) = memory::pipes(Duration::from_secs(20));
    let with = |store: bool| {
        let mut settings = Settings::new(Security::InsecureLoopback);
        settings.terms.model = MODEL;
        let disk = Arc::new(MemoryDisk::default());
        settings.store = store.then(|| StoreSettings { place: place(), policy: Policy::default(), disk });
        settings
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| Engine::set_up(Role::Server, Box::new(b), with(false)).map(drop));
        let client = Engine::set_up(Role::Client, Box::new(a), with(true)).map(drop);
        for end in [client, server.join().unwrap()] {
            assert!(matches!(end, Err(Error::Disagreement { field: "store marks", .. })));
        }
    });
}

#[test]
fn a_store_for_no_model_in_particular_is_refused() {
    let (a, _b) = memory::pipes(Duration::from_secs(1));
    let mut settings = Settings::new(Security::InsecureLoopback);
    let disk = Arc::new(MemoryDisk::default());
    settings.store = Some(StoreSettings { place: place(), policy: Policy::default(), disk });
    let refused = Engine::set_up(Role::Client, Box::new(a), settings).map(drop);
    assert!(matches!(&refused, Err(Error::BadArgument(why)) if why.contains("digest")), "{refused:?}");
}
