//! The batched product: n experts with different weights, all in one, on shares in slots.
//!
//! The client encrypts its share; the server adds its own, multiplies by its weights, adds the shifted sums, hides the result and
//! sends it back; what is left is a share at either party. The result is exact: the shares add up, mod p, to the
//! integer product. One round; bytes and error of each plan are in [`super::plan`].
//!
//! Only the public plan decides what is computed, sent and allocated: no zero weight is skipped.

use super::kernel::{self, Block, LANES, Modulus, ROWS, Scratch, TERMS_TOGETHER, TILE};
use super::kernel_transform::{SIDE, Strides, Transforms};
use super::kernel_vector::{Isa, Lines};
use super::layout::Layout;
use super::plan::BatchedPlan;
use super::weights::{ExpertWeights, Gather, Row};
use super::{ClientKeys, Encryption, Phase, ServerKeys};
use crate::error::{Error, Result};
use crate::field;
use crate::net::{Channel, Kind};
use crate::party::Party;
use crate::random::SecretRng;
use crate::rlwe::{self, Answer, Automorphism, Ciphertext, LEVELS, N, PRIMES, SeededCiphertext, slots};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc;
use zeroize::Zeroizing;

mod ahead;
pub use ahead::{Prepared, online, prepare};

/// Request ciphertexts in one message.
const REQUESTS_IN_MESSAGE: usize = 16;
/// Rows of the kernel that are worked on together: every value that is read serves so many.
const ROWS_TOGETHER: usize = 96;
/// Bytes of transformed weights that one thread holds.
const WEIGHT_MEMORY: usize = 80 << 20;

/// Input ciphertexts that one pass of the kernel takes: enough that reading and writing the sums does not matter.
const TERMS_AT_A_TIME: usize = 64;

/// Rows that are read from the sums at a time: whole pages, in order.
const ROWS_READ: usize = 24;

/// Lanes of the kernel for a layout: t' tokens of both polynomials, rounded up to whole vectors.
pub(super) fn lanes(layout: &Layout) -> usize {
    (2 * layout.tokens).next_multiple_of(LANES)
}

/// Multiplies shared values by weights that only the server knows: shares of `[expert][token][column]` in, for each matrix of the
/// plan shares of the same form out.
///
/// The server passes its weights, the client none. One round, [`BatchedPlan::request_bytes`] and
/// [`BatchedPlan::answer_bytes`] on the link; exact.
pub fn multiply(
    party: &mut Party,
    encryption: &Encryption,
    plan: &BatchedPlan,
    share: &[u64],
    weights: Option<&[ExpertWeights]>,
) -> Result<Vec<Vec<u64>>> {
    if share.len() != plan.shape().inputs() {
        return Err(Error::BadArgument(format!(
            "{} values where {} were expected",
            share.len(),
            plan.shape().inputs()
        )));
    }
    party.step("batched product", |party| match (encryption, weights) {
        (Encryption::Client(keys), None) => client(party, keys, plan, share),
        (Encryption::Server(keys), Some(weights)) => server(party, keys, plan, Some(share), weights),
        _ => Err(Error::BadArgument("the server has the weights, and only the server".into())),
    })
}

/// The slots of one input ciphertext of one group: the values of its experts, tokens and columns; nothing where the
/// shape ends inside a ciphertext.
fn input_slots(plan: &BatchedPlan, group: usize, input: usize, values: &[u64]) -> Zeroizing<Vec<u64>> {
    let (layout, shape) = (plan.layout(), plan.shape());
    let mut out = Zeroizing::new(vec![0; N]);
    for s in 0..2 {
        for i in 0..layout.cosets() / 2 {
            let coset = layout.coset(s, i);
            let expert = group * layout.experts_in_ciphertext() + coset.expert;
            let column = input * layout.columns_in() + coset.column_in;
            if expert < shape.experts && column < shape.columns_in {
                for token in 0..shape.tokens {
                    out[s * slots::ROW + layout.slot(i, token)] =
                        values[(expert * shape.tokens + token) * shape.columns_in + column];
                }
            }
        }
    }
    out
}

