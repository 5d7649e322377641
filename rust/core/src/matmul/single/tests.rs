use super::kernel::{TOGETHER, Version};
use super::*;
use crate::field::to_signed;
use crate::testing;

/// A cost model that leaves the choice to the shape.
const COST: CostModel = CostModel { link_bits_per_second: 3e9, cores: 2.0, memory: 1 << 30 };

/// Draws one number of `bits` signed bits, every fourth the largest or the smallest.
fn signed(rng: &mut SecretRng, bits: u32) -> i64 {
    let word = rng.next_u64();
    match word & 7 {
        0 => (1 << (bits - 1)) - 1,
        1 => -(1 << (bits - 1)),
        _ => (word as i64) >> (64 - bits),
    }
}

struct Case {
    plan: Plan,
    x: [Vec<u64>; 2],
    weights: Vec<i32>,
}

fn case(shape: Shape, bits: u32) -> Case {
    let mut rng = SecretRng::from_os();
    let n = shape.rows * shape.columns;
    let weights = (0..shape.columns * shape.outputs).map(|_| signed(&mut rng, bits) as i32).collect();
    Case {
        plan: Plan::new(shape, bits, &COST).unwrap(),
        x: [field::random_vector(&mut rng, n), field::random_vector(&mut rng, n)],
        weights,
    }
}

impl Case {
    fn matrix(&self) -> Matrix<'_> {
        let Shape { columns, outputs, .. } = self.plan.shape;
        Matrix::from_i32(columns, outputs, self.plan.weight_bits, &self.weights).unwrap()
    }

    fn expected(&self) -> Vec<u64> {
        let x: Vec<u64> = self.x[0].iter().zip(&self.x[1]).map(|(&a, &b)| field::add(a, b)).collect();
        clear::product_plain(&x, self.plan.shape.rows, &self.matrix())
    }

    fn run(&self) -> [Vec<u64>; 2] {
        let mut rng = SecretRng::from_os();
        let secret = SecretKey::generate(&mut rng);
        let public = secret.public_key(&[1; 32], &mut rng);
        let (c, s) = testing::run(
            |party| client(party, &secret, &self.plan, &self.x[0]),
            |party| server(party, &public, &self.plan, self.matrix(), &self.x[1]),
        );
        [c.unwrap(), s.unwrap()]
    }
}

/// The largest error of two shares; panics above 1.
fn worst(shares: &[Vec<u64>; 2], expected: &[u64]) -> i64 {
    assert_eq!(shares[0].len(), expected.len());
    let off = |((&a, &b), &e): ((&u64, &u64), &u64)| to_signed(field::sub(field::add(a, b), e)).abs();
    let worst = shares[0].iter().zip(&shares[1]).zip(expected).map(off).max().unwrap();
    assert!(worst <= 1, "an output is off by {worst}");
    worst
}

#[test]
fn products_are_those_of_integers_up_to_one() {
    for (rows, columns, outputs, bits) in [
        (1, 1, 1, 16),
        (1, 2048, 70, 16),
        (1, 300, 1000, 24),
        (2, 130, 33, 16),
        (5, 100, 17, 8),
        (24, 257, 65, 16),
        (32, 64, 64, 24),
        (33, 70, 5, 16),
        (300, 40, 30, 12),
    ] {
        let case = case(Shape { rows, columns, outputs }, bits);
        worst(&case.run(), &case.expected());
    }
}

#[test]
fn extreme_weights_and_shares_stay_within_one() {
    for (weight, x) in [(i32::from(i16::MIN), field::P - 1), (i32::from(i16::MIN), field::P / 2), (32767, 1), (0, 5)] {
        let mut case = case(Shape { rows: 3, columns: 600, outputs: 20 }, 16);
        case.weights.fill(weight);
        case.x[0].fill(x);
        case.x[1].fill(field::P / 2);
        worst(&case.run(), &case.expected());
    }
}

/// 2^20 outputs; the error of 1 does occur, so the bound is the right one.
#[test]
fn a_million_outputs_are_off_by_at_most_one() {
    let case = case(Shape { rows: 1024, columns: 4, outputs: 1024 }, 16);
    assert_eq!(worst(&case.run(), &case.expected()), 1);
}

