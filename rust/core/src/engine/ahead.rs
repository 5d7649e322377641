//! What a session makes before its input exists: transfers and triples by [`Engine::preprocess`], whole linear layers by
//! [`Engine::prepare`]. With a store all of it lies on disk under the identity of both parties and the model, serves any
//! later session with the same peer, and is used once; without one it lives in memory as long as the session.

use super::{Engine, whose_weights};
use crate::error::{Error, Result};
use crate::matmul::single::{self, Matrix, Shape};
use crate::matmul::{BatchedPlan, BatchedShape, Encryption, ExpertWeights, Numbers, batched};
use crate::ot::store::{Agreement, Lane, Store, StoredOt, WhenEmpty};
use crate::party::Party;
use crate::preprocess::{self, Demand, Plan, PlannedRecords, Progress, STEP, Tell};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// What a linear layer computes, in public terms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Linear {
    /// One matrix of weights.
    Single {
        /// The sizes.
        shape: Shape,
        /// Bits of a weight, sign included.
        weight_bits: u32,
    },
    /// Experts with weights of their own.
    Experts {
        /// The sizes.
        shape: BatchedShape,
        /// Most bytes that its preparation may take.
        most_bytes: Option<usize>,
    },
}

/// A linear layer to prepare. The name tells it from others of its shape; both parties say the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layer {
    /// Public.
    pub name: String,
    /// What it computes.
    pub linear: Linear,
}

/// The weights of one layer, at the server. No `Debug`: they are its secret.
pub enum LayerWeights {
    /// Row after row, (columns x outputs).
    Single(Vec<i32>),
    /// For each matrix `[expert][output][column]`.
    Experts(Vec<Vec<i16>>),
}

/// Fetches the weights of the layer with this number; the server's, one layer at a time.
pub type FetchWeights<'a> = &'a mut dyn FnMut(usize) -> Result<LayerWeights>;

/// The part of a record's digest that says which layer it is for.
type LayerId = [u8; 20];

impl Layer {
    /// Two layers of one name and shape are the same layer.
    pub(super) fn id(name: &str, linear: &Linear) -> LayerId {
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        put(b"cloister prepared layer 1");
        put(name.as_bytes());
        let numbers = match linear {
            Linear::Single { shape: Shape { rows, columns, outputs }, weight_bits } => {
                vec![1, *rows, *columns, *outputs, *weight_bits as usize]
            }
            Linear::Experts { shape, .. } => {
                [&[2, shape.experts, shape.tokens, shape.columns_in], &shape.columns_out[..]].concat()
            }
        };
        put(&numbers.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect::<Vec<_>>());
        let digest: [u8; 32] = hash.finalize().into();
        digest[..20].try_into().expect("20 of 32 bytes")
    }
}

/// The digests of one pass through some layers: which layer, which pass, which place of how many.
fn pass(ids: &[LayerId]) -> Result<Vec<[u8; 32]>> {
    let length = u16::try_from(ids.len()).map_err(|_| Error::Unsupported("more than 65,535 layers".into()))?;
    let tag = Sha256::digest(ids.concat());
    Ok((0u16..)
        .zip(ids)
        .map(|(place, id)| {
            let mut digest = [0; 32];
            digest[..20].copy_from_slice(id);
            digest[20..28].copy_from_slice(&tag[..8]);
            digest[28..30].copy_from_slice(&place.to_le_bytes());
            digest[30..].copy_from_slice(&length.to_le_bytes());
            digest
        })
        .collect())
}

/// Records that follow on this one in its pass.
fn rest_of_pass(digest: &[u8; 32]) -> u64 {
    let number = |at: usize| u64::from(u16::from_le_bytes([digest[at], digest[at + 1]]));
    number(30).saturating_sub(number(28) + 1)
}

/// The stream for a pass: the one that holds such passes, else the first that is empty, else a new one. Follows from
/// the agreed state of the stores alone, so both parties choose the same.
fn stream_of(store: &Store, pass: &[[u8; 32]]) -> Result<u16> {
    let newest = |stream| store.records(stream).next_back().map(|(_, digest)| *digest);
    let streams: Vec<u16> = store.streams().collect();
    let same = streams.iter().find(|&&stream| newest(stream).is_some_and(|digest| pass.contains(&digest)));
    let empty = || streams.iter().find(|&&stream| newest(stream).is_none());
    match same.or_else(empty) {
        Some(&stream) => Ok(stream),
        None => u16::try_from(streams.len()).map_err(|_| Error::Unsupported("no stream is left".into())),
    }
}

pub(super) enum LayerPlan {
    Single(single::Plan),
    Experts(BatchedPlan),
}