/// Adds the slots of one answer to the share of an output.
fn add_output(plan: &BatchedPlan, row: &Row, from: &[u64], into: &mut [u64]) {
    let (layout, shape) = (plan.layout(), plan.shape());
    let columns = shape.columns_out[row.matrix];
    for s in 0..2 {
        for i in 0..layout.cosets() / 2 {
            let coset = layout.coset(s, i);
            let expert = row.group * layout.experts_in_ciphertext() + coset.expert;
            let column = row.output * layout.columns_out() + coset.column_out;
            if expert < shape.experts && column < columns {
                for token in 0..shape.tokens {
                    let at = &mut into[(expert * shape.tokens + token) * columns + column];
                    *at = field::add(*at, from[s * slots::ROW + layout.slot(i, token)]);
                }
            }
        }
    }
}

/// The output ciphertexts of one group in the order in which they are answered, cut into parts that are computed together and
/// travel in one message.
fn parts(plan: &BatchedPlan, group: usize) -> Vec<Vec<Row>> {
    let together = (ROWS_TOGETHER / plan.layout().shifts().len()).max(1);
    let all: Vec<Row> = (0..plan.shape().columns_out.len())
        .flat_map(|matrix| (0..plan.outputs(matrix)).map(move |output| Row { matrix, group, output, shift: 0 }))
        .collect();
    all.chunks(together).map(<[Row]>::to_vec).collect()
}

fn zero_outputs(plan: &BatchedPlan) -> Vec<Vec<u64>> {
    (0..plan.shape().columns_out.len()).map(|m| vec![0; plan.shape().outputs(m)]).collect()
}

fn client(party: &mut Party, keys: &ClientKeys, plan: &BatchedPlan, share: &[u64]) -> Result<Vec<Vec<u64>>> {
    let mut out = zero_outputs(plan);
    for group in 0..plan.groups() {
        for segment in plan.segments() {
            send_requests(party, keys, plan, group, segment, share)?;
            receive_answers(&mut party.channel, keys, plan, group, &mut out)?;
        }
    }
    Ok(out)
}

fn send_requests(
    party: &mut Party,
    keys: &ClientKeys,
    plan: &BatchedPlan,
    group: usize,
    segment: Range<usize>,
    share: &[u64],
) -> Result<()> {
    let inputs: Vec<usize> = segment.collect();
    for some in inputs.chunks(REQUESTS_IN_MESSAGE) {
        let jobs: Vec<(usize, SecretRng)> = some.iter().map(|&input| (input, party.rng.fork())).collect();
        let encrypt = |(input, mut rng): (usize, SecretRng)| {
            keys.work.time(Phase::Encrypt, || {
                let plain = Zeroizing::new(slots::encode(&input_slots(plan, group, input, share)));
                keys.secret.encrypt(LEVELS, &plain, &mut rng).to_bytes()
            })
        };
        let bytes: Vec<Vec<u8>> = keys.pool.install(|| jobs.into_par_iter().map(encrypt).collect());
        party.channel.send(Kind::Request, &bytes.concat())?;
        party.channel.flush()?;
    }
    Ok(())
}

fn receive_answers(
    channel: &mut Channel,
    keys: &ClientKeys,
    plan: &BatchedPlan,
    group: usize,
    out: &mut [Vec<u64>],
) -> Result<()> {
    let length = plan.answer().answer_len(N);
    for part in parts(plan, group) {
        let bytes = channel.receive(Kind::Answer, part.len() * length)?;
        let open = |bytes: &[u8]| -> Result<Vec<u64>> {
            keys.work.time(Phase::Decrypt, || {
                let answer = Answer::from_bytes(bytes, plan.answer(), N)?;
                Ok(slots::decode(&keys.secret.open_slots(&answer, plan.answer())?))
            })
        };
        let opened: Vec<Result<Vec<u64>>> = keys.pool.install(|| bytes.par_chunks_exact(length).map(open).collect());
        for (row, values) in part.iter().zip(opened) {
            let values = values.map_err(|_| channel.refuse("an answer that is not one"))?;
            add_output(plan, row, &Zeroizing::new(values), &mut out[row.matrix]);
        }
    }
    Ok(())
}

