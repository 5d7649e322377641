//! Negacyclic number-theoretic transforms of every power-of-two size from 2 to 8192, modulo the primes of the
//! ciphertexts and modulo p.
//!
//! A transform of size n evaluates a polynomial at the odd powers of a primitive 2n-th root, in bit-reversed order:
//! index i holds the value at exponent 2 brv(i) + 1. The root of size n is the root of size 8192 raised to 8192 / n,
//! so one table serves every size, and a polynomial w(X^t) has, at size N, the small transform of w with
//! every value repeated t times: the points on which X^t takes one value are a contiguous block.

#[cfg(target_arch = "x86_64")]
use super::kernels::{self, Tables};
use super::params::{LEVELS, N, PRIMES};
use crate::field;
use std::sync::OnceLock;

fn power(mut base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let mut out = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            out = (out as u128 * base as u128 % modulus as u128) as u64;
        }
        base = (base as u128 * base as u128 % modulus as u128) as u64;
        exponent >>= 1;
    }
    out
}

/// The smallest-generator primitive 2N-th root of unity of a prime that is 1 modulo 2N.
pub(super) fn root(modulus: u64) -> u64 {
    (2..)
        .map(|g| power(g, (modulus - 1) / (2 * N as u64), modulus))
        .find(|&psi| power(psi, N as u64, modulus) == modulus - 1)
        .expect("a prime that is 1 modulo 2N has a 2N-th root of unity")
}

/// i with its low `bits` bits reversed.
pub fn bit_reverse(i: usize, bits: u32) -> usize {
    if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) }
}

/// psi^brv(i) for i < N, and the inverses of the same.
fn tables(modulus: u64) -> (Vec<u64>, Vec<u64>) {
    let psi = root(modulus);
    let mut powers = vec![1u64; 2 * N];
    for i in 1..2 * N {
        powers[i] = (powers[i - 1] as u128 * psi as u128 % modulus as u128) as u64;
    }
    let bits = N.trailing_zeros();
    let forward = (0..N).map(|i| powers[bit_reverse(i, bits)]).collect();
    let inverse = (0..N).map(|i| powers[(2 * N - bit_reverse(i, bits)) % (2 * N)]).collect();
    (forward, inverse)
}

/// A multiplier with its quotient by the modulus, floor(w 2^64 / modulus) (Shoup).
#[derive(Clone, Copy)]
struct Twiddle {
    value: u64,
    quotient: u64,
}

fn twiddle(value: u64, modulus: u64) -> Twiddle {
    Twiddle { value, quotient: (((value as u128) << 64) / modulus as u128) as u64 }
}

/// The transforms of one modulus, in plain integers: the slow, obvious twin of the vector kernels.
struct Plain {
    modulus: u64,
    forward: Vec<Twiddle>,
    inverse: Vec<Twiddle>,
}

impl Plain {
    fn new(modulus: u64) -> Self {
        let (forward, inverse) = tables(modulus);
        let make = |v: Vec<u64>| v.into_iter().map(|w| twiddle(w, modulus)).collect();
        Self { modulus, forward: make(forward), inverse: make(inverse) }
    }

    #[inline(always)]
    fn mul(&self, a: u64, w: Twiddle) -> u64 {
        let quotient = ((a as u128 * w.quotient as u128) >> 64) as u64;
        let r = a.wrapping_mul(w.value).wrapping_sub(quotient.wrapping_mul(self.modulus));
        self.once(r)
    }

    /// Subtracts the modulus once from a value below twice the modulus.
    #[inline(always)]
    fn once(&self, a: u64) -> u64 {
        let t = a.wrapping_sub(self.modulus);
        t.wrapping_add(self.modulus & (t >> 63).wrapping_neg())
    }

    fn forward(&self, a: &mut [u64]) {
        let n = a.len();
        let mut groups = 1;
        while groups < n {
            let half = n / (2 * groups);
            for (g, chunk) in a.chunks_exact_mut(2 * half).enumerate() {
                let w = self.forward[groups + g];
                let (low, high) = chunk.split_at_mut(half);
                for (x, y) in low.iter_mut().zip(high) {
                    let t = self.mul(*y, w);
                    (*x, *y) = (self.once(*x + t), self.once(*x + self.modulus - t));
                }
            }
            groups *= 2;
        }
    }

