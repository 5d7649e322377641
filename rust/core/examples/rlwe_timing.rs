//! Times of the encryption layer on one core: `cargo run --release --example rlwe_timing`.

use cloister_core::field;
use cloister_core::random::SecretRng;
use cloister_core::rlwe::params::Shape;
use cloister_core::rlwe::{
    AnswerPlan, Automorphism, Ciphertext, N, SecretKey, finish_coefficients, finish_slots, ntt, slots,
};
use std::time::Instant;

/// Prints the quickest of repeated runs of about a tenth of a second in all: other work on the machine only adds.
fn time<T>(name: &str, per: usize, mut body: impl FnMut() -> T) {
    let mut seconds = Vec::new();
    let begin = Instant::now();
    while seconds.len() < 5 || (begin.elapsed().as_secs_f64() < 0.1 && seconds.len() < 2000) {
        let start = Instant::now();
        std::hint::black_box(body());
        seconds.push(start.elapsed().as_secs_f64());
    }
    let best = seconds.into_iter().fold(f64::INFINITY, f64::min);
    println!("{name:<60} {:>12.1} ns", best * 1e9 / per as f64);
}

fn main() {
    println!("instructions: {:?}", ntt::Instructions::best());
    let mut rng = SecretRng::from_os();
    let plain = field::random_vector(&mut rng, N);
    for size in [16, 32, 64, 128, 256, 1024, N] {
        let mut a: Vec<u32> = plain.iter().map(|&x| (x % 32_000_000) as u32).collect();
        let mut b = plain.clone();
        time(&format!("forward, 25 bits, size {size}, a polynomial"), N / size, || ntt::forward(0, size, &mut a));
        time(&format!("inverse, 25 bits, size {size}, a polynomial"), N / size, || ntt::inverse(0, size, &mut a));
        time(&format!("forward, modulo p, size {size}, a polynomial"), N / size, || ntt::forward_p(size, &mut b));
        time(&format!("inverse, modulo p, size {size}, a polynomial"), N / size, || ntt::inverse_p(size, &mut b));
    }
    let key = SecretKey::generate(&mut rng);
    let public = key.public_key(&[0; 32], &mut rng);
    time("encode slots", 1, || slots::encode(&plain));
    time("decode slots", 1, || slots::decode(&plain));
    time("encrypt at level 6", 1, || key.encrypt(6, &plain, &mut rng));
    let request = key.encrypt(6, &plain, &mut rng);
    let bytes = request.to_bytes();
    time("write a request", 1, || request.to_bytes());
    time("read a request", 1, || cloister_core::rlwe::SeededCiphertext::from_bytes(&bytes, 6));
    time("expand a request (with a copy)", 1, || request.clone().expand(&public.request_seed()));
    let ciphertext = request.clone().expand(&public.request_seed());
    time("add a plaintext share", 1, || ciphertext.clone().add_plain(&plain));
    time("encryption of zero at level 6", 1, || public.encrypt_zero(6, &mut rng));
    time("decrypt at level 6", 1, || key.decrypt(&ciphertext));
    let automorphism = Automorphism::new(1, false);
    let keys = key.rotation_keys(&[automorphism], &mut rng);
    time("rotation at level 6", 1, || keys.apply(&ciphertext, automorphism));
    let shape = Shape { level: 6, products: 512, nonzero: 256, magnitude: field::P as f64 / 2.0, rotations: 6 };
    let plan = AnswerPlan::slots(&shape).expect("this shape fits");
    let mut finish = || {
        let zero = public.encrypt_zero(6, &mut rng);
        finish_slots(&mut Ciphertext::zero(6), zero, &plan, &mut rng).expect("the plan is for slots")
    };
    let (answer, _) = finish();
    time("an encryption of zero, and finish an answer in slots", 1, finish);
    println!("{} bytes a request, {} bytes an answer, {plan:?}", bytes.len(), plan.answer_len(N));
    time("open an answer in slots", 1, || key.open_slots(&answer, &plan));
    time("write an answer", 1, || answer.to_bytes(&plan));
    let wanted: Vec<u32> = (0..N as u32).step_by(8).collect();
    let shape = Shape { level: 3, products: 256, nonzero: N, magnitude: 32768.0, rotations: 0 };
    let plan = AnswerPlan::coefficients(&shape).expect("this shape fits");
    let mut finish = || {
        let zero = public.encrypt_zero(3, &mut rng);
        finish_coefficients(Ciphertext::zero(3), zero, &plan, &wanted, &mut rng).expect("the plan is for coefficients")
    };
    let (answer, _) = finish();
    time("zero and finish, 1024 coefficients at level 3", 1, finish);
    time("open an answer of 1024 coefficients at level 3", 1, || key.open_coefficients(&answer, &plan, &wanted));
}
