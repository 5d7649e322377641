//! Work done ahead: what a computation will need, made before its input exists and kept in the store.
//!
//! Both parties call [`fill`] with the same plan. It works batch by batch, each of which counts once both parties have it
//! on disk, so that a kill loses at most one batch and a second call makes only what is missing. All of it is counted
//! under the step [`STEP`], so [`split`] can say what a request cost `online` and in `total`.

use crate::error::{Error, Result};
use crate::net::{StepCost, cost};
use crate::ot::store::{BLOCK_ITEMS, Lane, SharedStore, codec};
use crate::party::Party;
use std::collections::BTreeSet;
use zeroize::{Zeroize, Zeroizing};

/// The name of the step under which preprocessing is counted.
pub const STEP: &str = "preprocess";

/// Items of one batch unless the plan says otherwise: 8 MiB of the sender's pads, and as many as a silent extension makes
/// at its cheapest.
pub const BATCH_ITEMS: u64 = 256 * BLOCK_ITEMS;

/// Records of one stream: the same sequence again and again, one pass for each request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedRecords {
    /// The stream, see [`Lane::Records`].
    pub stream: u16,
    /// Public digests of what one pass uses, in the order of use, all different; they tell at which place of the pass a
    /// stream stands.
    pub pass: Vec<[u8; 32]>,
    /// How many passes to have ready.
    pub passes: u64,
}

/// How many transfers and triples a computation takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Demand {
    /// Random 1-of-2 transfers sent by the client.
    pub pads_from_client: u64,
    /// Random 1-of-2 transfers sent by the server.
    pub pads_from_server: u64,
    /// Random 1-of-16 transfers sent by the client.
    pub pads16_from_client: u64,
    /// Random 1-of-16 transfers sent by the server.
    pub pads16_from_server: u64,
    /// Multiplication triples.
    pub triples: u64,
}

impl Demand {
    /// The count of one lane; nothing for records.
    pub fn lane(&mut self, lane: Lane) -> Option<&mut u64> {
        match lane {
            Lane::PadsFromClient => Some(&mut self.pads_from_client),
            Lane::PadsFromServer => Some(&mut self.pads_from_server),
            Lane::Pads16FromClient => Some(&mut self.pads16_from_client),
            Lane::Pads16FromServer => Some(&mut self.pads16_from_server),
            Lane::Triples => Some(&mut self.triples),
            Lane::Records(_) => None,
        }
    }
}

impl From<Demand> for Plan {
    fn from(demand: Demand) -> Self {
        let Demand { pads_from_client, pads_from_server, pads16_from_client, pads16_from_server, triples } = demand;
        let records = Vec::new();
        let batch_items = BATCH_ITEMS;
        Self {
            pads_from_client,
            pads_from_server,
            pads16_from_client,
            pads16_from_server,
            triples,
            records,
            batch_items,
        }
    }
}

/// What a computation needs. Counts are what the store shall hold afterwards, rounded up to whole blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Random 1-of-2 transfers sent by the client.
    pub pads_from_client: u64,
    /// Random 1-of-2 transfers sent by the server.
    pub pads_from_server: u64,
    /// Random 1-of-16 transfers sent by the client.
    pub pads16_from_client: u64,
    /// Random 1-of-16 transfers sent by the server.
    pub pads16_from_server: u64,
    /// Multiplication triples.
    pub triples: u64,
    /// Prepared records.
    pub records: Vec<PlannedRecords>,
    /// Items of one batch: what a kill can lose, and what is in memory at once.
    pub batch_items: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            pads_from_client: 0,
            pads_from_server: 0,
            pads16_from_client: 0,
            pads16_from_server: 0,
            triples: 0,
            records: Vec::new(),
            batch_items: BATCH_ITEMS,
        }
    }
}

impl Plan {
    /// The lanes of transfers and triples with the items wanted.
    pub fn lanes(&self) -> [(Lane, u64); 5] {
        [
            (Lane::PadsFromClient, self.pads_from_client),
            (Lane::PadsFromServer, self.pads_from_server),
            (Lane::Pads16FromClient, self.pads16_from_client),
            (Lane::Pads16FromServer, self.pads16_from_server),
            (Lane::Triples, self.triples),
        ]
    }
}

/// How far a fill has come in the lane that it works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// The lane.
    pub lane: Lane,
    /// Items that the store holds now.
    pub stored: u64,
    /// Items that it shall hold.
    pub wanted: u64,
}

/// Hears how far a fill has come. An error ends it, and with it the session: the peer waits for the next batch.
pub type Tell<'a> = &'a mut dyn FnMut(Progress) -> Result<()>;

/// Makes this party's half of a record, talking to the peer as needed. `digest` says what it is for.
pub type MakeRecord<'a> = &'a mut dyn FnMut(&mut Party, &[u8; 32]) -> Result<Zeroizing<Vec<u8>>>;

