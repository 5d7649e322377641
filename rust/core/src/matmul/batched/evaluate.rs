//! The server's arithmetic of a batched product: ciphertexts in the order of the kernel, the sums of every shift, their
//! rotation to where they belong, and the answers.

use super::memory::terms_at_a_time;
use crate::error::{Error, Result};
use crate::matmul::kernel::{self, Block, LANES, Modulus, ROWS, Scratch, TERMS_TOGETHER, TILE};
use crate::matmul::kernel_transform::{SIDE, Strides, Transforms};
use crate::matmul::kernel_vector::{Isa, Lines};
use crate::matmul::layout::Layout;
use crate::matmul::plan::BatchedPlan;
use crate::matmul::weights::{ExpertWeights, Gather, Row};
use crate::matmul::{Phase, ServerKeys};
use crate::random::SecretRng;
use crate::rlwe::{self, Answer, Automorphism, Ciphertext, LEVELS, N, PRIMES, slots};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use zeroize::Zeroizing;

/// Bytes of transformed weights that one thread holds.
pub(super) const WEIGHT_MEMORY: usize = 80 << 20;
/// Input ciphertexts that one pass of the kernel takes: enough that reading and writing the sums does not matter.
pub(super) const TERMS_AT_A_TIME: usize = 64;
/// Rows that are read from the sums at a time: whole pages, in order.
pub(super) const ROWS_READ: usize = 24;
/// Points of a row that are written together.
const POINTS_TOGETHER: usize = 8;

/// Lanes of the kernel for a layout: t' tokens of both polynomials, rounded up to whole vectors.
pub(in crate::matmul) fn lanes(layout: &Layout) -> usize {
    (2 * layout.tokens).next_multiple_of(LANES)
}

/// Says to the threads of a product that nobody waits for it any more.
#[derive(Default)]
pub(super) struct Stop(AtomicBool);

impl Stop {
    /// Stops them when what it returns is dropped.
    pub fn at_the_end(&self) -> impl Drop + '_ {
        struct AtTheEnd<'a>(&'a AtomicBool);
        impl Drop for AtTheEnd<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        AtTheEnd(&self.0)
    }

    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::SessionOver) } else { Ok(()) }
    }
}

/// The answers of one part: the message that carries them, and the server's share of each.
pub(super) struct Finished {
    pub bytes: Vec<u8>,
    pub shares: Vec<Zeroizing<Vec<u64>>>,
}

/// What every part of the server's work reads.
pub(super) struct Tables<'a> {
    pub plan: &'a BatchedPlan,
    weights: &'a [ExpertWeights<'a>],
    transforms: Transforms,
    gather: Gather,
    isa: Isa,
}

impl<'a> Tables<'a> {
    pub fn new(plan: &'a BatchedPlan, weights: &'a [ExpertWeights<'a>]) -> Self {
        let layout = plan.layout();
        let (transforms, gather) = (Transforms::new(layout.cosets()), Gather::new(layout, weights));
        Self { plan, weights, transforms, gather, isa: Isa::best() }
    }
}

/// The ciphertexts of a segment as the kernel reads them: `[prime][point][input][lane]`, centred; a point's lanes are its tokens of c0 and then
/// of c1.
pub(super) struct Values {
    inputs: usize,
    lanes: usize,
    residues: Lines<i32>,
}

impl Values {
    pub fn new(layout: &Layout, inputs: usize) -> Self {
        let lanes = lanes(layout);
        Self { inputs, lanes, residues: Lines::zeros(LEVELS * layout.cosets() * inputs * lanes) }
    }

