use super::kernel::{TOGETHER, Version};
use super::*;
use crate::field::to_signed;
use crate::matmul::{ClientKeys, Work};
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
        let (mine, other) = encryption();
        let (c, s) = testing::run(
            |party| multiply(party, &mine, &self.plan, &self.x[0], None),
            |party| multiply(party, &other, &self.plan, &self.x[1], Some(self.matrix())),
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
        // Shapes whose cheapest layout leaves hardly any room for the roundings of an answer.
        (1, 64, 100, 22),
        (32, 48, 16, 24),
        (1, 512, 4096, 20),
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
    use super::kernel::{Modulus, WeightTile, canonical_all, multiply_add};
    for prime in 0..3 {
        let q = crate::rlwe::PRIMES[prime];
        let modulus = Modulus::new(prime);
        for inputs in [1, 31, 32, 33, 64, 100] {
            let (largest, smallest) = (vec![q / 2; N], vec![q / 2 + 1; N]);
            let ciphertexts: Vec<[&[u32]; 2]> = vec![[&largest, &smallest]; inputs];
            let mut tile = WeightTile::new(8, TOGETHER, inputs);
            for input in 0..inputs {
                tile.set(input, &vec![f64::from(q / 2); N / 8]);
            }
            for version in Version::available() {
                let mut sums = vec![0.0; 2 * TOGETHER * N];
                multiply_add(version, modulus, &tile, &ciphertexts, &mut sums, &mut Vec::new());
                let mut residues = vec![0; N];
                let (q, half) = (u128::from(q), u128::from(q / 2));
                for (part, x) in [half, half + 1].into_iter().enumerate() {
                    let expected = inputs as u128 * half * x % q;
                    canonical_all(version, modulus, &sums[part * N..][..N], &mut residues);
                    assert!(residues.iter().all(|&r| u128::from(r) == expected));
                }
            }
        }
    }
}

#[test]
fn prepared_products_are_those_of_integers_up_to_one() {
    let case = case(Shape { rows: 7, columns: 150, outputs: 40 }, 16);
    let (mine, other) = encryption();
    let (c, s) = testing::run(
        |party| {
            let prepared = prepare(party, &mine, &case.plan, None)?;
            party.channel.reset_costs();
            let out = online(party, &mine, prepared, &case.x[0], None)?;
            let cost = party.channel.costs();
            let sent: u64 = cost.iter().map(|cost| cost.bytes_sent).sum();
            assert_eq!(sent, 16 + 8 + field::packed_len(7 * 150, field::P_BITS) as u64);
            assert!(cost.iter().all(|cost| (cost.bytes_received, cost.rounds) == (0, 0)));
            Ok(out)
        },
        |party| {
            let prepared = prepare(party, &other, &case.plan, Some(case.matrix()))?;
            online(party, &other, prepared, &case.x[1], Some(case.matrix()))
        },
    );
    worst(&[c.unwrap(), s.unwrap()], &case.expected());
}

/// Tiles, ragged at every edge, that fall into several windows.
#[test]
fn many_tiles_and_windows_are_put_together_rightly() {
    let shape = Shape { rows: 21, columns: 299, outputs: 45 };
    let mut case = case(shape, 16);
    case.plan = Plan { shape, weight_bits: 16, lanes: 8, block: 2, spread: 20, level: 3 };
    assert_eq!((case.plan.tiles(), case.plan.inputs(), case.plan.answers()), (3, 150, 3));
    worst(&case.run(), &case.expected());
    case.plan = Plan { lanes: 2, block: 100, spread: 33, ..case.plan };
    assert_eq!((case.plan.tiles(), case.plan.inputs(), case.plan.answers()), (11, 3, 2));
    worst(&case.run(), &case.expected());
}