/// The server's side; without a share of its own it multiplies what the client sent.
fn server(
    party: &mut Party,
    keys: &ServerKeys,
    plan: &BatchedPlan,
    share: Option<&[u64]>,
    weights: &[ExpertWeights],
) -> Result<Vec<Vec<u64>>> {
    check_weights(plan, weights)?;
    let needed = plan.automorphisms();
    if needed.iter().any(|a| !keys.rotations.automorphisms().contains(a)) {
        return Err(Error::BadArgument("this session has no rotation keys for this plan".into()));
    }
    let mut out = zero_outputs(plan);
    let tables = Tables {
        plan,
        weights,
        transforms: Transforms::new(plan.layout().cosets()),
        gather: Gather::new(plan.layout(), weights),
        isa: Isa::best(),
    };
    for group in 0..plan.groups() {
        for segment in plan.segments() {
            let values = receive_requests(&mut party.channel, keys, plan, group, segment.clone(), share)?;
            answer(party, keys, &tables, group, segment, &values, &mut out)?;
        }
    }
    Ok(out)
}

pub(super) fn check_weights(plan: &BatchedPlan, weights: &[ExpertWeights]) -> Result<()> {
    let shape = plan.shape();
    let fits = weights.len() == shape.columns_out.len()
        && weights.iter().zip(&shape.columns_out).all(|(w, &c)| w.shape() == (shape.experts, c, shape.columns_in));
    if fits { Ok(()) } else { Err(Error::BadArgument("the weights do not have the shape of the plan".into())) }
}

/// What every part of the server's work reads.
struct Tables<'a> {
    plan: &'a BatchedPlan,
    weights: &'a [ExpertWeights<'a>],
    transforms: Transforms,
    gather: Gather,
    isa: Isa,
}

/// The ciphertexts of a segment as the kernel reads them: `[prime][point][input][lane]`, centred; a point's lanes are its tokens of c0 and then
/// of c1.
struct Values {
    inputs: usize,
    lanes: usize,
    residues: Lines<i32>,
}

impl Values {
    fn new(layout: &Layout, inputs: usize) -> Self {
        let lanes = lanes(layout);
        Self { inputs, lanes, residues: Lines::zeros(LEVELS * layout.cosets() * inputs * lanes) }
    }

    /// Puts ciphertexts at the inputs from `first` on.
    fn put(&mut self, layout: &Layout, first: usize, ciphertexts: &[Ciphertext]) {
        let (points, tokens, lanes) = (layout.cosets(), layout.tokens, self.lanes);
        self.residues.par_chunks_exact_mut(self.inputs * lanes).enumerate().for_each(|(at, point)| {
            let (prime, from) = (at / points, at / points * N + at % points * tokens);
            let q = PRIMES[prime] as i32;
            for (ciphertext, into) in ciphertexts.iter().zip(point[first * lanes..].chunks_exact_mut(lanes)) {
                for (c, into) in ciphertext.c.iter().zip(into.chunks_exact_mut(tokens)) {
                    for (x, &residue) in into.iter_mut().zip(&c[from..from + tokens]) {
                        let residue = residue as i32;
                        *x = residue - (q & ((q / 2 - residue) >> 31));
                    }
                }
            }
        });
    }

    /// The lanes of the inputs `some` at one point of one prime.
    fn at(&self, index: usize, some: &Range<usize>) -> &[i32] {
        let start = index * self.inputs * self.lanes;
        &self.residues[start + some.start * self.lanes..start + some.end * self.lanes]
    }
}

