//! Two parties with a disk each, sessions between them, and a checker that sees only what the store gave out.

use crate::disk::{Died, MemoryDisk};
use cloister_core::net::{Channel, memory};
use cloister_core::ot::store::{Disk, Identity, Lane, Place, SharedStore, Store, StoredOt};
use cloister_core::ot::{OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use cloister_core::party::{TripleSupply, Triples};
use cloister_core::preprocess::{Plan, PlannedRecords, fill_with_records};
use cloister_core::random::{PublicSeed, SecretRng};
use cloister_core::{Party, Result, Role, field};
use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Makes both halves of every correlation from one seed.
pub struct Dealer(Role, [ChaCha12Rng; 5]);

impl Dealer {
    pub fn new(role: Role, session: u64) -> Self {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&session.to_le_bytes());
        Dealer(role, std::array::from_fn(|i| PublicSeed(seed).stream(i as u64)))
    }

    fn draw(&mut self, i: usize) -> ([u128; 2], u8) {
        let rng = &mut self.1[i];
        let mut block = || u128::from(rng.next_u64()) | u128::from(rng.next_u64()) << 64;
        ([block(), block()], rng.next_u64() as u8)
    }
}

impl OtSupply for Dealer {
    fn send(&mut self, _: &mut Channel, n: usize) -> Result<SentPads> {
        Ok((0..n).map(|_| self.draw(self.0.is_client().into()).0).collect())
    }

    fn receive(&mut self, _: &mut Channel, n: usize) -> Result<ReceivedPads> {
        let (mut choices, mut pads) = (vec![], vec![]);
        for _ in 0..n {
            let (both, choice) = self.draw((!self.0.is_client()).into());
            choices.push(choice & 1);
            pads.push(both[usize::from(choice & 1)]);
        }
        Ok(ReceivedPads { choices, pads })
    }

    fn send16(&mut self, _: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        Ok((0..n).map(|_| self.draw(2 + usize::from(self.0.is_client())).0[0].to_le_bytes()).collect())
    }

    fn receive16(&mut self, _: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        let (mut choices, mut pads) = (vec![], vec![]);
        for _ in 0..n {
            let (all, choice) = self.draw(2 + usize::from(!self.0.is_client()));
            choices.push(choice & 15);
            pads.push(all[0].to_le_bytes()[usize::from(choice & 15)]);
        }
        Ok(ReceivedPads16 { choices, pads })
    }
}

impl TripleSupply for Dealer {
    fn triples(&mut self, _: &mut Channel, n: usize) -> Result<Triples> {
        let mut out = Triples { a: vec![], b: vec![], c: vec![] };
        for _ in 0..n {
            let [a0, a1, b0, b1, c0] = std::array::from_fn(|_| self.1[4].next_u64() % field::P);
            let c = field::mul(field::add(a0, a1), field::add(b0, b1));
            let mine = if self.0.is_client() { [a0, b0, c0] } else { [a1, b1, field::sub(c, c0)] };
            out.a.push(mine[0]);
            out.b.push(mine[1]);
            out.c.push(mine[2]);
        }
        Ok(out)
    }
}

/// What one call gave one party.
pub struct Given {
    pub session: u64,
    pub lane: Lane,
    pub items: Items,
}

pub enum Items {
    Sent(SentPads),
    Received(ReceivedPads),
    Sent16(Vec<[u8; 16]>),
    Received16(ReceivedPads16),
    Triples(Triples),
    Record(Vec<u8>),
}

pub type Log = Arc<Mutex<Vec<Given>>>;

/// Replays what both parties were given: nothing twice to anyone, and where both were given something it fits together.
/// Answers how many items were given out.
pub fn check(client: &[Given], server: &[Given]) -> std::result::Result<usize, String> {
    let mut total = 0;
    for (who, log) in [("client", client), ("server", server)] {
        let mut seen: HashSet<(Lane, Vec<u8>)> = HashSet::new();
        for given in log {
            let names: Vec<Vec<u8>> = match &given.items {
                Items::Sent(pads) => pads.iter().map(|p| p[0].to_le_bytes().to_vec()).collect(),
                Items::Received(r) => r.pads.iter().map(|p| p.to_le_bytes().to_vec()).collect(),
                Items::Sent16(pads) => pads.iter().map(|p| p.to_vec()).collect(),
                // A received 8-bit pad names nothing alone; 16 of them do, and pairing with the sender does the rest.
                Items::Received16(r) => r.pads.chunks_exact(16).map(<[u8]>::to_vec).collect(),
                Items::Triples(t) => {
                    t.a.iter().zip(&t.b).map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()].concat()).collect()
                }
                Items::Record(bytes) => vec![bytes.clone()],
            };
            total += names.len();
            for name in names {
                if !seen.insert((given.lane, name)) {
                    return Err(format!("the {who} was given an item of {:?} twice", given.lane));
                }
            }
        }
    }
    let lanes: HashSet<(u64, Lane)> = client.iter().map(|g| (g.session, g.lane)).collect();
    for key in lanes {
        let pick = |log: &'_ [Given]| -> Vec<usize> {
            (0..log.len()).filter(|&i| (log[i].session, log[i].lane) == key).collect()
        };
        for (i, j) in pick(client).into_iter().zip(pick(server)) {
            let fits = match (&client[i].items, &server[j].items) {
                (Items::Sent(s), Items::Received(r)) | (Items::Received(r), Items::Sent(s)) => {
                    s.len() == r.pads.len() && (0..s.len()).all(|k| s[k][usize::from(r.choices[k])] == r.pads[k])
                }
                (Items::Sent16(s), Items::Received16(r)) | (Items::Received16(r), Items::Sent16(s)) => {
                    s.len() == r.pads.len() && (0..s.len()).all(|k| s[k][usize::from(r.choices[k])] == r.pads[k])
                }
                (Items::Triples(x), Items::Triples(y)) => (0..x.a.len()).all(|k| {
                    field::mul(field::add(x.a[k], y.a[k]), field::add(x.b[k], y.b[k])) == field::add(x.c[k], y.c[k])
                }),
                (Items::Record(x), Items::Record(y)) => x[1..] == y[1..],
                _ => false,
            };
            if !fits {
                return Err(format!("the parties' halves of {key:?} do not fit together"));
            }
        }
    }
    Ok(total)
}

