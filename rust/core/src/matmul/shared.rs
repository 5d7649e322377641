//! The product of two shared matrices: dispatch (one-hot times tokens), attention scores and their product with the values.
//!
//! With x = x0 + x1 and y = y0 + y1 (client's and server's share), x y = x0 y0 + (x0 + x1) y1 + x1 y0. The client computes the first
//! term in the clear, modulo p. The second is a product as in [`super::single`] in which the server's share y1 is the matrix of weights;
//! so is the transpose of the third, y0^T x1^T. The plaintexts are of full size modulo p, so the level is 4 where weights of 16 bits need 3.
//!
//! Error: at most 1 from each of the two encrypted products, so at most 2 before any truncation. Cost: one round for a whole batch of
//! equal shapes, the bytes of the two plans for each product. Security: that of [`super::single`], with the
//! server's share in the place of the weights.

use super::Encryption;
use super::single::{self, CostModel, Item, Matrix, Plan, Section, Shape};
use crate::error::{Error, Result};
use crate::field::{self, P_BITS};
use crate::party::Party;
use crate::rlwe::{PublicKey, SecretKey};
use zeroize::Zeroizing;

/// The layouts of both encrypted products.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedPlan {
    shape: Shape,
    /// x times the server's y.
    left: Plan,
    /// The client's y, transposed, times the server's x, transposed.
    right: Plan,
}

impl SharedPlan {
    /// The cheapest plan for (rows x columns) times (columns x outputs).
    pub fn new(shape: Shape, cost: &CostModel) -> Result<Self> {
        let turned = Shape { rows: shape.outputs, columns: shape.columns, outputs: shape.rows };
        let bits = P_BITS as u32;
        Ok(Self { shape, left: Plan::new(shape, bits, cost)?, right: Plan::new(turned, bits, cost)? })
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of the client's messages for one product, frame headers left out.
    pub fn bytes_up(&self) -> usize {
        self.left.bytes_up() + self.right.bytes_up()
    }

    /// Bytes of the server's messages for one product, frame headers left out; at most so many.
    pub fn bytes_down(&self) -> Result<usize> {
        Ok(self.left.bytes_down()? + self.right.bytes_down()?)
    }

    fn check(&self, pairs: &[Pair]) -> Result<()> {
        let Shape { rows, columns, outputs } = self.shape;
        for pair in pairs {
            if pair.x.len() != rows * columns || pair.y.len() != columns * outputs {
                return Err(Error::BadArgument(format!(
                    "shares of {} and {} elements where {rows} x {columns} and {columns} x {outputs} were expected",
                    pair.x.len(),
                    pair.y.len()
                )));
            }
            if pair.x.iter().chain(pair.y).any(|&x| x >= field::P) {
                return Err(Error::BadArgument("a share is not below p".into()));
            }
        }
        Ok(())
    }
}

/// One party's shares of the two matrices of one product, row after row.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// The left matrix, rows x columns.
    pub x: &'a [u64],
    /// The right matrix, columns x outputs.
    pub y: &'a [u64],
}

/// A batch of products of shared matrices, all of one plan. Returns this party's share of each.
pub fn multiply(
    party: &mut Party,
    encryption: &Encryption,
    plan: &SharedPlan,
    pairs: &[Pair],
) -> Result<Vec<Vec<u64>>> {
    party.step("shared product", |party| match encryption {
        Encryption::Client(keys) => keys.pool.install(|| client(party, &keys.secret, plan, pairs)),
        Encryption::Server(keys) => keys.pool.install(|| server(party, &keys.public, plan, pairs)),
    })
}

/// The client's side of [`multiply`], for callers that hold the key themselves.
pub fn client(party: &mut Party, key: &SecretKey, plan: &SharedPlan, pairs: &[Pair]) -> Result<Vec<Vec<u64>>> {
    plan.check(pairs)?;
    let Shape { rows, columns, outputs } = plan.shape;
    let lefts: Vec<&[u64]> = pairs.iter().map(|pair| pair.x).collect();
    let turned = turn(pairs.iter().map(|pair| pair.y), columns, outputs);
    let rights: Vec<&[u64]> = turned.iter().map(|y| &y[..]).collect();
    let batch = [Section { plan: &plan.left, items: &lefts }, Section { plan: &plan.right, items: &rights }];
    let mut sums = add_terms(plan, single::client_batch(party, key, &batch)?);
    for (sum, pair) in sums.iter_mut().zip(pairs) {
        let local = single::clear_product(pair.x, rows, &Matrix::from_field(columns, outputs, pair.y)?);
        sum.iter_mut().zip(&local).for_each(|(sum, &x)| *sum = field::add(*sum, x));
    }
    Ok(sums)
}

/// The server's side of [`multiply`], for callers that hold the key themselves.
pub fn server(party: &mut Party, key: &PublicKey, plan: &SharedPlan, pairs: &[Pair]) -> Result<Vec<Vec<u64>>> {
    plan.check(pairs)?;
    let Shape { rows, columns, outputs } = plan.shape;
    let turned = turn(pairs.iter().map(|pair| pair.x), rows, columns);
    let lefts: Result<Vec<Item>> = pairs
        .iter()
        .map(|pair| Ok(Item { weights: Matrix::from_field(columns, outputs, pair.y)?, share: Some(pair.x) }))
        .collect();
    let rights: Result<Vec<Item>> =
        turned.iter().map(|x| Ok(Item { weights: Matrix::from_field(columns, rows, x)?, share: None })).collect();
    let (lefts, rights) = (lefts?, rights?);
    let batch = [Section { plan: &plan.left, items: &lefts }, Section { plan: &plan.right, items: &rights }];
    Ok(add_terms(plan, single::server_batch(party, key, &batch)?))
}