#[test]
fn plans_fit_the_noise_the_memory_and_the_limits() {
    for (rows, columns, outputs) in
        [(1, 1, 1), (1, 16384, 16384), (24, 2048, 1408), (128, 7168, 256), (4096, 16384, 16384)]
    {
        for (bits, level) in [(8, 3), (16, 3), (41, 4)] {
            let plan = Plan::new(Shape { rows, columns, outputs }, bits, &COST).unwrap();
            assert!(plan.level <= level && plan.memory() <= COST.memory && plan.block * plan.spread <= plan.room());
            assert!(plan.tiles() * plan.lanes >= rows && plan.inputs() * plan.block >= columns);
            assert!(Plan { level: plan.level - 1, ..plan }.answer_plan().is_err(), "a lower level would do");
        }
    }
    let shape = Shape { rows: 24, columns: 2048, outputs: 1408 };
    let plan = Plan::new(shape, 16, &COST).unwrap();
    assert!(plan.bytes_up() + plan.bytes_down().unwrap() < 15_000_000);
    assert!(matches!(Plan::new(shape, 16, &CostModel { memory: 1000, ..COST }), Err(Error::Unsupported(_))));
    assert!(matches!(Plan::new(shape, 50, &COST), Err(Error::Unsupported(_))));
    assert!(matches!(Plan::new(Shape { rows: 0, ..shape }, 16, &COST), Err(Error::BadArgument(_))));
}

#[test]
fn lengths_and_rounds_do_not_depend_on_the_values() {
    let mut case = case(Shape { rows: 9, columns: 90, outputs: 30 }, 16);
    let cost = |case: &Case| {
        let (mine, other) = encryption();
        let (c, _) = testing::run(
            |party| {
                multiply(party, &mine, &case.plan, &case.x[0], None)?;
                let costs = party.channel.costs();
                let sum = |part: fn(&crate::net::StepCost) -> u64| costs.iter().map(part).sum::<u64>();
                Ok((sum(|c| c.bytes_sent), sum(|c| c.bytes_received), sum(|c| c.messages_sent), sum(|c| c.rounds)))
            },
            |party| multiply(party, &other, &case.plan, &case.x[1], Some(case.matrix())),
        );
        c.unwrap()
    };
    let random = cost(&case);
    case.weights.fill(0);
    case.x.iter_mut().for_each(|x| x.fill(0));
    assert_eq!(cost(&case), random);
    assert_eq!(random.3, 1);
    assert_eq!(random.0 - 16 * random.2, case.plan.bytes_up() as u64);
    assert!(random.1 <= case.plan.bytes_down().unwrap() as u64 + 16 * case.plan.answers() as u64);
}

/// Both parties' keys, without an exchange.
fn encryption() -> (Encryption, Encryption) {
    use crate::matmul::ServerKeys;
    let (secret, public, mut rng) = keys();
    let rotations = secret.rotation_keys(&[], &mut rng);
    let pool = || rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap().into();
    let (secret, public) = (secret.into(), public.into());
    let (work, tickets) = (Work::default(), Default::default());
    let client = Encryption::Client(ClientKeys { secret, pool: pool(), work, tickets });
    let (work, tickets) = (Work::default(), Default::default());
    (client, Encryption::Server(ServerKeys { public, rotations, pool: pool(), work, tickets }))
}

fn keys() -> (SecretKey, PublicKey, SecretRng) {
    let mut rng = SecretRng::from_os();
    let secret = SecretKey::generate(&mut rng);
    let public = secret.public_key(&[1; 32], &mut rng);
    (secret, public, rng)
}

/// c1 of a product is a linear function of the weights, with coefficients that the client knows: without an encryption of
/// zero one division gives them all. With it, the same attack finds none.
#[test]
fn attack_weights_from_c1() {
    let (secret, public, mut rng) = keys();
    let shape = Shape { rows: 4, columns: 64, outputs: 32 };
    let plan = Plan { shape, weight_bits: 16, lanes: 4, block: 64, spread: 32, level: 3 };
    let weights: Vec<i16> = (0..64 * 32).map(|_| signed(&mut rng, 16) as i16).collect();
    let matrix = Matrix::from_i16(64, 32, &weights).unwrap();
    let request = secret.encrypt(3, &vec![0; N], &mut rng).expand(&public.request_seed());
    let attack = |answer: &Encrypted| -> usize {
        let q = u64::from(crate::rlwe::PRIMES[0]);
        let inverse =
            |x: u64| (0..25).rev().fold(1, |a, bit| a * a % q * if (q - 2) >> bit & 1 == 1 { x } else { 1 } % q);
        let mut quotient: Vec<u32> =
            (0..N).map(|k| (u64::from(answer.c[1][k]) * inverse(u64::from(request.c[1][k])) % q) as u32).collect();
        crate::rlwe::ntt::inverse(0, N, &mut quotient);
        let centred = |x: u32| if u64::from(x) > q / 2 { i64::from(x) - q as i64 } else { i64::from(x) };
        let found = |(j, i): (usize, usize)| centred(quotient[4 * (i * 64 + 63 - j)]) == i64::from(weights[j * 32 + i]);
        (0..64).flat_map(|j| (0..32).map(move |i| (j, i))).filter(|&at| found(at)).count()
    };
    let mut answer = evaluate::products(&plan, &matrix, std::slice::from_ref(&request), 0..1).swap_remove(0);
    assert_eq!(attack(&answer), 64 * 32, "without the guard the attack finds every weight");
    answer.add_zero(public.encrypt_zero(3, &mut rng));
    assert!(attack(&answer) < 8, "with it, no more than by chance");
}

