//! Requests for random plaintexts, without the 41 bits of each coefficient that a random plaintext makes superfluous.
//!
//! An encryption (c0, c1) of a uniform m is turned into one of m' = m - d, d = round(p c0 / q), by subtracting
//! round(q d / p) from c0: what is left of c0 is at most q / 2p in size and fits 109 bits instead of 150. The server could compute
//! d from the long form, in which m is as hidden as the scheme hides anything, so m' is uniform in its eyes too. Costs one
//! more rounding of 1/2, for which the noise bound has room. Everything here but m is public: it travels, or might.

use crate::error::{Error, Result};
use crate::field::{self, P, pack_bits, packed_len, unpack_bits};
use crate::random::PublicSeed;
use crate::rlwe::{Ciphertext, LEVELS, N, PRIMES, SeededCiphertext, ntt};
use std::sync::OnceLock;

/// Bits of one short coefficient, and of its two halves on the wire.
const BITS: usize = 109;
const LOW: usize = 55;
const HIGH: usize = BITS - LOW;
/// Primes whose product, 125 bits, determines a short coefficient.
const ENOUGH: usize = 5;

/// Bytes of one short request.
pub(super) const WIRE_LEN: usize = 8 + packed_len(N, LOW) + packed_len(N, HIGH);

struct Table {
    q_mod_p: u64,
    /// For each prime: (q / q_i)^-1 modulo it.
    lift: [u64; LEVELS],
    /// 1 / p modulo it.
    p_inverse: [u64; LEVELS],
    /// For the first five: (their product / q_i)^-1 modulo it, and that quotient.
    short_lift: [u64; ENOUGH],
    cofactor: [u128; ENOUGH],
    /// The product of the first five.
    short: u128,
}

fn power(base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let (mut out, mut square) = (1, base % modulus);
    while exponent > 0 {
        if exponent & 1 == 1 {
            out = out * square % modulus;
        }
        square = square * square % modulus;
        exponent >>= 1;
    }
    out
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let others = |among: &[u32], i: usize, q: u64| {
            among.iter().enumerate().filter(|&(j, _)| j != i).fold(1, |a, (_, &x)| a * (u64::from(x) % q) % q)
        };
        let inverse = |x: u64, q: u64| power(x, q - 2, q);
        let q = |i: usize| u64::from(PRIMES[i]);
        let short: u128 = PRIMES[..ENOUGH].iter().map(|&q| u128::from(q)).product();
        Table {
            q_mod_p: PRIMES.iter().fold(1, |a, &q| field::mul(a, u64::from(q))),
            lift: std::array::from_fn(|i| inverse(others(&PRIMES, i, q(i)), q(i))),
            p_inverse: std::array::from_fn(|i| inverse(P % q(i), q(i))),
            short_lift: std::array::from_fn(|i| inverse(others(&PRIMES[..ENOUGH], i, q(i)), q(i))),
            cofactor: std::array::from_fn(|i| short / u128::from(q(i))),
            short,
        }
    })
}

/// Shortens an encryption of the uniform polynomial `plain` at the highest level, and changes `plain` into what it now encrypts.
pub(super) fn shorten(request: SeededCiphertext, plain: &mut [u64]) -> Vec<u8> {
    let table = table();
    let mut rows = request.c0;
    rows.chunks_exact_mut(N).enumerate().for_each(|(prime, row)| ntt::inverse(prime, N, row));
    let (mut low, mut high) = (Vec::with_capacity(N), Vec::with_capacity(N));
    for (k, plain) in plain.iter_mut().enumerate() {
        let c: [u64; LEVELS] = std::array::from_fn(|i| u64::from(rows[i * N + k]));
        let (mut whole, mut part) = (0u64, 0f64);
        for i in 0..LEVELS {
            let q = u64::from(PRIMES[i]);
            let y = c[i] * table.lift[i] % q;
            whole += y * (P / q);
            part += (y * (P % q)) as f64 / q as f64;
        }
        let d = (whole + part.round() as u64) % P;
        *plain = field::sub(*plain, d);
        // round(q d / p) = (q d - r) / p with r the centred residue of q d modulo p: -r / p modulo each prime.
        let r = field::to_signed(field::mul(d, table.q_mod_p));
        let (mut value, mut turns) = (0u128, 0f64);
        for i in 0..ENOUGH {
            let q = u64::from(PRIMES[i]);
            let short = (c[i] + r.rem_euclid(q as i64) as u64 * table.p_inverse[i]) % q;
            let y = short * table.short_lift[i] % q;
            value = value.wrapping_add(u128::from(y).wrapping_mul(table.cofactor[i]));
            turns += y as f64 / q as f64;
        }
        let value = value.wrapping_sub((turns.round() as u128).wrapping_mul(table.short));
        let value = value.wrapping_add(1 << (BITS - 1));
        debug_assert!(value >> BITS == 0, "a short coefficient is at most q / 2p in size");
        low.push(value as u64 & ((1 << LOW) - 1));
        high.push((value >> LOW) as u64);
    }
    let mut out = request.index.to_le_bytes().to_vec();
    out.extend(pack_bits(&low, LOW));
    out.extend(pack_bits(&high, HIGH));
    out
}

/// The whole ciphertext of a short request; any bytes of the right length and padding are one.
pub(super) fn expand(bytes: &[u8], seed: &PublicSeed) -> Result<Ciphertext> {
    if bytes.len() != WIRE_LEN {
        return Err(Error::BadArgument(format!("{} bytes where {WIRE_LEN} were expected", bytes.len())));
    }
    let (index, rest) = bytes.split_at(8);
    let (low, high) = rest.split_at(packed_len(N, LOW));
    let (low, high) = (unpack_bits(low, N, LOW)?, unpack_bits(high, N, HIGH)?);
    let mut c0 = vec![0u32; LEVELS * N];
    for (prime, row) in c0.chunks_exact_mut(N).enumerate() {
        let q = u64::from(PRIMES[prime]);
        let (place, centre) = (power(2, LOW as u64, q), power(2, BITS as u64 - 1, q));
        for ((c, &low), &high) in row.iter_mut().zip(&low).zip(&high) {
            *c = ((low + high % q * place + (q - centre)) % q) as u32;
        }
        ntt::forward(prime, N, row);
    }
    let index = u64::from_le_bytes(index.try_into().expect("8 bytes"));
    Ok(SeededCiphertext { level: LEVELS, index, c0 }.expand(seed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;
    use crate::rlwe::SecretKey;

    #[test]
    fn a_short_request_decrypts_to_the_changed_plaintext() {
        let mut rng = SecretRng::from_os();
        let key = SecretKey::generate(&mut rng);
        for _ in 0..3 {
            let mut plain = field::random_vector(&mut rng, N);
            let before = plain.clone();
            let bytes = shorten(key.encrypt(LEVELS, &plain, &mut rng), &mut plain);
            assert_eq!(bytes.len(), WIRE_LEN);
            assert!(plain.iter().zip(&before).filter(|(a, b)| a == b).count() < 3);
            assert_eq!(key.decrypt(&expand(&bytes, &key.request_seed()).unwrap()), plain);
        }
    }

    #[test]
    fn what_is_no_short_request_is_refused() {
        let seed = PublicSeed([1; 32]);
        assert!(expand(&vec![0xff; WIRE_LEN], &seed).is_ok());
        for length in [0, 7, 8, WIRE_LEN - 1, WIRE_LEN + 1] {
            assert!(matches!(expand(&vec![0; length], &seed), Err(Error::BadArgument(_))));
        }
    }
}
