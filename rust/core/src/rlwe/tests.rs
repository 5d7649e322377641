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
    let (answer, theirs) = finish_slots(sum, zero, &plan, &mut rng).unwrap();
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
