//! The layer as a whole: what is encrypted comes back, products and rotations are right and within their bounds.

use super::params::Shape;
use super::*;
use crate::field::{self, P};
use crate::random::SecretRng;

pub(super) fn extreme_plaintexts(rng: &mut SecretRng) -> Vec<Vec<u64>> {
    let edge = [0, 1, P - 1, P / 2, P / 2 + 1, P / 4, 2, P - 2];
    vec![
        vec![0; N],
        vec![P / 2; N],
        vec![P / 2 + 1; N],
        vec![P - 1; N],
        (0..N).map(|i| edge[i % edge.len()]).collect(),
        field::random_vector(rng, N),
    ]
}

/// The product of two polynomials modulo p, through the slow twin's transform.
pub(super) fn product(a: &[u64], b: &[u64]) -> Vec<u64> {
    let (mut a, mut b) = (a.to_vec(), b.to_vec());
    ntt::forward_p(N, &mut a);
    ntt::forward_p(N, &mut b);
    a.iter_mut().zip(&b).for_each(|(x, &y)| *x = field::mul(*x, y));
    ntt::inverse_p(N, &mut a);
    a
}

#[test]
fn encryption_at_every_level_returns_the_plaintext() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    // One prime of 25 bits cannot hold a plaintext of 41.
    for level in 2..=LEVELS {
        for plain in extreme_plaintexts(&mut rng) {
            let sent = key.encrypt(level, &plain, &mut rng);
            let read = SeededCiphertext::from_bytes(&sent.to_bytes(), level).unwrap();
            assert_eq!(key.decrypt(&read.expand(&key.request_seed())), plain, "level {level}");
        }
    }
}

#[test]
fn a_product_with_a_server_share_is_exact_in_slots() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[1; 32], &mut rng);
    let shape = Shape { level: 6, products: 3, nonzero: N, magnitude: P as f64 / 2.0, rotations: 0 };
    let plan = AnswerPlan::slots(&shape).unwrap();
    let mut sum = Ciphertext::zero(6);
    let mut expected = vec![0; N];
    for plain in extreme_plaintexts(&mut rng).into_iter().skip(3) {
        let share = field::random_vector(&mut rng, N);
        let weight = field::random_vector(&mut rng, N);
        let mine: Vec<u64> = plain.iter().zip(&share).map(|(&x, &s)| field::sub(x, s)).collect();
        let mut request = key.encrypt(6, &mine, &mut rng).expand(&public.request_seed());
        request.add_plain(&share);
        sum.add_product(&request, &weight);
        let term = product(&plain, &weight);
        expected.iter_mut().zip(&term).for_each(|(e, &t)| *e = field::add(*e, t));
    }
    let zero = public.encrypt_zero(6, &mut rng);
    let (answer, theirs) = finish_slots(&mut sum, zero, &plan, &mut rng).unwrap();
    let bytes = answer.to_bytes(&plan);
    assert_eq!(bytes.len(), plan.answer_len(N));
    let mine = key.open_slots(&Answer::from_bytes(&bytes, &plan, N).unwrap(), &plan).unwrap();
    let opened: Vec<u64> = mine.iter().zip(&theirs).map(|(&a, &b)| field::add(a, b)).collect();
    assert_eq!(opened, expected);
}

#[test]
fn a_product_in_coefficients_is_off_by_at_most_one() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[1; 32], &mut rng);
    let shape = Shape { level: 3, products: 2, nonzero: N, magnitude: 32768.0, rotations: 0 };
    let plan = AnswerPlan::coefficients(&shape).unwrap();
    let wanted: Vec<u32> = (0..N as u32).step_by(16).collect();
    let mut sum = Ciphertext::zero(3);
    let mut expected = vec![0; N];
    for _ in 0..2 {
        let plain = field::random_vector(&mut rng, N);
        let weight: Vec<u64> = (0..N).map(|_| field::from_signed((rng.next_u64() & 0xffff) as i64 - 0x8000)).collect();
        sum.add_product(&key.encrypt(3, &plain, &mut rng).expand(&public.request_seed()), &weight);
        let term = product(&plain, &weight);
        expected.iter_mut().zip(&term).for_each(|(e, &t)| *e = field::add(*e, t));
    }
    let zero = public.encrypt_zero(3, &mut rng);
    let (answer, theirs) = finish_coefficients(sum, zero, &plan, &wanted, &mut rng).unwrap();
    let read = Answer::from_bytes(&answer.to_bytes(&plan), &plan, wanted.len()).unwrap();
    let mine = key.open_coefficients(&read, &plan, &wanted).unwrap();
    let mut wrong = 0;
    for ((&k, &a), &b) in wanted.iter().zip(&mine).zip(&theirs) {
        let off = field::to_signed(field::sub(field::add(a, b), expected[k as usize]));
        assert!(off.abs() <= 1, "coefficient {k} is off by {off}");
        wrong += usize::from(off != 0);
    }
    assert!(wrong < wanted.len() / 4, "{wrong} of {} are off by one", wanted.len());
}

