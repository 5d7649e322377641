//! Where the steps of a session get their transfers and triples: from the store first if there is one, then from what
//! is made now. Everything that is given out is counted, so that a computation can say what to make ahead for the next.

use crate::error::{Error, Result};
use crate::net::Channel;
use crate::ot::store::Lane;
use crate::ot::{ExtendedOt, OtConfig, OtCounts, OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use crate::party::{Role, TripleSupply, Triples};
use crate::preprocess::Demand;
use crate::random::SecretRng;
use std::sync::{Arc, Mutex, MutexGuard};

/// A supply that the party's steps and the preprocessing both reach.
pub(super) struct Shared<T>(Arc<Mutex<T>>);

impl<T> Shared<T> {
    pub fn new(inner: T) -> Self {
        Self(Arc::new(Mutex::new(inner)))
    }

    /// Another handle to the same supply.
    pub fn handle(&self) -> Self {
        Self(self.0.clone())
    }

    pub fn get(&self) -> Result<MutexGuard<'_, T>> {
        // A panic while a supply was in use leaves it in an unknown state: correlations could repeat.
        self.0.lock().map_err(|_| Error::SessionOver)
    }
}

/// The transfers that this session makes. The base transfers are made when the first one is needed: a session that lives on its
/// store needs none. Both parties need them at the same step, so they come to it together.
pub(super) struct Transfers {
    role: Role,
    transcript: [u8; 32],
    config: OtConfig,
    rng: SecretRng,
    made: Option<ExtendedOt>,
}

impl Transfers {
    pub fn new(role: Role, transcript: [u8; 32], config: OtConfig, rng: SecretRng) -> Self {
        Self { role, transcript, config, rng, made: None }
    }

    /// The extension, after its base transfers.
    pub fn ready(&mut self, channel: &mut Channel) -> Result<&mut ExtendedOt> {
        if self.made.is_none() {
            let rng = &mut self.rng;
            self.made = Some(ExtendedOt::set_up(channel, self.role, &self.transcript, self.config, rng)?);
        }
        Ok(self.made.as_mut().expect("it was made above"))
    }

    /// What is in memory and was not given out.
    pub fn stock(&self) -> OtCounts {
        self.made.as_ref().map_or_else(OtCounts::default, ExtendedOt::stock)
    }

    /// Fills the stock in memory.
    pub fn preprocess(&mut self, channel: &mut Channel, demand: &Demand) -> Result<()> {
        let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let client = OtCounts {
            send: count(demand.pads_from_client),
            receive: count(demand.pads_from_server),
            send16: count(demand.pads16_from_client),
            receive16: count(demand.pads16_from_server),
        };
        let ours = if self.role.is_client() { client } else { client.for_peer() };
        if ours == OtCounts::default() { Ok(()) } else { self.ready(channel)?.preprocess(channel, ours) }
    }
}

impl OtSupply for Shared<Transfers> {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        self.get()?.ready(channel)?.send(channel, n)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        self.get()?.ready(channel)?.receive(channel, n)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        self.get()?.ready(channel)?.send16(channel, n)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        self.get()?.ready(channel)?.receive16(channel, n)
    }
}

impl<T: TripleSupply> TripleSupply for Shared<T> {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        self.get()?.triples(channel, n)
    }
}

/// A supply whose givings are counted.
pub(super) struct Counted<T> {
    role: Role,
    demand: Arc<Mutex<Demand>>,
    inner: T,
}

impl<T> Counted<T> {
    pub fn new(role: Role, demand: &Arc<Mutex<Demand>>, inner: T) -> Self {
        Self { role, demand: demand.clone(), inner }
    }

    fn count(&self, lane: Lane, n: usize) {
        // Numbers alone cannot be left in a bad state.
        let mut demand = self.demand.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(count) = demand.lane(lane) {
            *count += n as u64;
        }
    }
}

impl<T: OtSupply> OtSupply for Counted<T> {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        self.count(Lane::pads(self.role), n);
        self.inner.send(channel, n)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        self.count(Lane::pads(self.role.other()), n);
        self.inner.receive(channel, n)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        self.count(Lane::pads16(self.role), n);
        self.inner.send16(channel, n)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        self.count(Lane::pads16(self.role.other()), n);
        self.inner.receive16(channel, n)
    }
}

impl<T: TripleSupply> TripleSupply for Counted<T> {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        self.count(Lane::Triples, n);
        self.inner.triples(channel, n)
    }
}

/// Nothing to give: before a session has its keys, and after its end.
pub(super) struct Nothing;

impl OtSupply for Nothing {
    fn send(&mut self, _: &mut Channel, _: usize) -> Result<SentPads> {
        Err(Error::SessionOver)
    }

    fn receive(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads> {
        Err(Error::SessionOver)
    }

    fn send16(&mut self, _: &mut Channel, _: usize) -> Result<Vec<[u8; 16]>> {
        Err(Error::SessionOver)
    }

    fn receive16(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads16> {
        Err(Error::SessionOver)
    }
}

impl TripleSupply for Nothing {
    fn triples(&mut self, _: &mut Channel, _: usize) -> Result<Triples> {
        Err(Error::SessionOver)
    }
}