pub fn identity(role: Role) -> Identity {
    let (own, peer) = if role.is_client() { (1, 2) } else { (2, 1) };
    Identity { role, own: [own; 32], peer: [peer; 32], parameters: [9; 32] }
}

pub fn place() -> Place {
    Place { directory: "/disk/store".into(), beside: "/key/store".into() }
}

pub const DIGESTS: [[u8; 32]; 2] = [[0xaa; 32], [0xbb; 32]];

pub fn plan() -> Plan {
    Plan {
        pads_from_client: 4096,
        pads16_from_server: 2048,
        triples: 2048,
        records: vec![PlannedRecords { stream: 3, pass: DIGESTS.to_vec(), passes: 2 }],
        batch_items: 2048,
        ..Plan::default()
    }
}

/// Opens the party's store, or makes it.
pub fn open(disk: &MemoryDisk, role: Role) -> Result<Store> {
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let store = if Store::exists(disk, &place()) {
        Store::open(shared, &place(), &identity(role))?
    } else {
        Store::create(shared, &place(), &identity(role))?
    };
    Ok(store)
}

/// One session of one party: open, meet, fill up, use some of everything, close.
pub fn session(mut store: Store, role: Role, channel: Channel, number: u64, log: &Log) -> Result<()> {
    store.set_reserve_blocks(1)?;
    let shared = SharedStore::new(store);
    let mut party = Party {
        role,
        channel,
        ot: Box::new(Dealer::new(role, number)),
        triples: Box::new(Dealer::new(role, number)),
        rng: SecretRng::from_os(),
    };
    shared.meet(&mut party.channel)?;
    let mut serial = 0u64;
    fill_with_records(&mut party, &shared, &plan(), &mut |_| Ok(()), &mut |party, digest| {
        serial += 1;
        let mut record = vec![u8::from(party.role.is_client()); 1000];
        record[1..9].copy_from_slice(&number.to_le_bytes());
        record[9..17].copy_from_slice(&serial.to_le_bytes());
        record[17..49].copy_from_slice(digest);
        record[49..].fill(0);
        Ok(Zeroizing::new(record))
    })?;
    let mut stored = StoredOt::new(shared.clone());
    let channel = &mut party.channel;
    let give = |lane, items| log.lock().unwrap().push(Given { session: number, lane, items });
    for n in [700, 900, 1] {
        let items = match role {
            Role::Client => Items::Sent(stored.send(channel, n)?),
            Role::Server => Items::Received(stored.receive(channel, n)?),
        };
        give(Lane::PadsFromClient, items);
    }
    let items = match role {
        Role::Client => Items::Received16(stored.receive16(channel, 500)?),
        Role::Server => Items::Sent16(stored.send16(channel, 500)?),
    };
    give(Lane::Pads16FromServer, items);
    give(Lane::Triples, Items::Triples(stored.triples(channel, 1100)?));
    for digest in &DIGESTS {
        let record = shared.lock()?.take_record(channel, 3, digest, 0)?;
        give(Lane::Records(3), Items::Record(record.to_vec()));
    }
    drop(stored);
    shared.close().unwrap_or_else(|_| panic!("the store is still shared"))
}

pub struct World {
    pub disks: [MemoryDisk; 2],
    pub logs: [Log; 2],
    pub sessions: u64,
}

/// How one party's session ended.
#[derive(Debug)]
pub enum End {
    Done(Result<()>),
    Died,
}

impl World {
    pub fn new() -> Self {
        Self { disks: Default::default(), logs: Default::default(), sessions: 1 }
    }

    /// Runs a session of both parties; either may die in it.
    pub fn session(&mut self) -> [End; 2] {
        let (a, b) = memory::pipes(Duration::from_secs(20));
        let number = self.sessions;
        self.sessions += 1;
        let (disks, logs) = (&self.disks, &self.logs);
        let party = move |i: usize, pipe| {
            let role = [Role::Client, Role::Server][i];
            let channel = Channel::new(Box::new(pipe));
            let start = Instant::now();
            let store = open(&disks[i], role)?;
            assert!(start.elapsed() < Duration::from_secs(1), "opening took {:?}", start.elapsed());
            session(store, role, channel, number, &logs[i])
        };
        std::thread::scope(|scope| {
            let ends = [(0, a), (1, b)].map(|(i, pipe)| scope.spawn(move || party(i, pipe)));
            ends.map(|thread| match thread.join() {
                Ok(outcome) => End::Done(outcome),
                Err(thrown) if thrown.is::<Died>() => End::Died,
                Err(thrown) => std::panic::resume_unwind(thrown),
            })
        })
    }

    /// A session that must work.
    pub fn good_session(&mut self, why: &str) {
        for end in self.session() {
            assert!(matches!(end, End::Done(Ok(()))), "{why}: {end:?}");
        }
    }

    pub fn check(&self) -> std::result::Result<usize, String> {
        check(&self.logs[0].lock().unwrap(), &self.logs[1].lock().unwrap())
    }
}