/// Without the mask a client that asks for rows of the unit matrix reads the weights; with it, its share says nothing.
#[test]
fn attack_weights_from_c0() {
    let (secret, public, mut rng) = keys();
    let shape = Shape { rows: 16, columns: 16, outputs: 24 };
    let plan = Plan::new(shape, 16, &COST).unwrap();
    let weights: Vec<i16> = (0..16 * 24).map(|_| signed(&mut rng, 16) as i16).collect();
    let matrix = Matrix::from_i16(16, 24, &weights).unwrap();
    let unit: Vec<u64> = (0..256).map(|k| u64::from(k % 17 == 0)).collect();
    let requests: Vec<Encrypted> = (0..plan.inputs())
        .map(|input| secret.encrypt(3, &pack(&plan, &unit, 0, input), &mut rng).expand(&public.request_seed()))
        .collect();
    let (mut open, mut masked) = (vec![0; 16 * 24], vec![0; 16 * 24]);
    for answer in 0..plan.answers() {
        let wanted = plan.wanted(0, answer);
        let mut product = evaluate::products(&plan, &matrix, &requests, answer..answer + 1).swap_remove(0);
        let sent = finish(product.clone(), &public, &plan.answer_plan().unwrap(), &wanted, &mut rng).unwrap().0;
        product.add_zero(public.encrypt_zero(3, &mut rng));
        let whole = secret.decrypt(&product);
        unpack(&plan, &wanted.iter().map(|&k| whole[k as usize]).collect::<Vec<_>>(), 0, answer, &mut open);
        let share = secret.open_coefficients(&sent, &plan.answer_plan().unwrap(), &wanted).unwrap();
        unpack(&plan, &share, 0, answer, &mut masked);
    }
    let found = |share: &[u64]| share.iter().zip(&weights).filter(|&(&s, &w)| to_signed(s) == i64::from(w)).count();
    assert_eq!(found(&open), weights.len());
    assert_eq!(found(&masked), 0);
    let small = masked.iter().filter(|&&s| to_signed(s).abs() < field::P as i64 / 8).count();
    assert!((40..160).contains(&small), "a quarter of uniform shares is small, not {small} of 384");
}

/// What the server does with messages that a client must not send.
#[test]
fn bad_requests_end_the_session_with_a_typed_error() {
    let (mine, other) = encryption();
    let Encryption::Client(ClientKeys { secret, .. }) = &mine else { unreachable!() };
    let mut rng = SecretRng::from_os();
    let case = case(Shape { rows: 2, columns: 8, outputs: 3 }, 16);
    let length = case.plan.bytes_up();
    let good = |rng: &mut SecretRng| -> Vec<u8> {
        (0..case.plan.inputs()).flat_map(|_| secret.encrypt(case.plan.level, &vec![0; N], rng).to_bytes()).collect()
    };
    let outcome = |kind: Kind, body: &[u8]| {
        let (mut c, mut s) = testing::parties();
        c.channel.send(kind, body).unwrap();
        c.channel.flush().unwrap();
        multiply(&mut s, &other, &case.plan, &case.x[1], Some(case.matrix()))
    };
    assert!(outcome(Kind::Request, &good(&mut rng)).is_ok());
    for wrong in [0, 1, length - 1, length + 1] {
        assert!(matches!(outcome(Kind::Request, &vec![0; wrong]), Err(Error::BadMessage { .. })));
    }
    assert!(matches!(outcome(Kind::Answer, &vec![0; length]), Err(Error::BadMessage { .. })));
    assert!(matches!(outcome(Kind::Request, &vec![0xff; length]), Err(Error::BadMessage { .. })));
    let mut one_residue = good(&mut rng);
    one_residue[8..12].fill(0xff);
    assert!(matches!(outcome(Kind::Request, &one_residue), Err(Error::BadMessage { .. })));
    for _ in 0..50 {
        let mut random = vec![0; length];
        rng.fill(&mut random);
        assert!(matches!(outcome(Kind::Request, &random), Err(Error::BadMessage { .. })));
    }
}

