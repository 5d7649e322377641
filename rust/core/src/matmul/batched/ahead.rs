//! The same product in two parts: everything costly before the input exists, one message and a product in the clear after.
//!
//! The client encrypts a random r ahead, and both parties keep shares of W r. When the input is there the client sends
//! x - r, of its own share, which says nothing because r is uniform and used once; the server adds its share and
//! multiplies in the clear. Exact; 41 bits an input value and half a round.

use super::{check_share, check_weights, client, server};
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::matmul::kernel::{self, Block, LANES, ROWS, TILE};
use crate::matmul::kernel_vector::{Isa, Lines};
use crate::matmul::plan::BatchedPlan;
use crate::matmul::ticket::Ticket;
use crate::matmul::weights::ExpertWeights;
use crate::matmul::{Encryption, ServerKeys};
use crate::net::Kind;
use crate::party::{Party, Role};
use rayon::prelude::*;
use zeroize::Zeroizing;

/// One party's part of one product made ahead. Good for one input; cannot be copied, and is consumed.
pub struct Prepared {
    plan: BatchedPlan,
    ticket: Ticket,
    /// The client's r; empty at the server.
    random: Zeroizing<Vec<u64>>,
    shares: Vec<Zeroizing<Vec<u64>>>,
}

impl Prepared {
    /// What a store keeps of this party's part: the ticket, r if there is one, the shares, packed.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let parts = (!self.random.is_empty()).then_some(&self.random).into_iter().chain(&self.shares);
        let length: usize = parts.clone().map(|values| field::packed_len(values.len(), field::P_BITS)).sum();
        let mut out = Zeroizing::new(Vec::with_capacity(Ticket::STORED_LEN + length));
        out.extend_from_slice(&self.ticket.to_stored());
        for values in parts {
            out.extend_from_slice(&Zeroizing::new(field::pack(values)));
        }
        out
    }

    /// The inverse, for a plan of the same shape, in this or a later session; refuses what this party cannot have written.
    pub fn from_bytes(plan: &BatchedPlan, encryption: &Encryption, bytes: &[u8]) -> Result<Self> {
        let (shape, role) = (plan.shape(), encryption.role());
        let wrong = || Error::Store("a prepared product has another length".into());
        let (ticket, mut rest) = bytes.split_first_chunk().ok_or_else(wrong)?;
        let ticket = encryption.tickets().restored(ticket);
        let mut part = |n: usize| -> Result<Zeroizing<Vec<u64>>> {
            let length = field::packed_len(n, field::P_BITS);
            let (head, tail) = rest.split_at_checked(length).ok_or_else(wrong)?;
            rest = tail;
            field::unpack(head, n).map(Zeroizing::new)
        };
        let random = if role == Role::Client { part(shape.inputs())? } else { Zeroizing::default() };
        let shares = (0..shape.columns_out.len()).map(|m| part(shape.outputs(m))).collect::<Result<_>>()?;
        if !rest.is_empty() {
            return Err(wrong());
        }
        Ok(Self { plan: plan.clone(), ticket, random, shares })
    }
}

/// Makes one product ahead; the cost of [`super::multiply`].
pub fn prepare(
    party: &mut Party,
    encryption: &Encryption,
    plan: &BatchedPlan,
    weights: Option<&[ExpertWeights]>,
) -> Result<Prepared> {
    party.step("prepare batched product", |party| {
        let (random, shares) = match (encryption, weights) {
            (Encryption::Client(keys), None) => {
                let random = Zeroizing::new(field::random_vector(&mut party.rng, plan.shape().inputs()));
                let shares = client(party, keys, plan, &random)?;
                (random, shares)
            }
            (Encryption::Server(keys), Some(weights)) => {
                (Zeroizing::default(), server(party, keys, plan, None, weights)?)
            }
            _ => return Err(Error::BadArgument("the server has the weights, and only the server".into())),
        };
        let shares = shares.into_iter().map(Zeroizing::new).collect();
        Ok(Prepared { plan: plan.clone(), ticket: encryption.tickets().next(), random, shares })
    })
}