#[test]
fn rotations_move_slots_and_add_little_noise() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let moves = [(1, false), (-5, false), (64, true), (0, true)];
    let automorphisms = moves.map(|(r, swap)| Automorphism::new(r, swap));
    let keys = key.rotation_keys(&automorphisms, &mut rng);
    let keys = RotationKeys::from_bytes(&keys.to_bytes(), &automorphisms).unwrap();
    let row = slots::ROW as isize;
    let values = field::random_vector(&mut rng, N);
    for level in [4, 6] {
        let request = key.encrypt(level, &slots::encode(&values), &mut rng).expand(&key.request_seed());
        for ((r, swap), automorphism) in moves.into_iter().zip(automorphisms) {
            let turned = slots::decode(&key.decrypt(&keys.apply(&request, automorphism).unwrap()));
            for (slot, &v) in turned.iter().enumerate() {
                let (sign, i) = (slot / slots::ROW, (slot % slots::ROW) as isize);
                let from = (sign ^ usize::from(swap)) * slots::ROW + (i + r).rem_euclid(row) as usize;
                assert_eq!(v, values[from]);
            }
        }
    }
}

/// The exact noise of a ciphertext whose plaintext is known; it must be below 2^62.
pub(super) fn noise(key: &SecretKey, ciphertext: &Ciphertext, plain: &[u64]) -> Vec<i64> {
    let mut message = vec![0; ciphertext.level * N];
    arithmetic::encode(ciphertext.level, plain, &mut message);
    arithmetic::subtract_from_rows(&mut message, &key.phase(ciphertext));
    arithmetic::lift_signed(3, &message[..3 * N]).iter().map(|&x| x as i64).collect()
}

fn deviation(noise: &[i64]) -> f64 {
    (noise.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / noise.len() as f64).sqrt()
}

#[test]
fn noise_has_the_stated_deviation_and_stays_within_the_bound() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[3; 32], &mut rng);
    let automorphism = Automorphism::new(3, true);
    let keys = key.rotation_keys(&[automorphism], &mut rng);
    let none = Shape { level: 6, products: 0, nonzero: 0, magnitude: 0.0, rotations: 0 };
    let close = |measured: &[i64], shape: Shape, what: &str| {
        let (sigma, bound) = (shape.noise_sigma(), shape.noise_bound());
        let ratio = deviation(measured) / sigma;
        assert!(ratio > 0.7 && ratio < 1.05, "{what}: {ratio} times the stated deviation");
        assert!(measured.iter().all(|&x| (x.unsigned_abs() as f64) < bound), "{what}");
    };
    let zero = public.encrypt_zero(6, &mut rng).zero;
    close(&noise(&key, &zero, &[0; N]), none, "an encryption of zero");

    let plain = field::random_vector(&mut rng, N);
    let request = key.encrypt(6, &plain, &mut rng).expand(&public.request_seed());
    assert!(deviation(&noise(&key, &request, &plain)) < 3.5);
    let turned = keys.apply(&request, automorphism).unwrap();
    let moved = key.decrypt(&turned);
    close(&noise(&key, &turned, &moved), Shape { rotations: 1, ..none }, "a rotation");

    // Weights of the largest size with random signs; one polynomial with every coefficient, one with every 32nd.
    for step in [1, 32] {
        let mut weight = vec![0; N];
        for k in (0..N).step_by(step) {
            weight[k] = P / 2 + (rng.next_u64() & 1);
        }
        let mut sum = Ciphertext::zero(6);
        sum.add_product(&request, &weight);
        let shape = Shape { products: 1, nonzero: N / step, magnitude: P as f64 / 2.0, ..none };
        close(&noise(&key, &sum, &product(&plain, &weight)), shape, "a product");
    }
}