impl Engine {
    /// Makes transfers and triples ahead, so that steps need not wait for them. The demand is what there shall be
    /// afterwards; what [`Engine::demand`] says of one run of a computation serves the next. The costs stand under `preprocess`.
    pub fn preprocess(&mut self, demand: &Demand, tell: Tell) -> Result<()> {
        if let Some(store) = self.store.clone() {
            let plan = Plan::from(*demand);
            return self.with_makers(|party| preprocess::fill(party, &store, &plan, tell));
        }
        let (transfers, triples) = (&self.transfers, &self.triples);
        self.party.step(STEP, |party| {
            transfers.get()?.preprocess(&mut party.channel, demand)?;
            triples.get()?.refill(&mut party.channel, usize::try_from(demand.triples).unwrap_or(usize::MAX))
        })?;
        let lanes = Plan::from(*demand).lanes();
        lanes.into_iter().try_for_each(|(lane, wanted)| tell(Progress { lane, stored: wanted, wanted }))
    }

    /// Burns in the store, in one round, what a computation of this demand will take, so that its steps need not stop for the
    /// disk one by one. What is not used is lost at the end of the session. Counted under `preprocess`; without a store nothing happens.
    pub fn reserve(&mut self, demand: &Demand) -> Result<()> {
        let Some(store) = self.store.clone() else { return Ok(()) };
        let lanes = Plan::from(*demand).lanes();
        self.party.step(STEP, |party| StoredOt::new(store).reserve(&mut party.channel, &lanes))
    }

    /// How many transfers and triples the steps took since [`Engine::reset_costs`].
    pub fn demand(&self) -> Demand {
        *self.demand.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// How many transfers and triples are there for steps to take.
    pub fn stored(&self) -> Result<Demand> {
        let mut out = Demand::default();
        if let Some(store) = &self.store {
            let supply = StoredOt::new(store.clone());
            for (lane, _) in Plan::default().lanes() {
                if let Some(count) = out.lane(lane) {
                    *count = supply.remaining(lane)?;
                }
            }
        } else {
            let role = self.party.role;
            let stock = self.transfers.get()?.stock();
            for (lane, n) in [
                (Lane::pads(role), stock.send),
                (Lane::pads(role.other()), stock.receive),
                (Lane::pads16(role), stock.send16),
                (Lane::pads16(role.other()), stock.receive16),
                (Lane::Triples, self.triples.get()?.stock()),
            ] {
                if let Some(count) = out.lane(lane) {
                    *count = n as u64;
                }
            }
        }
        Ok(out)
    }

    /// What the parties found when they compared the marks of their stores.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.agreement.as_ref()
    }

    /// Makes linear layers ahead, `passes` of each, in the order in which they will be used: the client gets a random r
    /// and both get shares of W r. Online the client sends x - r and the server multiplies in the clear. The
    /// server passes the way to its weights, the client none. With a store the layers of one call form a pass: a layer used out of
    /// its order burns those before it. What is there already is not made again.
    ///
    /// Cost: that of the products, under `preprocess`, and with a store two rounds and five syncs a layer.
    pub fn prepare(
        &mut self,
        layers: &[Layer],
        passes: u64,
        mut weights: Option<FetchWeights>,
        tell: Tell,
    ) -> Result<()> {
        if weights.is_some() == self.party.role.is_client() {
            return Err(whose_weights());
        }
        let ids: Vec<LayerId> = layers.iter().map(|l| Layer::id(&l.name, &l.linear)).collect();
        let digests = pass(&ids)?;
        let plans: Vec<LayerPlan> = layers.iter().map(|l| self.plan_layer(&l.linear)).collect::<Result<_>>()?;
        if layers.is_empty() || passes == 0 {
            return Ok(());
        }
        let rotations: Vec<_> = plans.iter().flat_map(LayerPlan::rotations).collect();
        let begun = self.party.channel.begin(STEP);
        let outcome = self.add_rotations(rotations);
        self.party.channel.end(begun, &outcome);
        outcome?;

        let (quiet, encryption) = (self.quiet, &self.encryption);
        let mut make = |party: &mut Party, number: usize| -> Result<Zeroizing<Vec<u8>>> {
            let plan = &plans[number];
            let weights = weights.as_mut().map(|fetch| fetch(number)).transpose()?;
            party.channel.set_quiet_limit(quiet + super::patience(plan.work_seconds()?));
            let made = plan.make(party, encryption, weights.as_ref());
            party.channel.set_quiet_limit(quiet);
            made
        };
        if let Some(store) = &self.store {
            let stream = stream_of(&*store.lock()?, &digests)?;
            let records = vec![PlannedRecords { stream, pass: digests.clone(), passes }];
            let plan = Plan { records, ..Plan::default() };
            let number = |digest: &[u8; 32]| digests.iter().position(|d| d == digest).expect("a digest of this pass");
            preprocess::fill_with_records(&mut self.party, store, &plan, tell, &mut |party, digest| {
                make(party, number(digest))
            })
        } else {
            let prepared = &mut self.prepared;
            self.party.step(STEP, |party| {
                let wanted = passes.saturating_mul(layers.len() as u64);
                for stored in 0..wanted {
                    let number = (stored % layers.len() as u64) as usize;
                    let queue = prepared.entry(ids[number]).or_default();
                    if (queue.len() as u64) < passes {
                        queue.push_back(make(party, number)?);
                    }
                    tell(Progress { lane: Lane::Records(0), stored: stored + 1, wanted })?;
                }
                Ok(())
            })
        }
    }

