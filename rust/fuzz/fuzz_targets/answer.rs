//! An answer ciphertext of a slot plan, with a few coefficients of the first polynomial.
#![no_main]
use cloister_core::rlwe::params::Shape;
use cloister_core::rlwe::{Answer, AnswerPlan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let shape = Shape { level: 6, products: 4, nonzero: 16, magnitude: 1e12, rotations: 0 };
    let plan = AnswerPlan::slots(&shape).expect("a plan of this shape fits");
    let mut body = vec![0; plan.answer_len(3)];
    let n = bytes.len().min(body.len());
    // From the end, where the padding is.
    let start = body.len() - n;
    body[start..].copy_from_slice(&bytes[..n]);
    for input in [bytes, &body] {
        if let Ok(read) = Answer::from_bytes(input, &plan, 3) {
            assert_eq!(read.to_bytes(&plan), input);
        }
    }
});
