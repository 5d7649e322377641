//! Whole products over memory channels against plain integers.

use super::*;
use crate::matmul::layout::RowUse;
use crate::matmul::plan::{BatchedShape, Conditions};
use crate::matmul::weights::Numbers;
use crate::testing;

pub fn plain(shape: &BatchedShape, matrix: usize, x: &[i64], w: &[i16]) -> Vec<i64> {
    let (t, d, o) = (shape.tokens, shape.columns_in, shape.columns_out[matrix]);
    let mut out = Vec::new();
    for e in 0..shape.experts {
        for token in 0..t {
            for column in 0..o {
                let x = &x[(e * t + token) * d..][..d];
                let w = &w[(e * o + column) * d..][..d];
                out.push(x.iter().zip(w).map(|(&x, &w)| x * i64::from(w)).sum());
            }
        }
    }
    out
}

fn check(plan: &BatchedPlan) {
    let mut rng = SecretRng::from_insecure_fixed_seed(9);
    let shape = plan.shape().clone();
    let x: Vec<i64> = (0..shape.inputs()).map(|_| (rng.next_u64() % (1 << 20)) as i64 - (1 << 19)).collect();
    let weights: Vec<Vec<i16>> = shape
        .columns_out
        .iter()
        .map(|&o| (0..shape.experts * o * shape.columns_in).map(|_| rng.next_u64() as i16).collect())
        .collect();
    let (mine, theirs) = testing::share(&x);
    let keys = plan.automorphisms();
    let (client, server) = testing::run(
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &keys, 1)?;
            multiply(party, &encryption, plan, &mine, None)
        },
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &keys, 2)?;
            let matrices: Vec<ExpertWeights> = weights
                .iter()
                .zip(&shape.columns_out)
                .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in).unwrap())
                .collect();
            multiply(party, &encryption, plan, &theirs, Some(&matrices))
        },
    );
    let (client, server) = (client.unwrap(), server.unwrap());
    for matrix in 0..weights.len() {
        let got = testing::open(&client[matrix], &server[matrix]);
        assert_eq!(got, plain(&shape, matrix, &x, &weights[matrix]), "{:?}", plan.layout());
    }
}

#[test]
fn products_of_many_shapes_are_exact() {
    for (experts, tokens, columns_in, columns_out) in [
        (64, 32, 9, vec![5, 3]),
        (3, 1000, 5, vec![3]),
        (200, 30, 3, vec![2]),
        (64, 20, 6, vec![7]),
        (1, 4096, 3, vec![2]),
    ] {
        let shape = BatchedShape { experts, tokens, columns_in, columns_out };
        check(&BatchedPlan::new(shape, Conditions::LAN).unwrap());
    }
}

#[test]
fn every_layout_gives_the_same_product() {
    for (rows, rotated, copied, partial) in [
        (RowUse::Rotated, 2, 1, 1),
        (RowUse::Rotated, 1, 2, 1),
        (RowUse::Rotated, 1, 1, 2),
        (RowUse::Copied, 2, 1, 1),
        (RowUse::Partial, 2, 1, 1),
        (RowUse::Experts, 1, 2, 1),
    ] {
        let shape = BatchedShape { experts: 64, tokens: 30, columns_in: 10, columns_out: vec![6] };
        let layout = Layout { degree: N, tokens: 32, experts: 64, rows, rotated, copied, partial };
        check(&BatchedPlan::with_layout(shape, layout).unwrap());
    }
    for (rotated, copied, partial) in [(4, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let shape = BatchedShape { experts: 32, tokens: 30, columns_in: 10, columns_out: vec![12] };
        let layout = Layout { degree: N, tokens: 32, experts: 32, rows: RowUse::Rotated, rotated, copied, partial };
        check(&BatchedPlan::with_layout(shape, layout).unwrap());
    }
}