fn receive_requests(
    channel: &mut Channel,
    keys: &ServerKeys,
    plan: &BatchedPlan,
    group: usize,
    segment: Range<usize>,
    share: Option<&[u64]>,
) -> Result<Values> {
    let inputs: Vec<usize> = segment.collect();
    let length = SeededCiphertext::wire_len(LEVELS);
    let mut values = Values::new(plan.layout(), inputs.len());
    for (k, some) in inputs.chunks(REQUESTS_IN_MESSAGE).enumerate() {
        let bytes = channel.receive(Kind::Request, some.len() * length)?;
        let expand = |(bytes, &input): (&[u8], &usize)| -> Result<Ciphertext> {
            keys.work.time(Phase::Expand, || {
                let seeded = SeededCiphertext::from_bytes(bytes, LEVELS)?;
                let mut ciphertext = seeded.expand(&keys.public.request_seed());
                if let Some(share) = share {
                    ciphertext.add_plain(&Zeroizing::new(slots::encode(&input_slots(plan, group, input, share))));
                }
                Ok(ciphertext)
            })
        };
        let read: Result<Vec<Ciphertext>> =
            keys.pool.install(|| bytes.par_chunks_exact(length).zip(some).map(expand).collect());
        let read = read.map_err(|_| channel.refuse("a request that is not one"))?;
        keys.pool.install(|| values.put(plan.layout(), k * REQUESTS_IN_MESSAGE, &read));
    }
    Ok(values)
}

/// Computes and sends the answers of a group and segment, part by part, in order; adds the server's shares to `out`.
fn answer(
    party: &mut Party,
    keys: &ServerKeys,
    tables: &Tables,
    group: usize,
    segment: Range<usize>,
    values: &Values,
    out: &mut [Vec<u64>],
) -> Result<()> {
    let parts = parts(tables.plan, group);
    let spare: Mutex<Vec<Sums>> = Mutex::new(Vec::new());
    let (done, results) = mpsc::channel();
    let jobs: Vec<(usize, SecretRng)> = (0..parts.len()).map(|k| (k, party.rng.fork())).collect();
    let channel = &mut party.channel;
    keys.pool.in_place_scope_fifo(|scope| {
        for (k, mut rng) in jobs {
            let (done, spare, parts, segment) = (done.clone(), &spare, &parts, segment.clone());
            scope.spawn_fifo(move |_| {
                let mut sums = spare.lock().ok().and_then(|mut s| s.pop()).unwrap_or_default();
                sums.multiply(tables, keys, &parts[k], segment, values);
                let answers = sums.answers(tables.plan, keys, parts[k].len(), &mut rng);
                if let Ok(mut spare) = spare.lock() {
                    spare.push(sums);
                }
                // Nobody listens any more when the link has failed.
                let _ = done.send((k, answers));
            });
        }
        drop(done);
        let mut waiting = std::collections::BTreeMap::new();
        let mut next = 0;
        for (k, answers) in results {
            waiting.insert(k, answers);
            while let Some(answers) = waiting.remove(&next) {
                let mut bytes = Vec::new();
                for (row, (answer, share)) in parts[next].iter().zip(answers?) {
                    bytes.extend(answer.to_bytes(tables.plan.answer()));
                    add_output(tables.plan, row, &share, &mut out[row.matrix]);
                }
                channel.send(Kind::Answer, &bytes)?;
                channel.flush()?;
                next += 1;
            }
        }
        Ok(())
    })
}

/// Hides a product; the answer and the server's share of its slots.
fn finish(
    keys: &ServerKeys,
    plan: &BatchedPlan,
    product: Ciphertext,
    rng: &mut SecretRng,
) -> Result<(Answer, Zeroizing<Vec<u64>>)> {
    let zero = keys.public.encrypt_zero(LEVELS, rng);
    let (answer, share) = rlwe::finish_slots(product, zero, plan.answer(), rng)?;
    Ok((answer, Zeroizing::new(slots::decode(&Zeroizing::new(share)))))
}

