//! The product of a shared matrix with one matrix of weights that only the server knows: attention projections, the
//! router, the head.
//!
//! Packing. With Y = X^lanes a ciphertext is the sum over tokens k of X^k x_k(Y), where x_k = sum_j x\[k\]\[j\] Y^j holds
//! `block` columns of token k. A weight polynomial in Y holds those columns for `spread` outputs, output i at
//! sum_j w\[j\]\[i\] Y^(i block + block - 1 - j): in the product, coefficient Y^(i block + block - 1) of token k is the
//! inner product, and what wraps lands where nobody looks. No rotation; plaintexts are small, so is the noise, and a low level
//! serves. [`Plan`] chooses `lanes`, `block` and `spread` by link and cores.
//!
//! What the client sees: each answer carries a fresh encryption of zero, and a mask over the full modulus on the
//! coefficients that travel; the others do not travel. What the server sees: ciphertexts.
//!
//! Error: each output is the integer product modulo p, or that plus or minus 1 (before any truncation), because each party rounds
//! its own part of a masked coefficient. Cost: one round; [`Plan::bytes_up`] and [`Plan::bytes_down`] on the wire,
//! whatever the values. Constant time: lengths, loops and memory depend on shapes only, zero weights are not skipped.

mod ahead;
mod clear;
mod evaluate;
mod kernel;
mod plan;
#[cfg(test)]
mod tests;
mod weights;

pub use ahead::{Prepared, online, prepare};
pub(super) use clear::product as clear_product;
#[cfg(test)]
pub(super) use clear::product_plain as clear_product_plain;
pub use plan::{CostModel, Plan, Shape};
pub use weights::Matrix;
pub(super) use weights::transpose;

use super::Encryption;
use crate::error::{Error, Result};
use crate::field;
use crate::net::Kind;
use crate::party::Party;
use crate::random::SecretRng;
use crate::rlwe::{Answer, AnswerPlan, N, PublicKey, SecretKey, SeededCiphertext};
use evaluate::Encrypted;
use rayon::prelude::*;
use std::ops::Range;

/// Request ciphertexts in one message.
const REQUESTS_A_MESSAGE: usize = 16;
/// Request ciphertexts after which a window closes: small tiles are evaluated together.
const WINDOW: usize = 128;

/// Multiplies a shared matrix by weights that only the server knows; `x` is this party's share, row after row, and so
/// is what comes back of the product. The server passes its weights, the client none.
pub fn multiply(
    party: &mut Party,
    encryption: &Encryption,
    plan: &Plan,
    x: &[u64],
    weights: Option<Matrix>,
) -> Result<Vec<u64>> {
    party.step("single product", |party| match (encryption, weights) {
        (Encryption::Client(keys), None) => keys.pool.install(|| client(party, &keys.secret, plan, x)),
        (Encryption::Server(keys), Some(weights)) => {
            keys.pool.install(|| server(party, &keys.public, plan, weights, x))
        }
        _ => Err(Error::BadArgument("the server passes its weights, the client none".into())),
    })
}

/// The client's side of [`multiply`], for callers that hold the key themselves.
pub fn client(party: &mut Party, key: &SecretKey, plan: &Plan, x: &[u64]) -> Result<Vec<u64>> {
    let mut out = client_batch(party, key, &[Section { plan, items: &[x] }])?;
    Ok(out.swap_remove(0).swap_remove(0))
}

/// The server's side of [`multiply`], for callers that hold the key themselves.
pub fn server(party: &mut Party, key: &PublicKey, plan: &Plan, weights: Matrix, x: &[u64]) -> Result<Vec<u64>> {
    server_adding(party, key, plan, weights, Some(x))
}

/// The product with the client's matrix, to which the server adds its share if it has one.
fn server_adding(
    party: &mut Party,
    key: &PublicKey,
    plan: &Plan,
    weights: Matrix,
    share: Option<&[u64]>,
) -> Result<Vec<u64>> {
    let mut out = server_batch(party, key, &[Section { plan, items: &[Item { weights, share }] }])?;
    Ok(out.swap_remove(0).swap_remove(0))
}