/// Makes what the plan wants and the store lacks, with the party's own supplies. The stores must have met in this
/// session; the party's supplies must not be this store. Refuses a plan with records, see [`fill_with_records`].
///
/// Cost besides the supplies': two rounds and five syncs a batch. Memory: one batch.
pub fn fill(party: &mut Party, store: &SharedStore, plan: &Plan, progress: Tell) -> Result<()> {
    if !plan.records.is_empty() {
        return Err(Error::BadArgument("this plan has records: say how they are made".into()));
    }
    fill_with_records(party, store, plan, progress, &mut |_, _| Err(Error::BadArgument("no records planned".into())))
}

/// Like [`fill`], for plans with records.
pub fn fill_with_records(
    party: &mut Party,
    store: &SharedStore,
    plan: &Plan,
    progress: Tell,
    make: MakeRecord,
) -> Result<()> {
    if plan.batch_items == 0 || plan.records.iter().any(|r| r.pass.is_empty()) {
        return Err(Error::BadArgument("a plan has batches and passes of at least one item".into()));
    }
    for records in &plan.records {
        if BTreeSet::from_iter(&records.pass).len() != records.pass.len() {
            return Err(Error::BadArgument("a pass names the same record twice".into()));
        }
    }
    let batch_items = whole_blocks(plan.batch_items)?;
    let mut lanes = plan.lanes();
    for (_, wanted) in &mut lanes {
        *wanted = whole_blocks(*wanted)?;
    }
    party.step(STEP, |party| {
        for (lane, wanted) in lanes {
            party.step(&lane.name(), |party| fill_lane(party, store, lane, wanted, batch_items, progress))?;
        }
        for records in &plan.records {
            let name = Lane::Records(records.stream).name();
            party.step(&name, |party| fill_records(party, store, records, progress, make))?;
        }
        Ok(())
    })
}

fn whole_blocks(items: u64) -> Result<u64> {
    items
        .checked_next_multiple_of(BLOCK_ITEMS)
        .filter(|&n| n < 1 << 48)
        .ok_or_else(|| Error::BadArgument("more correlations than any disk holds".into()))
}

/// `wanted` and `batch_items` are whole blocks.
fn fill_lane(
    party: &mut Party,
    store: &SharedStore,
    lane: Lane,
    wanted: u64,
    batch_items: u64,
    progress: Tell,
) -> Result<()> {
    loop {
        let stored = store.lock()?.remaining(lane);
        if stored >= wanted {
            return Ok(());
        }
        let count = batch_items.min(wanted - stored);
        let offer = store.lock()?.offer(&mut party.channel, lane, count, [0; 32])?;
        // The lock is not held while the supply works: it may take minutes.
        let items = make_items(party, lane, count as usize)?;
        let mut open = store.lock()?;
        let block_bytes = lane.block_bytes(party.role).expect("every lane but the records has a fixed block");
        let mut batch = open.write(offer, block_bytes)?;
        for i in 0..(count / BLOCK_ITEMS) as usize {
            open.push(&mut batch, &items.block(i))?;
        }
        drop(items);
        open.keep(&mut party.channel, batch)?;
        let stored = open.remaining(lane);
        drop(open);
        progress(Progress { lane, stored, wanted })?;
    }
}

/// One batch in memory, wiped when it goes.
struct Items(Kind);

enum Kind {
    Sent(crate::ot::SentPads),
    Received(crate::ot::ReceivedPads),
    Sent16(Vec<[u8; 16]>),
    Received16(crate::ot::ReceivedPads16),
    Triples(crate::party::Triples),
}

impl Items {
    fn block(&self, i: usize) -> Zeroizing<Vec<u8>> {
        let n = BLOCK_ITEMS as usize;
        match &self.0 {
            Kind::Sent(pads) => codec::sent(&pads[i * n..(i + 1) * n]),
            Kind::Received(all) => codec::received(all, i),
            Kind::Sent16(pads) => codec::sent16(&pads[i * n..(i + 1) * n]),
            Kind::Received16(all) => codec::received16(all, i),
            Kind::Triples(all) => codec::triples(all, i),
        }
    }

    fn len(&self) -> usize {
        match &self.0 {
            Kind::Sent(pads) => pads.len(),
            Kind::Received(all) => all.pads.len().min(all.choices.len()),
            Kind::Sent16(pads) => pads.len(),
            Kind::Received16(all) => all.pads.len().min(all.choices.len()),
            Kind::Triples(all) => all.a.len().min(all.b.len()).min(all.c.len()),
        }
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        match &mut self.0 {
            Kind::Sent(pads) => pads.zeroize(),
            Kind::Received(all) => (all.choices.zeroize(), all.pads.zeroize()).0,
            Kind::Sent16(pads) => pads.zeroize(),
            Kind::Received16(all) => (all.choices.zeroize(), all.pads.zeroize()).0,
            Kind::Triples(all) => (all.a.zeroize(), all.b.zeroize(), all.c.zeroize()).0,
        }
    }
}