/// The sums of one part: for each output ciphertext and shift one row of the kernel.
#[derive(Default)]
struct Sums {
    panels: usize,
    /// `[prime][point][panel][lane block][row][lane]`.
    sums: Lines<i32>,
    /// `[prime]` and then as in [`Block::weights`], one stretch of inputs at a time.
    weights: Lines<i32>,
    slots: Lines<f64>,
    work: Lines<f64>,
    scratch: Scratch,
}

impl Sums {
    /// Computes the sums of every shift of the output ciphertexts in `part`.
    fn multiply(&mut self, tables: &Tables, keys: &ServerKeys, part: &[Row], segment: Range<usize>, values: &Values) {
        let layout = tables.plan.layout();
        let (points, lane_blocks) = (layout.cosets(), values.lanes / LANES);
        let shifts = layout.shifts().len();
        let rows: Vec<Row> = part.iter().flat_map(|row| (0..shifts).map(move |shift| Row { shift, ..*row })).collect();
        self.panels = rows.len().div_ceil(ROWS);
        self.sums.size(LEVELS * points * self.panels * lane_blocks * TILE);
        self.sums.fill(0);
        self.slots.size(TERMS_TOGETHER * points * SIDE);
        self.work.size(points * SIDE);
        let in_memory = WEIGHT_MEMORY / (4 * LEVELS * points * self.panels * ROWS);
        let step = (in_memory / TERMS_TOGETHER * TERMS_TOGETHER).clamp(TERMS_TOGETHER, TERMS_AT_A_TIME);
        let inputs = segment.len();
        for from in (0..inputs).step_by(step) {
            let some = from..(from + step).min(inputs);
            let next_values = values.inputs * values.lanes;
            let block = Block { panels: self.panels, terms: some.len(), lane_blocks, points, next_values };
            self.weights.size(LEVELS * block.weights());
            let strides = Strides { prime: block.weights(), point: TERMS_TOGETHER * ROWS };
            keys.work.time(Phase::Weights, || {
                for (panel, rows) in rows.chunks(ROWS).enumerate() {
                    for first in (0..block.terms).step_by(TERMS_TOGETHER) {
                        let count = TERMS_TOGETHER.min(block.terms - first);
                        let slots = &mut self.slots[..count * points * SIDE];
                        for (term, slots) in slots.chunks_exact_mut(points * SIDE).enumerate() {
                            let input = segment.start + some.start + first + term;
                            tables.gather.slots(tables.weights, rows, input, slots);
                        }
                        let out = &mut self.weights[block.weight(panel, first, 0)..];
                        tables.transforms.run(tables.isa, slots, &mut self.work, out, strides);
                    }
                }
            });
            keys.work.time(Phase::Kernel, || {
                for (index, sums) in self.sums.chunks_exact_mut(block.sums()).enumerate() {
                    let (prime, point) = (index / points, index % points);
                    let weights = &self.weights[prime * block.weights()..][..block.weights()];
                    let (values, m) = (values.at(index, &some), Modulus::new(PRIMES[prime]));
                    kernel::accumulate(tables.isa, block, point, weights, values, sums, m, &mut self.scratch);
                }
            });
        }
    }