    /// Puts ciphertexts at the inputs from `first` on.
    pub fn put(&mut self, layout: &Layout, first: usize, ciphertexts: &[Ciphertext]) {
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

/// Hides a product; the answer and the server's share of its slots.
fn finish(
    keys: &ServerKeys,
    plan: &BatchedPlan,
    product: &mut Ciphertext,
    rng: &mut SecretRng,
) -> Result<(Answer, Zeroizing<Vec<u64>>)> {
    let zero = keys.public.encrypt_zero(LEVELS, rng);
    let (answer, share) = rlwe::finish_slots(product, zero, plan.answer(), rng)?;
    Ok((answer, Zeroizing::new(slots::decode(&Zeroizing::new(share)))))
}

/// The sums of one part: for each output ciphertext and shift one row of the kernel.
#[derive(Default)]
pub(super) struct Sums {
    panels: usize,
    /// `[prime][point][panel][lane block][row][lane]`.
    sums: Lines<i32>,
    /// `[prime]` and then as in [`Block::weights`], one stretch of inputs at a time.
    weights: Lines<i32>,
    slots: Lines<f64>,
    work: Lines<f64>,
    scratch: Scratch,
    /// Rows read from the sums: fresh memory for them would cost as much as their rotations' additions.
    read: Vec<Ciphertext>,
}

impl Sums {
    /// Computes the sums of every shift of the output ciphertexts in `part`.
    pub fn multiply(
        &mut self,
        tables: &Tables,
        keys: &ServerKeys,
        part: &[Row],
        segment: Range<usize>,
        values: &Values,
        stop: &Stop,
    ) -> Result<()> {
        let layout = tables.plan.layout();
        let (points, lane_blocks) = (layout.cosets(), values.lanes / LANES);
        let shifts = layout.shifts().len();
        let rows: Vec<Row> = part.iter().flat_map(|row| (0..shifts).map(move |shift| Row { shift, ..*row })).collect();
        self.panels = rows.len().div_ceil(ROWS);
        self.sums.size(LEVELS * points * self.panels * lane_blocks * TILE);
        self.sums.fill(0);
        self.slots.size(TERMS_TOGETHER * points * SIDE);
        self.work.size(points * SIDE);
        let step = terms_at_a_time(layout, self.panels);
        let inputs = segment.len();
        for from in (0..inputs).step_by(step) {
            stop.check()?;
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
        Ok(())
    }

    /// Some rows as ciphertexts, which take the place of those in `out`.
    ///
    /// [`POINTS_TOGETHER`] points of a row are written one after another: the rows lie a multiple of the caches' size apart, so
    /// that lines written in part would be fetched again.
    pub fn ciphertexts(&self, layout: &Layout, rows: Range<usize>, out: &mut Vec<Ciphertext>) {
        let (points, tokens) = (layout.cosets(), layout.tokens);
        let lane_blocks = lanes(layout) / LANES;
        let of_point = self.panels * lane_blocks * TILE;
        out.truncate(rows.len());
        out.resize_with(rows.len(), || Ciphertext::zero(LEVELS));
        let mut line = vec![0u32; lane_blocks * LANES];
        let together = POINTS_TOGETHER.min(points);
        for (index, sums) in self.sums.chunks_exact(together * of_point).enumerate() {
            let (prime, from) = (index * together / points, index * together % points * tokens);
            let (q, from) = (PRIMES[prime] as i32, prime * N + from);
            for (row, out) in rows.clone().zip(out.iter_mut()) {
                let [c0, c1] = &mut out.c;
                let [c0, c1] = [c0, c1].map(|c| c[from..from + together * tokens].chunks_exact_mut(tokens));
                for ((sums, c0), c1) in sums.chunks_exact(of_point).zip(c0).zip(c1) {
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
                    c0.copy_from_slice(&line[..tokens]);
                    c1.copy_from_slice(&line[tokens..2 * tokens]);
                }
            }
        }
    }

    /// The answers of the `outputs` output ciphertexts of the part.
    pub fn answers(
        &mut self,
        plan: &BatchedPlan,
        keys: &ServerKeys,
        outputs: usize,
        rng: &mut SecretRng,
        stop: &Stop,
    ) -> Result<Finished> {
        let shifts = plan.layout().shifts().len();
        let at_once = (ROWS_READ / shifts).max(1);
        let bytes = Vec::with_capacity(outputs * plan.answer().answer_len(N));
        let mut out = Finished { bytes, shares: Vec::with_capacity(outputs) };
        let mut read = std::mem::take(&mut self.read);
        for from in (0..outputs).step_by(at_once) {
            let rows = from * shifts..(from + at_once).min(outputs) * shifts;
            keys.work.time(Phase::Rotate, || self.ciphertexts(plan.layout(), rows, &mut read));
            for rows in read.chunks_exact_mut(shifts) {
                stop.check()?;
                let sum = keys.work.time(Phase::Rotate, || rotated(plan, keys, rows))?;
                let (answer, share) = keys.work.time(Phase::Hide, || finish(keys, plan, sum, rng))?;
                out.bytes.extend(answer.to_bytes(plan.answer()));
                out.shares.push(share);
            }
        }
        self.read = read;
        Ok(out)
    }
}

/// The sums of one output ciphertext, `rows`, shifted to where they belong and added up in the first of them.
fn rotated<'a>(plan: &BatchedPlan, keys: &ServerKeys, rows: &'a mut [Ciphertext]) -> Result<&'a mut Ciphertext> {
    let layout = plan.layout();
    let (blocks, block) = (layout.rotated, layout.slots_in_block() as isize);
    // The unshifted sums, those that go left by 1, 2, ..., and those that go right by ..., 2, 1.
    for half in rows.chunks_exact_mut(2 * blocks - 1) {
        fold(keys, half, blocks, |k| k, block)?;
        fold(keys, half, blocks, |k| if k == 0 { 0 } else { 2 * blocks - 1 - k }, -block)?;
    }
    let (left, swapped) = rows.split_at_mut(2 * blocks - 1);
    if let Some(swapped) = swapped.first() {
        keys.rotations.add_turned(&mut left[0], swapped, Automorphism::new(0, true))?;
    }
    Ok(&mut left[0])
}

/// Adds to `rows[at(0)]` every `rows[at(k)]` shifted by k blocks, k below `count`, with keys for powers of two only: pairs, then pairs of
/// pairs.
fn fold(
    keys: &ServerKeys,
    rows: &mut [Ciphertext],
    count: usize,
    at: impl Fn(usize) -> usize,
    block: isize,
) -> Result<()> {
    let mut step = 1;
    while step < count {
        let moved = Automorphism::new(step as isize * block, false);
        for k in (0..count).step_by(2 * step) {
            let pair = rows.get_disjoint_mut([at(k), at(k + step)]);
            let [even, odd] = pair.expect("different rows of the same output");
            keys.rotations.add_turned(even, odd, moved)?;
        }
        step *= 2;
    }
    Ok(())
}