/// The transposes of secret matrices, wiped when dropped.
fn turn<'a>(matrices: impl Iterator<Item = &'a [u64]>, rows: usize, columns: usize) -> Vec<Zeroizing<Vec<u64>>> {
    matrices.map(|m| Zeroizing::new(single::transpose(rows, columns, m))).collect()
}

/// Adds the shares of the two encrypted terms; the right one is transposed.
fn add_terms(plan: &SharedPlan, mut shares: single::Shares) -> Vec<Vec<u64>> {
    let right = shares.pop().unwrap_or_default();
    let mut sums = shares.pop().unwrap_or_default();
    for (sum, right) in sums.iter_mut().zip(right) {
        let right = single::transpose(plan.shape.outputs, plan.shape.rows, &right);
        sum.iter_mut().zip(&right).for_each(|(sum, &x)| *sum = field::add(*sum, x));
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::to_signed;
    use crate::random::SecretRng;
    use crate::testing;

    struct Case {
        plan: SharedPlan,
        x: [Vec<Vec<u64>>; 2],
        y: [Vec<Vec<u64>>; 2],
    }

    impl Case {
        fn new(rows: usize, columns: usize, outputs: usize, count: usize) -> Self {
            let mut rng = SecretRng::from_os();
            let mut draw =
                |n: usize| -> Vec<Vec<u64>> { (0..count).map(|_| field::random_vector(&mut rng, n)).collect() };
            let (x, y) =
                ([draw(rows * columns), draw(rows * columns)], [draw(columns * outputs), draw(columns * outputs)]);
            let plan = SharedPlan::new(Shape { rows, columns, outputs }, &CostModel::default()).unwrap();
            Self { plan, x, y }
        }

        fn pairs(&self, party: usize) -> Vec<Pair<'_>> {
            self.x[party].iter().zip(&self.y[party]).map(|(x, y)| Pair { x, y }).collect()
        }

        /// The largest error over all outputs; the messages' bytes and rounds as the client saw them.
        fn run(&self) -> (i64, [u64; 3]) {
            let mut rng = SecretRng::from_os();
            let secret = SecretKey::generate(&mut rng);
            let public = secret.public_key(&[1; 32], &mut rng);
            let mut cost = [0; 3];
            let (c, s) = testing::run(
                |party| {
                    let out = client(party, &secret, &self.plan, &self.pairs(0))?;
                    for seen in party.channel.costs() {
                        cost[0] += seen.bytes_sent;
                        cost[1] += seen.bytes_received;
                        cost[2] += seen.rounds;
                    }
                    Ok(out)
                },
                |party| server(party, &public, &self.plan, &self.pairs(1)),
            );
            let Shape { rows, columns, outputs } = self.plan.shape;
            let mut worst = 0;
            for (i, (c, s)) in c.unwrap().iter().zip(&s.unwrap()).enumerate() {
                let open = |m: &[Vec<Vec<u64>>; 2]| -> Vec<u64> {
                    m[0][i].iter().zip(&m[1][i]).map(|(&a, &b)| field::add(a, b)).collect()
                };
                let (x, y) = (open(&self.x), open(&self.y));
                let expected =
                    single::clear_product_plain(&x, rows, &Matrix::from_field(columns, outputs, &y).unwrap());
                assert_eq!((c.len(), s.len()), (expected.len(), expected.len()));
                for ((&a, &b), &e) in c.iter().zip(s).zip(&expected) {
                    worst = worst.max(to_signed(field::sub(field::add(a, b), e)).abs());
                }
            }
            (worst, cost)
        }
    }

    #[test]
    fn products_of_shared_matrices_are_right_up_to_two() {
        for (rows, columns, outputs, count) in [(1, 1, 1, 1), (1, 64, 20, 3), (20, 16, 33, 2), (40, 130, 9, 1)] {
            let case = Case::new(rows, columns, outputs, count);
            let (worst, _) = case.run();
            assert!(worst <= 2, "off by {worst}");
        }
    }

    #[test]
    fn extreme_shares_are_no_worse() {
        for value in [0, 1, field::P - 1, field::P / 2, field::P / 2 + 1] {
            let mut case = Case::new(6, 70, 10, 1);
            case.x.iter_mut().chain(&mut case.y).flatten().for_each(|m| m.fill(value));
            assert!(case.run().0 <= 2);
        }
    }

    /// 512 x 2048 outputs: both encrypted terms round, so an error of 2 does occur.
    #[test]
    fn a_million_outputs_are_off_by_at_most_two() {
        let (worst, _) = Case::new(512, 2, 2048, 1).run();
        assert_eq!(worst, 2);
    }

    #[test]
    fn a_batch_is_one_round_and_its_lengths_do_not_depend_on_the_values() {
        let mut case = Case::new(8, 16, 8, 4);
        let (_, first) = case.run();
        case.x.iter_mut().chain(&mut case.y).flatten().for_each(|m| m.fill(0));
        let (_, second) = case.run();
        assert_eq!(first, second);
        assert_eq!(first[2], 1);
        assert!(first[1] as usize <= 4 * (case.plan.bytes_down().unwrap() + 64 * 16));
    }

    #[test]
    fn shares_of_the_wrong_size_are_refused() {
        let case = Case::new(2, 3, 4, 1);
        let bad = [field::P; 6];
        for pair in [Pair { x: &[0; 5], y: &[0; 12] }, Pair { x: &[0; 6], y: &[0; 11] }, Pair { x: &bad, y: &[0; 12] }]
        {
            assert!(matches!(case.plan.check(&[pair]), Err(Error::BadArgument(_))));
        }
    }
}