/// Uses a prepared product for an input: shares in, shares out, as [`super::multiply`]. Both parties must use the same one:
/// one of another session is refused before a byte moves, another one of this session when the server sees its number.
pub fn online(
    party: &mut Party,
    encryption: &Encryption,
    prepared: Prepared,
    share: &[u64],
    weights: Option<&[ExpertWeights]>,
) -> Result<Vec<Vec<u64>>> {
    encryption.tickets().check(&prepared.ticket)?;
    check_share(&prepared.plan, share)?;
    let inputs = share.len();
    let ours = if encryption.role() == Role::Client { inputs } else { 0 };
    if prepared.random.len() != ours {
        return Err(Error::BadArgument("this product was prepared by the other party".into()));
    }
    party.step("batched product online", |party| match (encryption, weights) {
        (Encryption::Client(_), None) => {
            let hidden: Vec<u64> = share.iter().zip(prepared.random.iter()).map(|(&x, &r)| field::sub(x, r)).collect();
            party.channel.send(Kind::Opening, &[&prepared.ticket.to_bytes()[..], &field::pack(&hidden)].concat())?;
            party.channel.flush()?;
            Ok(prepared.shares.iter().map(|share| share.to_vec()).collect())
        }
        (Encryption::Server(keys), Some(weights)) => {
            check_weights(&prepared.plan, weights)?;
            let bytes = party.channel.receive(Kind::Opening, prepared.plan.online_bytes())?;
            let bytes = prepared.ticket.strip(&bytes)?;
            let hidden = field::unpack(bytes, inputs)
                .map_err(|_| party.channel.refuse("a hidden input that is no vector of field elements"))?;
            let x: Zeroizing<Vec<u64>> =
                Zeroizing::new(hidden.iter().zip(share).map(|(&a, &b)| field::add(a, b)).collect());
            let mut out = product(keys, &prepared.plan, weights, &x);
            for (out, share) in out.iter_mut().zip(&prepared.shares) {
                out.iter_mut().zip(share.iter()).for_each(|(y, &s)| *y = field::add(*y, s));
            }
            Ok(out)
        }
        _ => Err(Error::BadArgument("the server has the weights, and only the server".into())),
    })
}

/// Panels of weights that are worked on together.
const PANELS: usize = 4;

/// Values (field elements) times weights modulo p, in the clear: exact integers in doubles. A value is cut into signed limbs such that all
/// products of a run of columns add up below 2^53.
pub(super) fn product(
    keys: &ServerKeys,
    plan: &BatchedPlan,
    weights: &[ExpertWeights],
    values: &[u64],
) -> Vec<Vec<u64>> {
    let (shape, isa) = (plan.shape(), Isa::best());
    let multiply = |matrix: &ExpertWeights| -> Vec<u64> {
        let (_, columns_out, columns_in) = matrix.shape();
        let limbs = Limbs::new(matrix.bits());
        let mut out = vec![0u64; shape.experts * shape.tokens * columns_out];
        let each = out.par_chunks_exact_mut(shape.tokens * columns_out).enumerate();
        each.for_each(|(expert, out)| {
            let values = &values[expert * shape.tokens * columns_in..][..shape.tokens * columns_in];
            for from in (0..columns_in).step_by(limbs.run) {
                let terms = limbs.run.min(columns_in - from);
                let (lanes, cut) = limbs.cut(values, shape.tokens, columns_in, from, terms);
                add_run(isa, matrix, expert, from, &limbs, lanes, &cut, shape.tokens, out);
            }
        });
        out
    };
    keys.pool.install(|| weights.iter().map(multiply).collect())
}

/// Adds the product of one run of columns of one expert.
#[allow(clippy::too_many_arguments)] // Two matrices, where they are cut, and the result.
fn add_run(
    isa: Isa,
    matrix: &ExpertWeights,
    expert: usize,
    from: usize,
    limbs: &Limbs,
    lanes: usize,
    cut: &[f64],
    tokens: usize,
    out: &mut [u64],
) {
    let (_, columns_out, _) = matrix.shape();
    let terms = cut.len() / lanes;
    let mut block = Block { panels: PANELS, terms, lane_blocks: lanes / LANES, points: 1, next_values: 0 };
    let mut weights = Lines::zeros(PANELS * terms * ROWS);
    let mut sums = Lines::zeros(block.sums());
    let mut row = vec![0f64; terms];
    for first in (0..columns_out).step_by(PANELS * ROWS) {
        let here = (columns_out - first).min(PANELS * ROWS);
        block.panels = here.div_ceil(ROWS);
        let weights = &mut weights[..block.panels * terms * ROWS];
        weights.fill(0.0);
        for k in 0..here {
            matrix.row(expert, first + k, from, &mut row);
            let column = weights[k / ROWS * terms * ROWS + k % ROWS..].iter_mut().step_by(ROWS);
            column.zip(&row).for_each(|(w, &x)| *w = x);
        }
        let sums = &mut sums[..block.sums()];
        sums.fill(0.0);
        kernel::accumulate_exact(isa, block, weights, cut, sums);
        for k in 0..here {
            for token in 0..tokens {
                let sum = (0..limbs.count).rev().fold(0, |high, limb| {
                    let lane = limb * tokens + token;
                    let tile = (k / ROWS * block.lane_blocks + lane / LANES) * TILE;
                    let sum = sums[tile + k % ROWS * LANES + lane % LANES];
                    field::add(field::mul(high, 1 << limbs.bits), reduce(sum as i64))
                });
                let y = &mut out[token * columns_out + first + k];
                *y = field::add(*y, sum);
            }
        }
    }
}