    fn inverse(&self, a: &mut [u64]) {
        let n = a.len();
        let mut groups = n / 2;
        while groups >= 1 {
            let half = n / (2 * groups);
            for (g, chunk) in a.chunks_exact_mut(2 * half).enumerate() {
                let w = self.inverse[groups + g];
                let (low, high) = chunk.split_at_mut(half);
                for (x, y) in low.iter_mut().zip(high) {
                    let (u, v) = (*x, *y);
                    *x = self.once(u + v);
                    *y = self.mul(self.once(u + self.modulus - v), w);
                }
            }
            groups /= 2;
        }
        let scale = twiddle(power(n as u64, self.modulus - 2, self.modulus), self.modulus);
        for x in a {
            *x = self.mul(*x, scale);
        }
    }
}

/// The vector kernels' constants.
#[cfg(target_arch = "x86_64")]
fn vector_tables(modulus: u64) -> Tables {
    let centre = |x: u64| if x > modulus / 2 { x as f64 - modulus as f64 } else { x as f64 };
    let (forward, inverse) = tables(modulus);
    let half = modulus.div_ceil(2);
    let with_quotients = |table: Vec<u64>| {
        let values: Vec<f64> = table.into_iter().map(centre).collect();
        let quotients = values.iter().map(|w| w / modulus as f64).collect();
        [values, quotients]
    };
    Tables {
        modulus: modulus as f64,
        forward: with_quotients(forward),
        inverse: with_quotients(inverse),
        halves: (0..=u64::from(N.trailing_zeros())).map(|k| centre(power(half, k, modulus))).collect(),
    }
}

/// Instructions that a transform may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instructions {
    /// Eight doubles at once.
    Avx512,
    /// Four doubles at once.
    Avx2,
    /// Plain integers.
    Portable,
}

impl Instructions {
    /// The best that this processor has.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// A type of residue and its moduli: u32 for the primes of ciphertexts, u64 for p.
trait Ring: Sized + Copy {
    fn plain(prime: usize) -> &'static Plain;
    fn plainly(plain: &Plain, forwards: bool, values: &mut [Self]);
    #[cfg(target_arch = "x86_64")]
    fn tables(prime: usize) -> &'static Tables;
}

impl Ring for u32 {
    fn plain(prime: usize) -> &'static Plain {
        static PLAIN: [OnceLock<Plain>; LEVELS] = [const { OnceLock::new() }; LEVELS];
        PLAIN[prime].get_or_init(|| Plain::new(u64::from(PRIMES[prime])))
    }
    fn plainly(plain: &Plain, forwards: bool, values: &mut [Self]) {
        let mut wide: Vec<u64> = values.iter().map(|&x| u64::from(x)).collect();
        u64::plainly(plain, forwards, &mut wide);
        values.iter_mut().zip(&wide).for_each(|(x, &w)| *x = w as u32);
    }
    #[cfg(target_arch = "x86_64")]
    fn tables(prime: usize) -> &'static Tables {
        static TABLES: [OnceLock<Tables>; LEVELS] = [const { OnceLock::new() }; LEVELS];
        TABLES[prime].get_or_init(|| vector_tables(u64::from(PRIMES[prime])))
    }
}

impl Ring for u64 {
    fn plain(_: usize) -> &'static Plain {
        static PLAIN: OnceLock<Plain> = OnceLock::new();
        PLAIN.get_or_init(|| Plain::new(field::P))
    }
    fn plainly(plain: &Plain, forwards: bool, values: &mut [Self]) {
        if forwards { plain.forward(values) } else { plain.inverse(values) }
    }
    #[cfg(target_arch = "x86_64")]
    fn tables(_: usize) -> &'static Tables {
        static TABLES: OnceLock<Tables> = OnceLock::new();
        TABLES.get_or_init(|| vector_tables(field::P))
    }
}