/// One product of a batch, as the server holds it.
pub(super) struct Item<'a> {
    pub(super) weights: Matrix<'a>,
    /// The server's share of the encrypted matrix; none where that matrix is the client's alone.
    pub(super) share: Option<&'a [u64]>,
}

/// Products of one plan. A batch is several sections, and one round.
pub(super) struct Section<'a, T> {
    pub(super) plan: &'a Plan,
    pub(super) items: &'a [T],
}

/// The shares of a batch: section by section, product by product.
pub(super) type Shares = Vec<Vec<Vec<u64>>>;

/// The client's side of a batch; an item is the client's share of the encrypted matrix.
pub(super) fn client_batch(party: &mut Party, key: &SecretKey, batch: &[Section<&[u64]>]) -> Result<Shares> {
    for section in batch {
        section.items.iter().try_for_each(|x| check_share(section.plan, x))?;
    }
    let mut out = empty_shares(batch);
    let windows = windows(batch);
    let mut asked = windows.iter();
    for (now, (section, window)) in windows.iter().enumerate() {
        // One window ahead: the server never waits for the next request while it works.
        for (section, window) in asked.by_ref().take(if now == 0 { 2 } else { 1 }) {
            let Section { plan, items } = batch[*section];
            party.step("request", |party| send_requests(party, key, plan, items, window.clone()))?;
        }
        let (plan, out) = (batch[*section].plan, &mut out[*section]);
        party.step("answer", |party| receive_answers(party, key, plan, window.clone(), out))?;
    }
    Ok(out)
}

/// The server's side of [`client_batch`].
pub(super) fn server_batch(party: &mut Party, key: &PublicKey, batch: &[Section<Item>]) -> Result<Shares> {
    for Section { plan, items } in batch {
        for item in *items {
            if (item.weights.rows(), item.weights.columns()) != (plan.shape.columns, plan.shape.outputs) {
                return Err(Error::BadArgument("these weights do not have the shape of the plan".into()));
            }
            if item.weights.bits() > plan.weight_bits {
                return Err(Error::BadArgument(format!("weights of {} bits in this plan", item.weights.bits())));
            }
            item.share.map_or(Ok(()), |x| check_share(plan, x))?;
        }
    }
    let mut out = empty_shares(batch);
    for (section, window) in windows(batch) {
        let Section { plan, items } = &batch[section];
        let out = &mut out[section];
        let encrypted = party.step("request", |party| receive_requests(party, key, plan, items, window.clone()))?;
        party.step("answer", |party| send_answers(party, key, plan, items, window, &encrypted, out))?;
    }
    Ok(out)
}

fn empty_shares<T>(batch: &[Section<T>]) -> Shares {
    let empty = |s: &Section<T>| s.items.iter().map(|_| vec![0; s.plan.shape.rows * s.plan.shape.outputs]).collect();
    batch.iter().map(empty).collect()
}

fn check_share(plan: &Plan, x: &[u64]) -> Result<()> {
    let Shape { rows, columns, .. } = plan.shape;
    if x.len() != rows * columns {
        return Err(Error::BadArgument(format!("{} elements where {rows} x {columns} were expected", x.len())));
    }
    if x.iter().any(|&x| x >= field::P) {
        return Err(Error::BadArgument("a share is not below p".into()));
    }
    Ok(())
}

/// All tiles of each section, number item * tiles + tile, cut into windows.
fn windows<T>(batch: &[Section<T>]) -> Vec<(usize, Range<usize>)> {
    let cut = |(at, section): (usize, &Section<T>)| -> Vec<(usize, Range<usize>)> {
        let all = section.items.len() * section.plan.tiles();
        let width = (WINDOW / section.plan.inputs()).max(1);
        (0..all).step_by(width).map(|first| (at, first..(first + width).min(all))).collect()
    };
    batch.iter().enumerate().flat_map(cut).collect()
}