fn make_items(party: &mut Party, lane: Lane, n: usize) -> Result<Items> {
    let sends = lane == Lane::pads(party.role) || lane == Lane::pads16(party.role);
    let channel = &mut party.channel;
    let items = Items(match lane {
        Lane::PadsFromClient | Lane::PadsFromServer if sends => Kind::Sent(party.ot.send(channel, n)?),
        Lane::PadsFromClient | Lane::PadsFromServer => Kind::Received(party.ot.receive(channel, n)?),
        Lane::Pads16FromClient | Lane::Pads16FromServer if sends => Kind::Sent16(party.ot.send16(channel, n)?),
        Lane::Pads16FromClient | Lane::Pads16FromServer => Kind::Received16(party.ot.receive16(channel, n)?),
        Lane::Triples => Kind::Triples(party.triples.triples(channel, n)?),
        Lane::Records(_) => return Err(Error::BadArgument("records are not made by a supply".into())),
    });
    if items.len() != n {
        return Err(Error::BadArgument(format!("a supply gave {} items where {n} were asked for", items.len())));
    }
    Ok(items)
}

fn fill_records(
    party: &mut Party,
    store: &SharedStore,
    records: &PlannedRecords,
    progress: Tell,
    make: MakeRecord,
) -> Result<()> {
    let lane = Lane::Records(records.stream);
    let pass = records.pass.len() as u64;
    let wanted = records.passes.saturating_mul(pass);
    loop {
        let (stored, next) = {
            let open = store.lock()?;
            let last = open.records(records.stream).next_back().map(|(_, digest)| *digest);
            (open.remaining(lane), after(&records.pass, last)?)
        };
        // A pass may have lost its head; one that is under way is always completed.
        if stored >= wanted && next == 0 {
            return Ok(());
        }
        let digest = records.pass[next];
        let offer = store.lock()?.offer(&mut party.channel, lane, 1, digest)?;
        let record = make(party, &digest)?;
        let mut open = store.lock()?;
        let mut batch = open.write(offer, record.len())?;
        open.push(&mut batch, &record)?;
        drop(record);
        open.keep(&mut party.channel, batch)?;
        let stored = open.remaining(lane);
        drop(open);
        progress(Progress { lane, stored, wanted })?;
    }
}

/// The place in a pass that follows on the newest record of a stream.
fn after(pass: &[[u8; 32]], last: Option<[u8; 32]>) -> Result<usize> {
    let Some(last) = last else { return Ok(0) };
    match pass.iter().position(|digest| *digest == last) {
        Some(place) => Ok((place + 1) % pass.len()),
        None => Err(Error::BadArgument("this stream holds records of another pass".into())),
    }
}

/// When a step happens, told from its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Once a session, before anything is computed: the hello, base transfers, keys.
    SetUp,
    /// Made ahead.
    Preprocess,
    /// Waits for the input.
    Online,
}

/// The name of the step under which the start of a session is counted, besides the hello.
pub const SET_UP: &str = "set up";

impl Phase {
    /// The phase of a step. What a step has to make because nothing was made ahead is online, whatever it is.
    pub fn of(step: &str) -> Phase {
        let mut parts = step.split('/');
        match parts.next() {
            Some("hello" | SET_UP) => Phase::SetUp,
            first if first.into_iter().chain(parts).any(|part| part == STEP) => Phase::Preprocess,
            _ => Phase::Online,
        }
    }

    /// A name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::SetUp => "set up",
            Phase::Preprocess => "preprocess",
            Phase::Online => "online",
        }
    }
}

/// What a session cost, split into what was made before and what had to wait for the input.
#[derive(Clone, Debug, PartialEq)]
pub struct CostSplit {
    /// The start of the session, summed.
    pub set_up: StepCost,
    /// Steps inside preprocessing, summed.
    pub preprocess: StepCost,
    /// All other steps, summed.
    pub online: StepCost,
    /// Everything.
    pub total: StepCost,
}

/// Splits a channel's costs.
pub fn split(costs: &[StepCost]) -> CostSplit {
    let sum = |phase: Phase| {
        let steps: Vec<StepCost> = costs.iter().filter(|c| Phase::of(&c.step) == phase).cloned().collect();
        StepCost { step: phase.name().into(), ..cost::total(&steps) }
    };
    CostSplit {
        set_up: sum(Phase::SetUp),
        preprocess: sum(Phase::Preprocess),
        online: sum(Phase::Online),
        total: cost::total(costs),
    }
}