#[cfg(target_arch = "x86_64")]
use super::kernels::Residue;
#[cfg(not(target_arch = "x86_64"))]
trait Residue {}
#[cfg(not(target_arch = "x86_64"))]
impl<T> Residue for T {}

/// Transforms whole polynomials of `size` values with instructions that this processor has.
fn transform<T: Ring + Residue>(how: Instructions, prime: usize, forwards: bool, size: usize, values: &mut [T]) {
    assert!(size.is_power_of_two() && (2..=N).contains(&size), "no transform of size {size}");
    assert!(values.len().is_multiple_of(size), "{} values are not whole polynomials of size {size}", values.len());
    match how {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Instructions::best` saw AVX-512 F and DQ.
        Instructions::Avx512 if size >= 16 => unsafe { kernels::avx512(T::tables(prime), forwards, size, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Instructions::best` saw AVX2 and FMA, or AVX-512, which includes them.
        Instructions::Avx512 | Instructions::Avx2 if size >= 8 => unsafe {
            kernels::avx2(T::tables(prime), forwards, size, values)
        },
        _ => {
            let plain = T::plain(prime);
            values.chunks_exact_mut(size).for_each(|a| T::plainly(plain, forwards, a));
        }
    }
}

/// Evaluates polynomials modulo prime number `prime`, coefficients in place to evaluations. `values` holds whole
/// polynomials of `size` coefficients each, one after another; residues must be canonical and are so again.
pub fn forward(prime: usize, size: usize, values: &mut [u32]) {
    transform(Instructions::best(), prime, true, size, values);
}

/// The evaluations modulo prime number `prime` of one polynomial of N signed coefficients of at most 2^24, canonical.
pub(super) fn forward_signed(prime: usize, from: &[i32], to: &mut [u32]) {
    forward_signed_with(Instructions::best(), prime, from, to);
}

fn forward_signed_with(how: Instructions, prime: usize, from: &[i32], to: &mut [u32]) {
    let from: &[i32; N] = from.try_into().expect("a polynomial has N coefficients");
    let to: &mut [u32; N] = to.try_into().expect("a polynomial has N evaluations");
    match how {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Instructions::best` saw AVX-512 F and DQ.
        Instructions::Avx512 => unsafe { kernels::avx512_signed(u32::tables(prime), from, to) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Instructions::best` saw AVX2 and FMA.
        Instructions::Avx2 => unsafe { kernels::avx2_signed(u32::tables(prime), from, to) },
        _ => {
            let q = PRIMES[prime];
            for (y, &x) in to.iter_mut().zip(from) {
                *y = (x as u32).min((x as u32).wrapping_add(q));
            }
            transform(how, prime, true, N, to);
        }
    }
}

/// The inverse of [`forward`].
pub fn inverse(prime: usize, size: usize, values: &mut [u32]) {
    transform(Instructions::best(), prime, false, size, values);
}

/// [`forward`] modulo p.
pub fn forward_p(size: usize, values: &mut [u64]) {
    transform(Instructions::best(), 0, true, size, values);
}