/// The messages of requests of a window: (tile, input) pairs, in order.
fn requests(plan: &Plan, window: Range<usize>) -> Vec<Vec<(usize, usize)>> {
    let all: Vec<_> = window.flat_map(|tile| (0..plan.inputs()).map(move |input| (tile, input))).collect();
    all.chunks(REQUESTS_A_MESSAGE).map(<[_]>::to_vec).collect()
}

/// The messages of answers of a window: (tile, answers) pairs, in order.
fn groups(plan: &Plan, window: Range<usize>) -> Vec<(usize, Range<usize>)> {
    let size = evaluate::group_size(plan);
    window
        .flat_map(|tile| {
            let cut = move |first: usize| (tile, first..(first + size).min(plan.answers()));
            (0..plan.answers()).step_by(size).map(cut)
        })
        .collect()
}

/// The plaintext of one input of one tile: element (k, j) at X^(k + lanes j).
fn pack(plan: &Plan, x: &[u64], tile: usize, input: usize) -> zeroize::Zeroizing<Vec<u64>> {
    let mut out = zeroize::Zeroizing::new(vec![0; N]);
    let columns = plan.shape.columns;
    let from = input * plan.block;
    let width = plan.block.min(columns - from);
    for k in 0..plan.rows_of(tile) {
        let row = &x[(tile * plan.lanes + k) * columns + from..][..width];
        for (j, &x) in row.iter().enumerate() {
            out[k + plan.lanes * j] = x;
        }
    }
    out
}

/// Writes the shares of one answer's outputs to their places; the order is that of [`Plan::wanted`].
fn unpack(plan: &Plan, shares: &[u64], tile: usize, answer: usize, out: &mut [u64]) {
    let rows = plan.rows_of(tile);
    for (i, column) in shares.chunks_exact(rows).enumerate() {
        for (k, &share) in column.iter().enumerate() {
            out[(tile * plan.lanes + k) * plan.shape.outputs + answer * plan.spread + i] = share;
        }
    }
}

fn send_requests(
    party: &mut Party,
    key: &SecretKey,
    plan: &Plan,
    matrices: &[&[u64]],
    window: Range<usize>,
) -> Result<()> {
    for message in requests(plan, window) {
        let jobs: Vec<_> = message.into_iter().map(|job| (job, party.rng.fork())).collect();
        let encrypt = |((tile, input), mut rng): ((usize, usize), SecretRng)| {
            let x = matrices[tile / plan.tiles()];
            key.encrypt(plan.level, &pack(plan, x, tile % plan.tiles(), input), &mut rng).to_bytes()
        };
        let parts: Vec<Vec<u8>> = jobs.into_par_iter().map(encrypt).collect();
        party.channel.send(Kind::Request, &parts.concat())?;
        party.channel.flush()?;
    }
    Ok(())
}

/// The encrypted inputs of a window, tile by tile, the server's share added.
fn receive_requests(
    party: &mut Party,
    key: &PublicKey,
    plan: &Plan,
    items: &[Item],
    window: Range<usize>,
) -> Result<Vec<Encrypted>> {
    let length = SeededCiphertext::wire_len(plan.level);
    let seed = key.request_seed();
    let mut out = Vec::with_capacity(window.len() * plan.inputs());
    for message in requests(plan, window) {
        let body = party.channel.receive(Kind::Request, message.len() * length)?;
        let decode = |(&(tile, input), bytes): (&(usize, usize), &[u8])| -> Result<Encrypted> {
            let mut ciphertext = SeededCiphertext::from_bytes(bytes, plan.level)?.expand(&seed);
            if let Some(x) = items[tile / plan.tiles()].share {
                ciphertext.add_plain(&pack(plan, x, tile % plan.tiles(), input));
            }
            Ok(ciphertext)
        };
        let decoded: Result<Vec<_>> = message.par_iter().zip(body.par_chunks_exact(length)).map(decode).collect();
        out.extend(decoded.map_err(|_| party.channel.refuse("a request is not a ciphertext of this level"))?);
    }
    Ok(out)
}