    /// How many preparations of a layer are left.
    pub fn prepared(&self, layer: &Layer) -> Result<usize> {
        let id = Layer::id(&layer.name, &layer.linear);
        let Some(store) = &self.store else { return Ok(self.prepared.get(&id).map_or(0, |queue| queue.len())) };
        let store = store.lock()?;
        Ok(store.streams().map(|stream| store.records(stream).filter(|(_, d)| d[..20] == id).count()).sum())
    }

    /// The next preparation of a layer; none if it must be computed as a whole.
    pub(super) fn take_prepared(&mut self, name: &str, linear: &Linear) -> Result<Option<Zeroizing<Vec<u8>>>> {
        let id = Layer::id(name, linear);
        let Some(store) = &self.store else {
            return Ok(self.prepared.get_mut(&id).and_then(|queue| queue.pop_front()));
        };
        let found = {
            let store = store.lock()?;
            // Where several passes have this layer, the one in which the fewest records are burnt.
            let first = |stream| {
                let mut records = store.records(stream).enumerate();
                records.find(|(_, (_, digest))| digest[..20] == id).map(|(burnt, (_, digest))| (burnt, stream, *digest))
            };
            store.streams().filter_map(first).min_by_key(|&(burnt, stream, _)| (burnt, stream))
        };
        match found {
            Some((_, stream, digest)) => {
                let ahead = rest_of_pass(&digest);
                let take = |channel: &mut _| store.lock()?.take_record(channel, stream, &digest, ahead);
                self.party.channel.step("store", take).map(Some)
            }
            None if self.agreement.as_ref().is_some_and(|a| a.policy.when_empty == WhenEmpty::Refuse) => {
                Err(Error::Exhausted(format!("no preparation of the layer {name:?} is left")))
            }
            None => Ok(None),
        }
    }

    pub(super) fn plan_layer(&self, linear: &Linear) -> Result<LayerPlan> {
        match linear {
            Linear::Single { shape, weight_bits } => self.plan_single(*shape, *weight_bits).map(LayerPlan::Single),
            Linear::Experts { shape, most_bytes } => {
                self.plan_experts(shape.clone(), *most_bytes).map(LayerPlan::Experts)
            }
        }
    }

    /// Runs `body` with supplies that make everything now, as filling a store needs them.
    fn with_makers<T>(&mut self, body: impl FnOnce(&mut Party) -> Result<T>) -> Result<T> {
        let party = &mut self.party;
        let ot = std::mem::replace(&mut party.ot, Box::new(self.transfers.handle()));
        let triples = std::mem::replace(&mut party.triples, Box::new(self.triples.handle()));
        let outcome = body(party);
        (party.ot, party.triples) = (ot, triples);
        outcome
    }
}

impl LayerPlan {
    fn rotations(&self) -> Vec<crate::rlwe::Automorphism> {
        match self {
            LayerPlan::Single(_) => Vec::new(),
            LayerPlan::Experts(plan) => plan.automorphisms(),
        }
    }

    /// Seconds that its work takes on one core a party, at most.
    pub(super) fn work_seconds(&self) -> Result<f64> {
        match self {
            LayerPlan::Single(plan) => plan.seconds(&super::work_alone_cost()),
            LayerPlan::Experts(plan) => Ok(plan.seconds(super::work_alone())),
        }
    }

    fn make(
        &self,
        party: &mut Party,
        encryption: &Encryption,
        weights: Option<&LayerWeights>,
    ) -> Result<Zeroizing<Vec<u8>>> {
        match (self, weights) {
            (LayerPlan::Single(plan), None) => Ok(single::prepare(party, encryption, plan, None)?.to_bytes()),
            (LayerPlan::Experts(plan), None) => Ok(batched::prepare(party, encryption, plan, None)?.to_bytes()),
            (LayerPlan::Single(plan), Some(LayerWeights::Single(weights))) => {
                let Shape { columns, outputs, .. } = plan.shape();
                let matrix = Matrix::from_i32(columns, outputs, plan.weight_bits(), weights)?;
                Ok(single::prepare(party, encryption, plan, Some(matrix))?.to_bytes())
            }
            (LayerPlan::Experts(plan), Some(LayerWeights::Experts(weights))) => {
                let matrices = expert_weights(plan.shape(), weights)?;
                Ok(batched::prepare(party, encryption, plan, Some(&matrices))?.to_bytes())
            }
            _ => Err(Error::BadArgument("weights of another kind of layer".into())),
        }
    }
}

/// The matrices of a batched product as it takes them.
pub fn expert_weights<'a>(shape: &BatchedShape, weights: &'a [Vec<i16>]) -> Result<Vec<ExpertWeights<'a>>> {
    let BatchedShape { experts, columns_in, columns_out, .. } = shape;
    if weights.len() != columns_out.len() {
        let why = format!("{} matrices of weights for {} outputs", weights.len(), columns_out.len());
        return Err(Error::BadArgument(why));
    }
    let matrix = |(w, &out): (&'a Vec<i16>, &usize)| ExpertWeights::new(Numbers::I16(w), *experts, out, *columns_in);
    weights.iter().zip(columns_out).map(matrix).collect()
}
