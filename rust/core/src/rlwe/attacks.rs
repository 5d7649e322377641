//! Attacks on the encryption layer: each wins when its guard is off and loses when it is on. The guards can be taken
//! off only here, by reaching into the types.

use super::keys::EncryptionOfZero;
use super::params::Shape;
use super::tests::{noise, product};
use super::*;
use crate::Error;
use crate::field::{self, P};
use crate::random::{PublicSeed, SecretRng};

struct World {
    rng: SecretRng,
    key: SecretKey,
    public: PublicKey,
}

fn world() -> World {
    let mut rng = SecretRng::from_os();
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[9; 32], &mut rng);
    World { rng, key, public }
}

/// numerator / denominator at every evaluation modulo the first prime, back in coefficients: what a client computes
/// that divides the c1 of an answer by the polynomial that it chose itself. Points where the denominator is 0 become 0.
fn divide(numerator: &[u32], denominator: &[u32]) -> Vec<u32> {
    let q = u64::from(PRIMES[0]);
    let mut out: Vec<u32> = numerator[..N]
        .iter()
        .zip(denominator)
        .map(|(&x, &y)| (u64::from(x) * arithmetic::power(u64::from(y), q - 2, q) % q) as u32)
        .collect();
    ntt::inverse(0, N, &mut out);
    out
}

/// Coefficients in which two polynomials agree.
fn agree(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).filter(|(x, y)| x == y).count()
}

/// A weight polynomial of small numbers modulo p and its residues modulo the first prime.
fn weight(rng: &mut SecretRng) -> (Vec<u64>, Vec<u32>) {
    let w: Vec<u64> = (0..N).map(|_| field::from_signed((rng.next_u64() & 0xffff) as i64 - 0x8000)).collect();
    let mut residues = vec![0; N];
    reduce_plain(0, &w, &mut residues);
    (w, residues)
}

#[test]
fn dividing_c1_by_its_seed_gives_the_weights_unless_a_zero_was_added() {
    let World { mut rng, key, public } = world();
    let request = key.encrypt(3, &field::random_vector(&mut rng, N), &mut rng).expand(&public.request_seed());
    let (w, truth) = weight(&mut rng);
    let mut answer = Ciphertext::zero(3);
    answer.add_product(&request, &w);
    assert!(agree(&divide(&answer.c[1], &request.c[1]), &truth) > N - 50, "the attack wins without the guard");
    answer.add_zero(public.encrypt_zero(3, &mut rng));
    assert!(agree(&divide(&answer.c[1], &request.c[1]), &truth) < 20);
}

#[test]
fn two_answers_with_one_zero_give_the_difference_of_their_weights() {
    let World { mut rng, key, public } = world();
    let request = key.encrypt(3, &field::random_vector(&mut rng, N), &mut rng).expand(&public.request_seed());
    let ((w, _), (v, _)) = (weight(&mut rng), weight(&mut rng));
    let difference: Vec<u64> = w.iter().zip(&v).map(|(&x, &y)| field::sub(x, y)).collect();
    let mut truth = vec![0; N];
    reduce_plain(0, &difference, &mut truth);
    let zero = public.encrypt_zero(3, &mut rng);
    let copy = EncryptionOfZero { zero: zero.zero.clone(), budget: zero.budget.clone() };
    let attack = |first: EncryptionOfZero, second: EncryptionOfZero| {
        let mut answers = [(&w, first), (&v, second)].map(|(w, zero)| {
            let mut answer = Ciphertext::zero(3);
            answer.add_product(&request, w);
            answer.add_zero(zero);
            answer.c[1].clone()
        });
        let [first, second] = &mut answers;
        arithmetic::subtract_from_rows(second, first);
        agree(&divide(second, &request.c[1]), &truth)
    };
    assert!(attack(zero, copy) > N - 50, "the attack wins without the guard");
    let (first, second) = (public.encrypt_zero(3, &mut rng), public.encrypt_zero(3, &mut rng));
    assert!(attack(first, second) < 20);
}

#[test]
fn noise_tells_the_weight_unless_it_is_flooded() {
    let World { mut rng, key, public } = world();
    let plain = field::random_vector(&mut rng, N);
    let request = key.encrypt(6, &plain, &mut rng).expand(&public.request_seed());
    // The client knows its own error and the product's plaintext share; it regresses the noise of the answer on the
    // error.
    let error = noise(&key, &request, &plain);
    let power: f64 = error.iter().map(|&e| (e * e) as f64).sum();
    let shape = Shape { level: 6, products: 1, nonzero: 1, magnitude: 2000.0, rotations: 0 };
    let width = AnswerPlan::slots(&shape).unwrap().flood_log2.unwrap();
    let mut guess = |w: u64, flooded: bool| {
        let mut weight = vec![0; N];
        weight[0] = w;
        let mut answer = Ciphertext::zero(6);
        answer.add_product(&request, &weight);
        answer.add_zero(public.encrypt_zero(6, &mut rng));
        if flooded {
            cipher::inverse_rows(&mut answer.c[0]);
            answer::flood(&mut answer.c[0], width, &mut rng);
            cipher::forward_rows(&mut answer.c[0]);
        }
        let mut message = vec![0; 6 * N];
        arithmetic::encode(6, &product(&plain, &weight), &mut message);
        arithmetic::subtract_from_rows(&mut message, &key.phase(&answer));
        let wide = arithmetic::lift_wide(&message);
        let slope = wide.iter().zip(&error).map(|(&x, &e)| x * e as f64).sum::<f64>() / power;
        if slope > 1500.0 { 2000 } else { 1000 }
    };
    let weights = [1000, 2000, 2000, 1000, 2000, 1000, 1000, 2000, 1000, 2000, 2000, 1000, 2000, 1000, 1000, 2000];
    assert!(weights.iter().all(|&w| guess(w, false) == w), "the attack wins without the guard");
    let right = weights.iter().filter(|&&w| guess(w, true) == w).count();
    assert!((1..=15).contains(&right), "{right} of 16 right: chance gives 0 or 16 once in 32768");
}

