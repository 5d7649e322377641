//! The batched product: n experts with different weights, all in one, on shares in slots.
//!
//! The client encrypts its share; the server adds its own, multiplies by its weights, adds the shifted sums, hides the result and
//! sends it back; what is left is a share at either party. The result is exact: the shares add up, mod p, to the
//! integer product. One round; bytes and error of each plan are in [`super::plan`].
//!
//! Only the public plan decides what is computed, sent and allocated: no zero weight is skipped.

use super::plan::BatchedPlan;
use super::weights::{ExpertWeights, Row};
use super::{ClientKeys, Encryption, Phase, ServerKeys};
use crate::error::{Error, Result};
use crate::field;
use crate::net::{Channel, Kind};
use crate::party::Party;
use crate::random::SecretRng;
use crate::rlwe::{Answer, Ciphertext, LEVELS, N, SeededCiphertext, slots};
use evaluate::{Finished, Stop, Sums, Tables, Values};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use zeroize::Zeroizing;

mod ahead;
mod evaluate;
mod memory;
pub use ahead::{Prepared, online, prepare};
pub(super) use evaluate::lanes;
pub(super) use memory::value_bytes;

/// Request ciphertexts in one message.
const REQUESTS_IN_MESSAGE: usize = 16;
/// Parts that are begun and not yet sent, for each thread: enough that none waits for the link's reply.
const IN_FLIGHT: usize = 2;
/// How often a server that waits for its own threads looks whether the client is still there.
const LOOK: Duration = Duration::from_millis(100);

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
    check_share(plan, share)?;
    party.step("batched product", |party| match (encryption, weights) {
        (Encryption::Client(keys), None) => client(party, keys, plan, share),
        (Encryption::Server(keys), Some(weights)) => server(party, keys, plan, Some(share), weights),
        _ => Err(Error::BadArgument("the server has the weights, and only the server".into())),
    })
}

fn check_share(plan: &BatchedPlan, share: &[u64]) -> Result<()> {
    let inputs = plan.shape().inputs();
    if share.len() != inputs {
        return Err(Error::BadArgument(format!("{} values where {inputs} were expected", share.len())));
    }
    if share.iter().any(|&x| x >= field::P) {
        return Err(Error::BadArgument("a share is not below p".into()));
    }
    Ok(())
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
    let together = memory::outputs_together(plan.layout());
    let all: Vec<Row> = (0..plan.shape().columns_out.len())
        .flat_map(|matrix| (0..plan.outputs(matrix)).map(move |output| Row { matrix, group, output, shift: 0 }))
        .collect();
    all.chunks(together).map(<[Row]>::to_vec).collect()
}

fn zero_outputs(plan: &BatchedPlan) -> Vec<Vec<u64>> {
    (0..plan.shape().columns_out.len()).map(|m| vec![0; plan.shape().outputs(m)]).collect()
}

fn client(party: &mut Party, keys: &ClientKeys, plan: &BatchedPlan, share: &[u64]) -> Result<Vec<Vec<u64>>> {
    keys.secret.budget().check(plan.answer(), plan.answers())?;
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
    keys.public.budget().check(plan.answer(), plan.answers())?;
    let mut out = zero_outputs(plan);
    let tables = Tables::new(plan, weights);
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
///
/// Parts are begun only as earlier ones leave, so that finished answers do not pile up before a slow link; and while one is awaited
/// the link is watched, so that nothing is computed for long for a client that is gone.
fn answer(
    party: &mut Party,
    keys: &ServerKeys,
    tables: &Tables,
    group: usize,
    segment: Range<usize>,
    values: &Values,
    out: &mut [Vec<u64>],
) -> Result<()> {
    let (plan, parts) = (tables.plan, parts(tables.plan, group));
    let spare: Mutex<Vec<Sums>> = Mutex::new(Vec::new());
    let stop = Stop::default();
    let (spare, stop, segment) = (&spare, &stop, &segment);
    let compute = move |part: &[Row], mut rng: SecretRng| -> Result<Finished> {
        let mut sums = spare.lock().ok().and_then(|mut s| s.pop()).unwrap_or_default();
        sums.multiply(tables, keys, part, segment.clone(), values, stop)?;
        let finished = sums.answers(plan, keys, part.len(), &mut rng, stop)?;
        if let Ok(mut spare) = spare.lock() {
            spare.push(sums);
        }
        Ok(finished)
    };
    let most = IN_FLIGHT * keys.pool.current_num_threads();
    keys.pool.in_place_scope_fifo(|scope| {
        // However this ends, what still runs need not finish.
        let _stop = stop.at_the_end();
        let mut begun = VecDeque::with_capacity(most);
        let mut todo = parts.iter();
        for part in &parts {
            while begun.len() < most
                && let Some(part) = todo.next()
            {
                let (done, result) = mpsc::sync_channel(1);
                let rng = party.rng.fork();
                // Nobody listens any more when the link has failed.
                scope.spawn_fifo(move |_| drop(done.send(compute(part, rng))));
                begun.push_back(result);
            }
            let finished = begun.pop_front().map(|result| awaited(&mut party.channel, &result));
            let Finished { bytes, shares } = finished.expect("every part is begun before it is awaited")??;
            party.channel.send(Kind::Answer, &bytes)?;
            party.channel.flush()?;
            for (row, share) in part.iter().zip(&shares) {
                add_output(plan, row, share, &mut out[row.matrix]);
            }
        }
        Ok(())
    })
}

/// What a thread made, or the end of the link if that comes first.
fn awaited<T>(channel: &mut Channel, result: &mpsc::Receiver<T>) -> Result<T> {
    loop {
        match result.recv_timeout(LOOK) {
            Ok(made) => return Ok(made),
            Err(RecvTimeoutError::Timeout) => channel.check_peer()?,
            // The thread panicked, which the scope will say.
            Err(RecvTimeoutError::Disconnected) => return Err(Error::SessionOver),
        }
    }
}

#[cfg(test)]
mod tests;
