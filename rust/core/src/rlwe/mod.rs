//! Lattice encryption: the ring, its transforms, keys, seeded ciphertexts, and the parameter table.
//!
//! Everything happens in Z_q\[X\]/(X^8192 + 1), q a product of primes just under 2^25 ([`params`]). A polynomial modulo
//! q is one row of 8192 residues for each prime; ciphertexts keep theirs as evaluations ([`ntt`]). A plaintext is a
//! polynomial modulo p, whose evaluations are the [`slots`]. The client holds the [`SecretKey`] and sends
//! [`SeededCiphertext`]s; the server multiplies by its weights, adds an [`EncryptionOfZero`] (there is no way round it:
//! an answer takes one by value) and turns the result into an [`Answer`], which is all that travels back.
//!
//! Decryption tells nobody how much noise there was: no function of this module returns it.

pub mod answer;
mod arithmetic;
mod budget;
mod cipher;
#[cfg(target_arch = "x86_64")]
mod kernels;
mod keys;
#[cfg(target_arch = "x86_64")]
mod lanes;
pub mod ntt;
pub mod params;
pub mod rotate;
mod sample;
pub mod slots;
mod vector;
mod wire;

pub use answer::{Answer, finish_coefficients, finish_slots};
pub use arithmetic::reduce_plain;
pub use budget::HidingBudget;
pub use cipher::{Ciphertext, SeededCiphertext, encode, plain_evaluations};
pub use keys::{EncryptionOfZero, PublicKey, SecretKey};
pub use params::{AnswerPlan, LEVELS, N, PRIMES};
pub use rotate::RotationKeys;
pub use slots::Automorphism;

#[cfg(test)]
mod attacks;
#[cfg(test)]
mod tests;