#[test]
fn a_repeated_stream_gives_the_difference_of_two_plaintexts() {
    let World { mut rng, key, .. } = world();
    let (a, b) = (field::random_vector(&mut rng, N), field::random_vector(&mut rng, N));
    let truth: Vec<u64> = a.iter().zip(&b).map(|(&x, &y)| field::sub(x, y)).collect();
    let attack = |first: SeededCiphertext, second: SeededCiphertext| {
        let mut rows = second.c0;
        arithmetic::subtract_from_rows(&mut rows, &first.c0);
        cipher::inverse_rows(&mut rows);
        arithmetic::round_to_p(6, &rows).iter().zip(&truth).filter(|(x, y)| x == y).count()
    };
    let first = key.encrypt(6, &a, &mut rng);
    key.insecure_rewind();
    assert_eq!(attack(first, key.encrypt(6, &b, &mut rng)), N, "the attack wins without the guard");
    assert!(attack(key.encrypt(6, &a, &mut rng), key.encrypt(6, &b, &mut rng)) < 20);
}

/// Bytes that must be refused, each with an error of the caller's kind and without a panic.
fn refused<T>(outcome: crate::Result<T>) {
    assert!(matches!(outcome, Err(Error::BadArgument(_))));
}

#[test]
fn decoders_refuse_what_no_encoder_writes() {
    let World { mut rng, key, public } = world();
    let request = key.encrypt(2, &vec![5; N], &mut rng);
    let good = request.to_bytes();
    assert_eq!(good.len(), SeededCiphertext::wire_len(2));
    for length in [0, 1, 8, good.len() - 1, good.len() + 1, 2 * good.len()] {
        let mut bytes = good.clone();
        bytes.resize(length, 0);
        refused(SeededCiphertext::from_bytes(&bytes, 2));
    }
    refused(SeededCiphertext::from_bytes(&good, 3));
    refused(SeededCiphertext::from_bytes(&good, 0));
    refused(SeededCiphertext::from_bytes(&good, 7));
    for (k, bad) in [(0, PRIMES[0]), (N - 1, (1 << 25) - 1), (N, PRIMES[1]), (2 * N - 1, PRIMES[1] + 1)] {
        let mut wrong = request.clone();
        wrong.c0[k] = bad;
        refused(SeededCiphertext::from_bytes(&wrong.to_bytes(), 2));
    }
    let mut wrong = request.clone();
    wrong.c0[N] = PRIMES[1] - 1;
    assert!(SeededCiphertext::from_bytes(&wrong.to_bytes(), 2).is_ok());

    let bytes = public.to_bytes();
    assert_eq!(PublicKey::from_bytes(&bytes, &[9; 32]).unwrap().to_bytes(), bytes);
    refused(PublicKey::from_bytes(&bytes[1..], &[9; 32]));
    let mut wrong = bytes.clone();
    wrong[32..36].fill(0xff);
    refused(PublicKey::from_bytes(&wrong, &[9; 32]));

    let automorphisms = [Automorphism::new(1, false)];
    let bytes = key.rotation_keys(&automorphisms, &mut rng).to_bytes();
    assert_eq!(RotationKeys::from_bytes(&bytes, &automorphisms).unwrap().to_bytes(), bytes);
    refused(RotationKeys::from_bytes(&bytes[1..], &automorphisms));
    refused(RotationKeys::from_bytes(&bytes, &[]));
    let mut wrong = bytes.clone();
    let end = wrong.len() - 4;
    wrong[end..].fill(0xff);
    refused(RotationKeys::from_bytes(&wrong, &automorphisms));

    let shape = Shape { level: 3, products: 1, nonzero: 1, magnitude: 1.0, rotations: 0 };
    let plan = AnswerPlan::coefficients(&shape).unwrap();
    let zero = public.encrypt_zero(3, &mut rng);
    let (answer, _) = finish_coefficients(Ciphertext::zero(3), zero, &plan, &[4, 5, 6], &mut rng).unwrap();
    let bytes = answer.to_bytes(&plan);
    assert_eq!(bytes.len(), plan.answer_len(3));
    assert!(Answer::from_bytes(&bytes, &plan, 3).unwrap() == answer);
    refused(Answer::from_bytes(&bytes, &plan, 4));
    refused(Answer::from_bytes(&bytes[1..], &plan, 3));
    let mut wrong = bytes.clone();
    *wrong.last_mut().unwrap() |= 0x80;
    refused(Answer::from_bytes(&wrong, &plan, 3));
    refused(key.open_slots(&answer, &plan));
    refused(key.open_coefficients(&answer, &plan, &[1, 2]));
}

#[test]
fn random_bytes_are_read_or_refused_but_never_panic() {
    let World { mut rng, key, .. } = world();
    let good = key.encrypt(2, &vec![P - 1; N], &mut rng).to_bytes();
    for _ in 0..300 {
        let mut bytes = good.clone();
        let at = (rng.next_u64() % bytes.len() as u64) as usize;
        bytes[at] ^= 1 << (rng.next_u64() % 8);
        if let Ok(read) = SeededCiphertext::from_bytes(&bytes, 2) {
            assert_eq!(read.to_bytes(), bytes, "one encoding for one value");
            read.expand(&PublicSeed([0; 32]));
        }
    }
}