    /// Some rows as ciphertexts.
    fn ciphertexts(&self, layout: &Layout, rows: Range<usize>) -> Vec<Ciphertext> {
        let (points, tokens) = (layout.cosets(), layout.tokens);
        let lane_blocks = lanes(layout) / LANES;
        let mut out: Vec<Ciphertext> = rows.clone().map(|_| Ciphertext::zero(LEVELS)).collect();
        let mut line = vec![0u32; lane_blocks * LANES];
        for (index, sums) in self.sums.chunks_exact(self.panels * lane_blocks * TILE).enumerate() {
            let (prime, from) = (index / points, index / points * N + index % points * tokens);
            let q = PRIMES[prime] as i32;
            for (row, out) in rows.clone().zip(&mut out) {
                let panel = &sums[row / ROWS * lane_blocks * TILE..][..lane_blocks * TILE];
                let of_row = panel.chunks_exact(TILE).map(|tile| &tile[row % ROWS * LANES..][..LANES]);
                for (line, sums) in line.chunks_exact_mut(LANES).zip(of_row) {
                    for (x, &sum) in line.iter_mut().zip(sums) {
                        // Centred, off by at most 2: one addition and one subtraction make it canonical.
                        let sum = sum + (q & (sum >> 31));
                        let less = sum - q;
                        *x = (less + (q & (less >> 31))) as u32;
                    }
                }
                for (c, line) in out.c.iter_mut().zip(line.chunks_exact(tokens)) {
                    c[from..from + tokens].copy_from_slice(line);
                }
            }
        }
        out
    }

    /// The answers of the `outputs` output ciphertexts of the part.
    fn answers(
        &self,
        plan: &BatchedPlan,
        keys: &ServerKeys,
        outputs: usize,
        rng: &mut SecretRng,
    ) -> Result<Vec<(Answer, Zeroizing<Vec<u64>>)>> {
        let shifts = plan.layout().shifts().len();
        let at_once = (ROWS_READ / shifts).max(1);
        let mut out = Vec::with_capacity(outputs);
        for from in (0..outputs).step_by(at_once) {
            let rows = from * shifts..(from + at_once).min(outputs) * shifts;
            let mut rows = keys.work.time(Phase::Rotate, || self.ciphertexts(plan.layout(), rows)).into_iter();
            while rows.len() > 0 {
                let sum = keys.work.time(Phase::Rotate, || rotated(plan, keys, &mut rows))?;
                out.push(keys.work.time(Phase::Hide, || finish(keys, plan, sum, rng))?);
            }
        }
        Ok(out)
    }
}

/// The sums of one output ciphertext, the next `rows`, shifted to where they belong and added up.
fn rotated(plan: &BatchedPlan, keys: &ServerKeys, rows: &mut impl Iterator<Item = Ciphertext>) -> Result<Ciphertext> {
    let layout = plan.layout();
    let mut halves = Vec::with_capacity(2);
    for of_half in layout.shifts().chunks(2 * layout.rotated - 1) {
        let (mut left, mut right) = (vec![None; layout.rotated], vec![None; layout.rotated]);
        for shift in of_half {
            let side = if shift.shift >= 0 { &mut left } else { &mut right };
            side[shift.shift.unsigned_abs()] = rows.next();
        }
        let block = layout.slots_in_block() as isize;
        let mut sum = fold(keys, left, block)?;
        if let (Some(sum), Some(other)) = (&mut sum, fold(keys, right, -block)?) {
            sum.add(&other);
        }
        halves.extend(sum);
    }
    let mut halves = halves.into_iter();
    let mut sum = halves.next().expect("the unshifted sums are always there");
    if let Some(swapped) = halves.next() {
        sum.add(&keys.rotations.apply(&swapped, Automorphism::new(0, true))?);
    }
    Ok(sum)
}

/// The sum of all `rows[k]` shifted by k blocks, with keys for powers of two only: pairs, then pairs of pairs.
fn fold(keys: &ServerKeys, mut rows: Vec<Option<Ciphertext>>, block: isize) -> Result<Option<Ciphertext>> {
    let mut step = block;
    while rows.len() > 1 {
        let mut pairs = Vec::with_capacity(rows.len() / 2);
        let mut all = rows.into_iter();
        while let Some(mut even) = all.next() {
            if let Some(odd) = all.next().flatten() {
                let moved = keys.rotations.apply(&odd, Automorphism::new(step, false))?;
                match &mut even {
                    Some(even) => even.add(&moved),
                    None => even = Some(moved),
                }
            }
            pairs.push(even);
        }
        rows = pairs;
        step *= 2;
    }
    Ok(rows.pop().flatten())
}

#[cfg(test)]
mod tests;