fn send_answers(
    party: &mut Party,
    key: &PublicKey,
    plan: &Plan,
    items: &[Item],
    window: Range<usize>,
    encrypted: &[Encrypted],
    out: &mut [Vec<u64>],
) -> Result<()> {
    let answer_plan = &plan.answer_plan()?;
    let start = window.start;
    let groups = groups(plan, window);
    // As many groups at a time as there are threads: memory stays bounded and answers leave while others are made.
    for round in groups.chunks(rayon::current_num_threads()) {
        let jobs: Vec<_> = round.iter().map(|job| (job, party.rng.fork())).collect();
        let work =
            |((tile, answers), mut rng): (&(usize, Range<usize>), SecretRng)| -> Result<(Vec<u8>, Vec<Vec<u64>>)> {
                let inputs = &encrypted[(tile - start) * plan.inputs()..][..plan.inputs()];
                let products = evaluate::products(plan, &items[tile / plan.tiles()].weights, inputs, answers.clone());
                let (mut bytes, mut shares) = (Vec::new(), Vec::new());
                for (product, answer) in products.into_iter().zip(answers.clone()) {
                    let wanted = plan.wanted(tile % plan.tiles(), answer);
                    let (message, share) = finish(product, key, answer_plan, &wanted, &mut rng)?;
                    bytes.extend(message.to_bytes(answer_plan));
                    shares.push(share);
                }
                Ok((bytes, shares))
            };
        let done: Result<Vec<_>> = jobs.into_par_iter().map(work).collect();
        for ((tile, answers), (bytes, shares)) in round.iter().zip(done?) {
            party.channel.send(Kind::Answer, &bytes)?;
            for (answer, shares) in answers.clone().zip(shares) {
                unpack(plan, &shares, tile % plan.tiles(), answer, &mut out[tile / plan.tiles()]);
            }
        }
        party.channel.flush()?;
    }
    Ok(())
}

/// Hides one product and switches it: the fresh encryption of zero is made here, for this answer and no other.
fn finish(
    product: Encrypted,
    key: &PublicKey,
    plan: &AnswerPlan,
    wanted: &[u32],
    rng: &mut SecretRng,
) -> Result<(Answer, Vec<u64>)> {
    let zero = key.encrypt_zero(plan.level(), rng);
    crate::rlwe::finish_coefficients(product, zero, plan, wanted, rng)
}

fn receive_answers(
    party: &mut Party,
    key: &SecretKey,
    plan: &Plan,
    window: Range<usize>,
    out: &mut [Vec<u64>],
) -> Result<()> {
    let answer_plan = &plan.answer_plan()?;
    for (tile, answers) in groups(plan, window) {
        let wanted: Vec<_> = answers.clone().map(|answer| plan.wanted(tile % plan.tiles(), answer)).collect();
        let length = |wanted: &Vec<u32>| answer_plan.answer_len(wanted.len());
        let body = party.channel.receive(Kind::Answer, wanted.iter().map(length).sum())?;
        let mut rest = &body[..];
        let mut jobs = Vec::with_capacity(wanted.len());
        for wanted in &wanted {
            let (bytes, after) = rest.split_at(length(wanted));
            jobs.push((wanted, bytes));
            rest = after;
        }
        let open = |(wanted, bytes): (&Vec<u32>, &[u8])| -> Result<Vec<u64>> {
            let answer = Answer::from_bytes(bytes, answer_plan, wanted.len())?;
            key.open_coefficients(&answer, answer_plan, wanted)
        };
        let opened: Result<Vec<_>> = jobs.into_par_iter().map(open).collect();
        let opened = opened.map_err(|_| party.channel.refuse("an answer is not one of this plan"))?;
        for (answer, shares) in answers.zip(opened) {
            unpack(plan, &shares, tile % plan.tiles(), answer, &mut out[tile / plan.tiles()]);
        }
    }
    Ok(())
}
