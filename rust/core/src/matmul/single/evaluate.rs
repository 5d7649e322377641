//! The server's arithmetic: weight polynomials from rows of weights, their transforms, and the sums of products.

use super::kernel::{self, Modulus, TOGETHER, Version, WeightTile};
use super::plan::Plan;
use super::weights::Matrix;
use crate::rlwe::{Ciphertext, N, ntt};
use std::ops::Range;

/// An encrypted input.
pub(super) type Encrypted = Ciphertext;

/// Doubles that a tile of transformed weights may take: 4 MiB, about a core's share of the caches.
const TILE: usize = 1 << 19;
/// Most answers that are computed together.
const GROUP: usize = 24;

/// Answers that are computed together: enough to share the loads of the inputs, few enough to keep four threads busy.
pub(super) fn group_size(plan: &Plan) -> usize {
    plan.answers().div_ceil(4).next_multiple_of(TOGETHER).min(GROUP)
}

/// The products of a tile's inputs with the weights of some answers, not yet hidden.
pub(super) fn products(plan: &Plan, weights: &Matrix, inputs: &[Encrypted], answers: Range<usize>) -> Vec<Encrypted> {
    products_with(Version::best(), plan, weights, inputs, answers)
}

pub(super) fn products_with(
    version: Version,
    plan: &Plan,
    weights: &Matrix,
    inputs: &[Encrypted],
    answers: Range<usize>,
) -> Vec<Encrypted> {
    let (level, room) = (plan.level, plan.room());
    let padded = answers.len().next_multiple_of(TOGETHER);
    let at_once = (TILE / WeightTile::doubles(plan.lanes, padded, 1)).clamp(1, inputs.len());
    let mut sums = vec![0f64; level * padded * 2 * N];
    let mut scratch = Vec::new();
    let mut polynomials = vec![0f64; answers.len() * room * at_once];
    let mut residues = vec![0u32; answers.len() * room];
    let mut transforms = vec![0f64; answers.len() * room];
    let mut tile = WeightTile::new(plan.lanes, padded, at_once);
    for first in (0..inputs.len()).step_by(at_once) {
        let here = at_once.min(inputs.len() - first);
        if here < at_once {
            tile = WeightTile::new(plan.lanes, padded, here);
        }
        for (input, polynomials) in polynomials.chunks_exact_mut(answers.len() * room).take(here).enumerate() {
            for (answer, polynomial) in answers.clone().zip(polynomials.chunks_exact_mut(room)) {
                fill(plan, weights, first + input, answer, polynomial);
            }
        }
        for (prime, sums) in sums.chunks_exact_mut(padded * 2 * N).enumerate() {
            let modulus = Modulus::new(prime);
            for (input, polynomials) in polynomials.chunks_exact(answers.len() * room).take(here).enumerate() {
                kernel::canonical_all(version, modulus, polynomials, &mut residues);
                if room > 1 {
                    ntt::forward(prime, room, &mut residues);
                }
                kernel::centre_all(version, modulus, &residues, &mut transforms);
                tile.set(input, &transforms);
            }
            let row = prime * N..(prime + 1) * N;
            let parts: Vec<[&[u32]; 2]> =
                inputs[first..first + here].iter().map(|x| [&x.c[0][row.clone()], &x.c[1][row.clone()]]).collect();
            kernel::multiply_add(version, modulus, &tile, &parts, sums, &mut scratch);
        }
    }
    let collect = |answer: usize, part: usize| -> Vec<u32> {
        let mut rows = vec![0u32; level * N];
        for (prime, row) in rows.chunks_exact_mut(N).enumerate() {
            let sums = &sums[((prime * padded + answer) * 2 + part) * N..][..N];
            kernel::canonical_all(version, Modulus::new(prime), sums, row);
        }
        rows
    };
    (0..answers.len()).map(|answer| Ciphertext { level, c: [collect(answer, 0), collect(answer, 1)] }).collect()
}

/// The weight polynomial of one input and one answer: column j of the block and output i at i block + block - 1 - j.
fn fill(plan: &Plan, weights: &Matrix, input: usize, answer: usize, polynomial: &mut [f64]) {
    polynomial.fill(0.0);
    let from = input * plan.block;
    let mut row = vec![0i64; plan.outputs_of(answer)];
    for j in 0..plan.block.min(plan.shape.columns - from) {
        weights.read(from + j, answer * plan.spread, &mut row);
        for (i, &w) in row.iter().enumerate() {
            polynomial[i * plan.block + plan.block - 1 - j] = w as f64;
        }
    }
}

/// The slow, obvious twin of [`products`]: one whole plaintext polynomial after another.
#[cfg(test)]
pub(super) fn products_plain(
    plan: &Plan,
    weights: &Matrix,
    inputs: &[Encrypted],
    answers: Range<usize>,
) -> Vec<Encrypted> {
    answers
        .map(|answer| {
            let mut sum = Ciphertext::zero(plan.level);
            for (input, ciphertext) in inputs.iter().enumerate() {
                let mut polynomial = vec![0.0; plan.room()];
                fill(plan, weights, input, answer, &mut polynomial);
                let mut whole = vec![0; N];
                polynomial
                    .iter()
                    .enumerate()
                    .for_each(|(i, &w)| whole[i * plan.lanes] = crate::field::from_signed(w as i64));
                sum.add_product(ciphertext, &whole);
            }
            sum
        })
        .collect()
}