#[test]
fn every_version_of_the_loop_computes_what_the_plain_twin_does() {
    let mut rng = SecretRng::from_os();
    let secret = SecretKey::generate(&mut rng);
    let public = secret.public_key(&[1; 32], &mut rng);
    for (lanes, block, spread, inputs, answers) in [
        (1, 64, 128, 3, 5),
        (2, 300, 13, 2, 2),
        (4, 16, 128, 5, 3),
        (8, 32, 32, 70, 6),
        (64, 8, 16, 35, 5),
        (8192, 1, 1, 34, 4),
    ] {
        let shape = Shape { rows: lanes, columns: block * inputs, outputs: spread * answers };
        let plan = Plan { shape, weight_bits: 16, lanes, block, spread, level: 3 };
        let weights: Vec<i32> = (0..shape.columns * shape.outputs).map(|_| signed(&mut rng, 16) as i32).collect();
        let matrix = Matrix::from_i32(shape.columns, shape.outputs, 16, &weights).unwrap();
        let encrypted: Vec<Encrypted> = (0..inputs)
            .map(|_| secret.encrypt(3, &field::random_vector(&mut rng, N), &mut rng).expand(&public.request_seed()))
            .collect();
        let slow = evaluate::products_plain(&plan, &matrix, &encrypted, 0..answers);
        assert!(!answers.is_multiple_of(TOGETHER) || answers == 4);
        for version in Version::available() {
            let fast = evaluate::products_with(version, &plan, &matrix, &encrypted, 0..answers);
            assert!(fast.iter().zip(&slow).all(|(a, b)| a.c == b.c), "{version:?} with {lanes} lanes");
        }
    }
}

/// Every term at its largest: 32 products of centred residues of (q - 1) / 2 plus a residue stay exact.
#[test]
fn the_loop_is_exact_at_the_largest_residues() {
    use super::kernel::{Modulus, WeightTile, multiply_add};
    for prime in 0..3 {
        let q = crate::rlwe::PRIMES[prime];
        let modulus = Modulus::new(prime);
        for inputs in [1, 31, 32, 33, 64, 100] {
            let (largest, smallest) = (vec![q / 2; N], vec![q / 2 + 1; N]);
            let ciphertexts: Vec<[&[u32]; 2]> = vec![[&largest, &smallest]; inputs];
            let mut tile = WeightTile::new(8, TOGETHER, inputs);
            for input in 0..inputs {
                tile.set(modulus, input, &vec![q / 2; N / 8]);
            }
            for version in Version::available() {
                let mut sums = vec![0.0; 2 * TOGETHER * N];
                multiply_add(version, modulus, &tile, &ciphertexts, &mut sums, &mut Vec::new());
                let (q, half) = (u128::from(q), u128::from(q / 2));
                for (part, x) in [half, half + 1].into_iter().enumerate() {
                    let expected = inputs as u128 * half * x % q;
                    assert!(sums[part * N..][..N].iter().all(|&s| u128::from(modulus.canonical(s)) == expected));
                }
            }
        }
    }
}

#[test]
fn prepared_products_are_those_of_integers_up_to_one() {
    let case = case(Shape { rows: 7, columns: 150, outputs: 40 }, 16);
    let mut rng = SecretRng::from_os();
    let secret = SecretKey::generate(&mut rng);
    let public = secret.public_key(&[1; 32], &mut rng);
    let (c, s) = testing::run(
        |party| {
            let prepared = prepare_client(party, &secret, &case.plan)?;
            party.channel.reset_costs();
            let out = online_client(party, prepared, &case.x[0])?;
            let cost = party.channel.costs();
            assert_eq!(cost[0].bytes_sent, 16 + field::packed_len(7 * 150, field::P_BITS) as u64);
            assert_eq!((cost[0].bytes_received, cost[0].rounds), (0, 0));
            Ok(out)
        },
        |party| {
            let prepared = prepare_server(party, &public, &case.plan, case.matrix())?;
            online_server(party, prepared, case.matrix(), &case.x[1])
        },
    );
    worst(&[c.unwrap(), s.unwrap()], &case.expected());
}