/// Shifts of one request with the same weights: over all coefficients they add up as if they were independent, in coefficient 0,
/// which no shift moves, they add up in phase. The bound for one coefficient knows of it.
#[test]
fn shifts_of_one_request_add_up_in_squares_but_for_single_coefficients() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let moves: Vec<Automorphism> = (1..8).map(|r| Automorphism::new(r, false)).collect();
    let keys = key.rotation_keys(&moves, &mut rng);
    let shape = Shape { level: 6, products: 8, nonzero: N, magnitude: P as f64 / 2.0, rotations: 7 };
    let (mut all, mut first, mut trials) = (0.0, 0.0, 0.0);
    for _ in 0..40 {
        let plain = field::random_vector(&mut rng, N);
        let request = key.encrypt(6, &plain, &mut rng).expand(&key.request_seed());
        let weight: Vec<u64> = (0..N).map(|_| P / 2 + (rng.next_u64() & 1)).collect();
        let mut one = Ciphertext::zero(6);
        one.add_product(&request, &weight);
        let mut sum = one.clone();
        moves.iter().for_each(|&m| sum.add(&keys.apply(&one, m).unwrap()));
        let noise = noise(&key, &sum, &key.decrypt(&sum));
        assert!(noise.iter().all(|&x| (x.unsigned_abs() as f64) < shape.noise_bound()));
        all += deviation(&noise).powi(2);
        first += (noise[0] as f64).powi(2);
        trials += 1.0;
    }
    let ratio = |sum: f64| (sum / trials).sqrt() / shape.noise_sigma();
    let (all, first) = (ratio(all), ratio(first));
    assert!(all > 0.9 && all < 1.05, "{all} times the stated deviation over all coefficients");
    // The root of 8 is 2.83; 40 trials miss this window once in ten million runs.
    assert!(first > 1.3 && first < 5.0, "{first} times it in coefficient 0");
}

/// What the books say of a plan is what its bound says.
#[test]
fn the_least_flood_hides_the_stated_number_of_coefficients_and_answers_are_counted() {
    use super::params::{FLOOD_SECURITY_BITS, FLOODED_COEFFICIENTS_LOG2};
    let whole = f64::from(HidingBudget::WHOLE_LOG2).exp2();
    for (products, nonzero, magnitude, rotations) in
        [(1, 1, 1.0, 0), (2, N, P as f64 / 2.0, 0), (2112, 256, P as f64 / 2.0, 5), (4096, 8192, 1e6, 61)]
    {
        let shape = Shape { level: 6, products, nonzero, magnitude, rotations };
        let plan = AnswerPlan::slots(&shape).unwrap();
        let answers = whole / plan.hiding_cost() as f64;
        let coefficients = (answers * N as f64).log2();
        let width = f64::from(plan.flood_log2.unwrap());
        let distance = shape.noise_sigma().log2() - 1.0 - width + 0.5 * (3.2f64.log2() + coefficients) + 0.01;
        assert!(coefficients >= FLOODED_COEFFICIENTS_LOG2);
        assert!(distance <= -FLOOD_SECURITY_BITS + 1e-6 || plan.hiding_cost() == 1, "2^{distance}");
    }
    let coefficients = Shape { level: 3, products: 1, nonzero: 1, magnitude: 1.0, rotations: 0 };
    assert_eq!(AnswerPlan::coefficients(&coefficients).unwrap().hiding_cost(), 0);
}