/// The inverse of [`forward_p`].
pub fn inverse_p(size: usize, values: &mut [u64]) {
    transform(Instructions::best(), 0, false, size, values);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    #[test]
    fn forward_evaluates_at_the_stated_points_and_inverse_undoes_it() {
        let mut rng = SecretRng::from_os();
        for size in (1..=13).map(|b| 1usize << b) {
            for prime in [0, 5] {
                let q = u64::from(PRIMES[prime]);
                let a: Vec<u32> = (0..size).map(|_| (rng.next_u64() % q) as u32).collect();
                let mut values = a.clone();
                forward(prime, size, &mut values);
                let psi = power(root(q), (N / size) as u64, q);
                for i in [0, 1, size / 2, size - 1] {
                    let x = power(psi, 2 * bit_reverse(i, size.trailing_zeros()) as u64 + 1, q);
                    let expected = a.iter().rev().fold(0, |sum, &c| (sum * x + u64::from(c)) % q);
                    assert_eq!(u64::from(values[i]), expected);
                }
                inverse(prime, size, &mut values);
                assert_eq!(values, a);
            }
            let a = field::random_vector(&mut rng, size);
            let mut values = a.clone();
            forward_p(size, &mut values);
            let psi = power(root(field::P), (N / size) as u64, field::P);
            for i in [0, 1, size / 2, size - 1] {
                let x = power(psi, 2 * bit_reverse(i, size.trailing_zeros()) as u64 + 1, field::P);
                let expected = a.iter().rev().fold(0, |sum, &c| field::add(field::mul(sum, x), c));
                assert_eq!(values[i], expected);
            }
            inverse_p(size, &mut values);
            assert_eq!(values, a);
        }
    }

    #[test]
    fn a_polynomial_in_a_power_of_x_transforms_in_repeated_blocks() {
        let mut rng = SecretRng::from_os();
        for repeat in [2, 8, 32, 1024] {
            let small: Vec<u32> = (0..N / repeat).map(|_| (rng.next_u64() % 32_000_000) as u32).collect();
            let mut large = vec![0; N];
            small.iter().enumerate().for_each(|(k, &x)| large[k * repeat] = x);
            let mut values = small.clone();
            forward(2, N / repeat, &mut values);
            forward(2, N, &mut large);
            for (block, &value) in large.chunks_exact(repeat).zip(&values) {
                assert!(block.iter().all(|&x| x == value));
            }
        }
    }

    #[test]
    fn signed_coefficients_transform_like_their_residues() {
        let mut rng = SecretRng::from_os();
        let half = 1i64 << 24;
        for fill in 0..3 {
            let a: Vec<i32> = (0..N)
                .map(|k| match fill {
                    0 => (1 - 2 * (k as i64 & 1)) * half,
                    1 => -half,
                    _ => (rng.next_u64() % (2 * half as u64 + 1)) as i64 - half,
                } as i32)
                .collect();
            for (prime, &q) in PRIMES.iter().enumerate() {
                let mut want: Vec<u32> = a.iter().map(|&x| i64::from(x).rem_euclid(i64::from(q)) as u32).collect();
                transform(Instructions::Portable, prime, true, N, &mut want);
                for &how in kernels_here().iter().chain(&[Instructions::Portable]) {
                    let mut got = vec![0; N];
                    forward_signed_with(how, prime, &a, &mut got);
                    assert!(got == want, "{how:?}, prime {prime}, fill {fill}");
                }
            }
        }
    }

    fn kernels_here() -> &'static [Instructions] {
        match Instructions::best() {
            Instructions::Avx512 => &[Instructions::Avx512, Instructions::Avx2],
            Instructions::Avx2 => &[Instructions::Avx2],
            Instructions::Portable => &[],
        }
    }

    #[test]
    fn every_kernel_computes_the_same_as_the_plain_twin() {
        let mut rng = SecretRng::from_os();
        for &how in kernels_here() {
            for size in (1..=13).map(|b| 1usize << b) {
                let count = 3;
                for fill in 0..4 {
                    let mut draw = |q: u64| match fill {
                        0 => q - 1,
                        1 => q / 2,
                        2 => [0, q - 1, q / 2 + 1][(rng.next_u64() % 3) as usize],
                        _ => rng.next_u64() % q,
                    };
                    for forwards in [true, false] {
                        for (prime, &q) in PRIMES.iter().enumerate() {
                            let a: Vec<u32> = (0..count * size).map(|_| draw(u64::from(q)) as u32).collect();
                            let (mut fast, mut slow) = (a.clone(), a);
                            transform(how, prime, forwards, size, &mut fast);
                            transform(Instructions::Portable, prime, forwards, size, &mut slow);
                            assert!(
                                fast == slow,
                                "{how:?}, size {size}, prime {prime}, forwards {forwards}, fill {fill}"
                            );
                        }
                        let a: Vec<u64> = (0..count * size).map(|_| draw(field::P)).collect();
                        let (mut fast, mut slow) = (a.clone(), a);
                        transform(how, 0, forwards, size, &mut fast);
                        transform(Instructions::Portable, 0, forwards, size, &mut slow);
                        assert!(fast == slow, "{how:?}, size {size}, modulo p, forwards {forwards}, fill {fill}");
                    }
                }
            }
        }
    }
}