/// What the client does with messages that a server must not send, and the server with a bad online message.
#[test]
fn bad_answers_and_bad_openings_end_the_session_with_a_typed_error() {
    let ((mine, other), mut rng) = (encryption(), SecretRng::from_os());
    let case = case(Shape { rows: 3, columns: 8, outputs: 3 }, 16);
    assert_eq!((case.plan.answers(), case.plan.tiles()), (1, 1));
    let length = case.plan.answer_plan().unwrap().answer_len(9);
    let outcome = |kind: Kind, body: &[u8]| {
        let (mut c, mut s) = testing::parties();
        s.channel.send(kind, body).unwrap();
        s.channel.flush().unwrap();
        multiply(&mut c, &mine, &case.plan, &case.x[0], None)
    };
    for wrong in [0, 1, length - 1, length + 1, 3 * length] {
        assert!(matches!(outcome(Kind::Answer, &vec![0; wrong]), Err(Error::BadMessage { .. })));
    }
    assert!(matches!(outcome(Kind::Request, &vec![0; length]), Err(Error::BadMessage { .. })));
    let mut padded = vec![0; length];
    *padded.last_mut().unwrap() = 0xf0;
    assert!(matches!(outcome(Kind::Answer, &padded), Err(Error::BadMessage { .. })));
    let mut random = vec![0; length];
    for _ in 0..20 {
        rng.fill(&mut random);
        let any = outcome(Kind::Answer, &random);
        assert!(any.is_err_and(|e| matches!(e, Error::BadMessage { .. })) || random.last().unwrap() < &16);
    }
    for body in [vec![0; 10], vec![0xff; field::packed_len(24, field::P_BITS)]] {
        let (_, s) = testing::run(
            |party| {
                prepare(party, &mine, &case.plan, None)?;
                party.channel.send(Kind::Opening, &body)?;
                party.channel.flush()
            },
            |party| {
                let prepared = prepare(party, &other, &case.plan, Some(case.matrix()))?;
                online(party, &other, prepared, &case.x[1], Some(case.matrix()))
            },
        );
        assert!(matches!(s, Err(Error::BadMessage { .. })));
    }
}

#[test]
fn the_callers_own_mistakes_are_told_apart() {
    let (mine, other) = encryption();
    let case = case(Shape { rows: 2, columns: 3, outputs: 4 }, 16);
    let (mut c, mut s) = testing::parties();
    assert!(matches!(multiply(&mut c, &mine, &case.plan, &[0; 5], None), Err(Error::BadArgument(_))));
    assert!(matches!(multiply(&mut c, &mine, &case.plan, &[field::P; 6], None), Err(Error::BadArgument(_))));
    let wide = [0i32; 12];
    let wide = Matrix::from_i32(3, 4, 24, &wide).unwrap();
    assert!(matches!(multiply(&mut s, &other, &case.plan, &[0; 6], Some(wide)), Err(Error::BadArgument(_))));
    let turned = Matrix::from_i32(4, 3, 16, &case.weights).unwrap();
    assert!(matches!(multiply(&mut s, &other, &case.plan, &[0; 6], Some(turned)), Err(Error::BadArgument(_))));
    assert!(Matrix::from_i32(1, 1, 16, &[1 << 15]).is_err() && Matrix::from_i32(1, 1, 25, &[0]).is_err());
    assert!(Matrix::from_i16(2, 2, &[0; 3]).is_err() && Matrix::from_field(1, 1, &[field::P]).is_err());
    assert!(matches!(multiply(&mut c, &mine, &case.plan, &[0; 6], Some(wide)), Err(Error::BadArgument(_))));
    assert!(matches!(multiply(&mut s, &other, &case.plan, &[0; 6], None), Err(Error::BadArgument(_))));
}