/// The field element of an integer below 2^53 in size, without a division.
fn reduce(sum: i64) -> u64 {
    // 4097 p is above 2^53, and the sum below 2^55.
    field::mul((sum + 4097 * P as i64) as u64, 1)
}

/// How field elements are cut for weights of some width.
struct Limbs {
    count: usize,
    bits: u32,
    /// Columns whose products add up below 2^53.
    run: usize,
}

impl Limbs {
    fn new(weight_bits: u32) -> Self {
        // A limb is at most 2^(bits - 1) in size, a weight 2^(weight_bits - 1).
        let (count, bits) = if weight_bits <= 16 { (2, 21) } else { (4, 11) };
        Self { count, bits, run: 1 << (53 - (bits - 1) - (weight_bits - 1) - 1).min(11) }
    }

    /// The limbs of `terms` columns from `from` on: the number of lanes, and `[lane block][column][lane]`.
    fn cut(&self, values: &[u64], tokens: usize, columns: usize, from: usize, terms: usize) -> (usize, Lines<f64>) {
        let lanes = (self.count * tokens).next_multiple_of(LANES);
        let mut out = Lines::zeros(lanes * terms);
        for token in 0..tokens {
            for (k, &x) in values[token * columns + from..][..terms].iter().enumerate() {
                let centred = x as i64 - (P as i64 & -i64::from(x > P / 2));
                let mut rest = centred;
                for limb in 0..self.count {
                    // Signed digits, except that the last takes what is left.
                    let half = 1i64 << (self.bits - 1);
                    let low = ((rest + half) & ((1 << self.bits) - 1)) - half;
                    let digit = if limb + 1 == self.count { rest } else { low };
                    rest = (rest - low) >> self.bits;
                    let lane = limb * tokens + token;
                    out[(lane / LANES * terms + k) * LANES + lane % LANES] = digit as f64;
                }
            }
        }
        (lanes, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::plan::{BatchedShape, Conditions};
    use crate::matmul::weights::Numbers;
    use crate::random::SecretRng;
    use crate::testing;

    #[test]
    fn products_in_the_clear_are_those_of_field_elements() {
        let mut rng = SecretRng::from_insecure_fixed_seed(4);
        for (experts, tokens, columns_in, columns_out) in [(1, 1, 1, 1), (3, 5, 40, 33), (2, 32, 3000, 9)] {
            let n = experts * columns_in * columns_out;
            let small: Vec<i16> = (0..n).map(|k| if k % 5 == 0 { i16::MIN } else { rng.next_u64() as i16 }).collect();
            let large: Vec<i32> =
                (0..n).map(|k| if k % 5 == 0 { -i32::MAX } else { rng.next_u64() as i32 | 1 }).collect();
            let mut x = field::random_vector(&mut rng, experts * tokens * columns_in);
            x.iter_mut().step_by(3).for_each(|x| *x = P / 2);
            x.iter_mut().step_by(4).for_each(|x| *x = P / 2 + 1);
            for (numbers, wide) in [
                (Numbers::I16(&small), small.iter().map(|&w| i64::from(w)).collect::<Vec<_>>()),
                (Numbers::I32(&large), large.iter().map(|&w| i64::from(w)).collect()),
            ] {
                let matrix = ExpertWeights::new(numbers, experts, columns_out, columns_in).unwrap();
                let limbs = Limbs::new(matrix.bits());
                for isa in Isa::available() {
                    let mut out = vec![0; experts * tokens * columns_out];
                    for (expert, out) in out.chunks_exact_mut(tokens * columns_out).enumerate() {
                        for from in (0..columns_in).step_by(limbs.run) {
                            let terms = limbs.run.min(columns_in - from);
                            let x = &x[expert * tokens * columns_in..][..tokens * columns_in];
                            let (lanes, cut) = limbs.cut(x, tokens, columns_in, from, terms);
                            add_run(isa, &matrix, expert, from, &limbs, lanes, &cut, tokens, out);
                        }
                    }
                    for (k, &got) in out.iter().enumerate() {
                        let (row, o) = (k / columns_out, k % columns_out);
                        let w = &wide[(row / tokens * columns_out + o) * columns_in..][..columns_in];
                        let want = w
                            .iter()
                            .zip(&x[row * columns_in..])
                            .fold(0, |sum, (&w, &x)| field::add(sum, field::mul(x, field::from_signed(w))));
                        assert_eq!(got, want, "{isa:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_prepared_product_is_the_product() {
        let shape = BatchedShape { experts: 64, tokens: 31, columns_in: 6, columns_out: vec![5, 2] };
        let plan = BatchedPlan::new(shape.clone(), Conditions::LAN).unwrap();
        let mut rng = SecretRng::from_insecure_fixed_seed(5);
        let x: Vec<i64> = (0..shape.inputs()).map(|_| (rng.next_u64() % 1000) as i64 - 500).collect();
        let weights: Vec<Vec<i16>> = shape
            .columns_out
            .iter()
            .map(|&o| (0..shape.experts * o * shape.columns_in).map(|_| rng.next_u64() as i16).collect())
            .collect();
        let matrices: Vec<ExpertWeights> = weights
            .iter()
            .zip(&shape.columns_out)
            .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in).unwrap())
            .collect();
        let (mine, theirs) = testing::share(&x);
        let both = |party: &mut Party, share: &[u64], weights: Option<&[ExpertWeights]>| {
            let encryption = Encryption::exchange(party, &[1; 32], &plan.automorphisms(), 1)?;
            let prepared = prepare(party, &encryption, &plan, weights)?;
            online(party, &encryption, prepared, share, weights)
        };
        let (client, server) =
            testing::run(|party| both(party, &mine, None), |party| both(party, &theirs, Some(&matrices)));
        let (client, server) = (client.unwrap(), server.unwrap());
        for matrix in 0..2 {
            let want = super::super::tests::plain(&shape, matrix, &x, &weights[matrix]);
            assert_eq!(testing::open(&client[matrix], &server[matrix]), want);
        }
    }

    /// Two products made ahead, of one shape with different weights.
    fn two(
        party: &mut Party,
        transcript: [u8; 32],
        weights: Option<&[Vec<i16>; 2]>,
    ) -> Result<(Encryption, [Prepared; 2])> {
        let shape = BatchedShape { experts: 256, tokens: 32, columns_in: 1, columns_out: vec![1] };
        let plan = BatchedPlan::new(shape, Conditions::LAN)?;
        let encryption = Encryption::exchange(party, &transcript, &plan.automorphisms(), 1)?;
        let mut one = |k: usize| {
            let matrix = weights.map(|w| [ExpertWeights::new(Numbers::I16(&w[k]), 256, 1, 1).unwrap()]);
            prepare(party, &encryption, &plan, matrix.as_ref().map(|m| &m[..]))
        };
        let both = [one(0)?, one(1)?];
        Ok((encryption, both))
    }

    #[test]
    fn another_prepared_product_is_refused_by_its_number() {
        let weights = [vec![3i16; 256], vec![-5i16; 256]];
        let share = vec![1; 256 * 32];
        for (theirs, right) in [(0, true), (1, false)] {
            let (client, server) = testing::run(
                |party| {
                    let (encryption, [first, _]) = two(party, [1; 32], None)?;
                    online(party, &encryption, first, &share, None)
                },
                |party| {
                    let (encryption, prepared) = two(party, [1; 32], Some(&weights))?;
                    let prepared = prepared.into_iter().nth(theirs).unwrap();
                    let matrix = [ExpertWeights::new(Numbers::I16(&weights[theirs]), 256, 1, 1)?];
                    online(party, &encryption, prepared, &share, Some(&matrix))
                },
            );
            match right {
                true => assert!(testing::open(&client.unwrap()[0], &server.unwrap()[0]).iter().all(|&x| x == 6)),
                false => {
                    let error = server.unwrap_err();
                    assert_eq!(error.code(), "engine.disagreement");
                    assert!(error.to_string().contains("number 0, the server number 1"), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_product_of_another_session_is_refused_before_anything_travels() {
        let weights = [vec![3i16; 256], vec![-5i16; 256]];
        let share = vec![1; 256 * 32];
        let stale = |party: &mut Party, weights: Option<&[Vec<i16>; 2]>| {
            let (_, [old, _]) = two(party, [1; 32], weights)?;
            let (encryption, [first, _]) = two(party, [2; 32], weights)?;
            let matrix = weights.map(|w| [ExpertWeights::new(Numbers::I16(&w[0]), 256, 1, 1).unwrap()]);
            let matrix = matrix.as_ref().map(|m| &m[..]);
            let error = online(party, &encryption, old, &share, matrix).unwrap_err();
            assert_eq!((error.code(), party.channel.is_over()), ("engine.bad_argument", false));
            online(party, &encryption, first, &share, matrix)
        };
        let (client, server) = testing::run(|party| stale(party, None), |party| stale(party, Some(&weights)));
        assert!(testing::open(&client.unwrap()[0], &server.unwrap()[0]).iter().all(|&x| x == 6));
    }
}