#[test]
fn no_answer_is_made_or_opened_beyond_the_budget() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[1; 32], &mut rng);
    let shape = Shape { level: 6, products: 2112, nonzero: 256, magnitude: P as f64 / 2.0, rotations: 5 };
    let plan = AnswerPlan::slots(&shape).unwrap();
    let mut answer = || finish_slots(&mut Ciphertext::zero(6), public.encrypt_zero(6, &mut rng), &plan, &mut rng);
    let (first, _) = answer().unwrap();
    public.budget().leave(&plan, 1);
    assert!(public.budget().check(&plan, 1).is_ok() && public.budget().check(&plan, 2).is_err());
    assert!(answer().is_ok());
    assert!(matches!(answer(), Err(crate::Error::HidingUsedUp { .. })));
    key.budget().leave(&plan, 1);
    assert!(key.open_slots(&first, &plan).is_ok());
    assert!(matches!(key.open_slots(&first, &plan), Err(crate::Error::HidingUsedUp { .. })));
    assert!(public.budget().check(&plan, usize::MAX).is_err());
}

#[test]
fn the_flood_is_bounded_centred_and_as_wide_as_the_plan_says() {
    let mut rng = SecretRng::from_os();
    for width in [64, 80, 103, 108] {
        let mut rows = vec![0; 6 * N];
        answer::flood(&mut rows, width, &mut rng);
        // The fraction of q in units of 2^-56: a coefficient is this times q / 2^56.
        let unit = (params::modulus_bits(6) - 56.0).exp2();
        let half = 1i64 << 55;
        let values: Vec<f64> = arithmetic::round_to_bits(6, &rows, 56)
            .iter()
            .map(|&x| (((x as i64 + half) & ((1 << 56) - 1)) - half) as f64 * unit / f64::from(width).exp2())
            .collect();
        let slack = unit / f64::from(width).exp2();
        assert!(values.iter().all(|x| x.abs() <= 2.0 + slack));
        if slack < 0.01 {
            let mean = values.iter().sum::<f64>() / N as f64;
            let variance = values.iter().map(|x| x * x).sum::<f64>() / N as f64;
            assert!(mean.abs() < 0.04 && (variance - 1.0 / 3.0).abs() < 0.03, "{mean} {variance}");
        }
    }
}

#[test]
fn requests_never_share_a_stream() {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let plain = vec![0; N];
    let encrypt = |_: usize| {
        let mut rng = SecretRng::from_os();
        (0..8).map(|_| key.encrypt(2, &plain, &mut rng).index).collect::<Vec<_>>()
    };
    let mut indices: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|t| scope.spawn(move || encrypt(t))).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    indices.sort_unstable();
    assert_eq!(indices, (0..32).collect::<Vec<_>>());
    let mut seeds: Vec<[u8; 32]> = (0..64).map(|_| SecretKey::generate(&mut rng).request_seed().0).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 64);
}

#[test]
fn small_polynomials_multiply_as_on_paper() {
    let mut rng = SecretRng::from_os();
    let (mut a, mut b) = (vec![0; N], vec![0; N]);
    let terms: Vec<(usize, u64)> = (0..40).map(|k| ((k * 977 + 13) % N, rng.next_u64() % P)).collect();
    terms.iter().for_each(|&(k, x)| a[k] = x);
    b.iter_mut().for_each(|x| *x = rng.next_u64() % P);
    let mut expected = vec![0; N];
    for (k, x) in terms {
        for (j, &y) in b.iter().enumerate() {
            let (at, t) = ((k + j) % N, field::mul(x, y));
            expected[at] = if k + j < N { field::add(expected[at], t) } else { field::sub(expected[at], t) };
        }
    }
    assert_eq!(product(&a, &b), expected);
}

#[test]
fn slots_are_encoded_and_decoded() {
    let mut rng = SecretRng::from_os();
    let values = field::random_vector(&mut rng, N);
    assert_eq!(slots::decode(&slots::encode(&values)), values);
    let mut seen: Vec<u32> = slots::index().to_vec();
    seen.sort_unstable();
    assert!(seen.iter().enumerate().all(|(i, &x)| i == x as usize));
    // Slots of one coset, i apart by N / 2t, see one value of X^t: a weight in X^t is one value for all of them.
    let t = 32;
    let mut weight = vec![0; N];
    (0..N).step_by(t).for_each(|k| weight[k] = rng.next_u64() % P);
    let seen = slots::decode(&weight);
    let cosets = slots::ROW / t;
    assert!((0..N).all(|slot| seen[slot] == seen[slot / slots::ROW * slots::ROW + slot % slots::ROW % cosets]));
}
