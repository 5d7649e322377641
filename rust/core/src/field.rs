//! The field Z_p in which every share lives, and the fixed-point numbers inside it.
//!
//! One prime for everything: p = 2199023190017, the largest below 2^41 with p = 1 mod 16384, so that the ring of the
//! encryption (degree 8192) splits into 8192 slots mod p. A signed value v is v mod p; every value that a protocol
//! step accepts obeys |v| < p/4, which is what makes the wrap of two shares computable with one oblivious transfer.

use crate::error::{Error, Result};
use crate::random::SecretRng;

/// The prime of the shares.
pub const P: u64 = 2_199_023_190_017;
/// Bits of one packed field element on the wire.
pub const P_BITS: usize = 41;
/// Values must stay strictly inside (-VALUE_BOUND, VALUE_BOUND).
pub const VALUE_BOUND: i64 = (P / 4) as i64;

/// a + b mod p, both reduced.
#[inline(always)]
pub fn add(a: u64, b: u64) -> u64 {
    reduce_once(a + b)
}

/// x, or x - p if x is at least p; x below 2^63. By a mask and not by a condition: a compiler turns a condition into a
/// branch where it likes to.
#[inline(always)]
pub(crate) fn reduce_once(x: u64) -> u64 {
    let less = x.wrapping_sub(P);
    less.wrapping_add(P & (less >> 63).wrapping_neg())
}

/// a - b mod p, both reduced.
#[inline(always)]
pub fn sub(a: u64, b: u64) -> u64 {
    let d = a.wrapping_sub(b);
    d.wrapping_add(P & ((d >> 63).wrapping_neg()))
}

/// -a mod p.
#[inline(always)]
pub fn neg(a: u64) -> u64 {
    sub(0, a)
}

/// a * b mod p, by a fixed multiply-and-shift (Barrett), never by a division: the time does not depend on the values.
#[inline(always)]
pub fn mul(a: u64, b: u64) -> u64 {
    // 2^82 <= p^2 < 2^82 so the quotient estimate with m = floor(2^82 / p) is low by at most 2.
    const M: u128 = (1u128 << 82) / P as u128;
    let x = a as u128 * b as u128;
    let q = ((x >> 40) * M) >> 42;
    let r = (x - q * P as u128) as u64;
    reduce_once(reduce_once(reduce_once(r)))
}

/// The field element of a signed value.
#[inline(always)]
pub fn from_signed(v: i64) -> u64 {
    let r = v % P as i64;
    (r + (P as i64 & (r >> 63))) as u64
}

/// The signed value of a field element, in [-(p-1)/2, (p-1)/2].
#[inline(always)]
pub fn to_signed(a: u64) -> i64 {
    let above = ((P / 2).wrapping_sub(a) as i64) >> 63;
    a as i64 - (P as i64 & above)
}

/// n uniform field elements, by rejection on 41 bits.
pub fn random_vector(rng: &mut SecretRng, n: usize) -> Vec<u64> {
    (0..n)
        .map(|_| {
            loop {
                let x = rng.next_u64() & ((1 << P_BITS) - 1);
                if x < P {
                    return x;
                }
            }
        })
        .collect()
}

/// Packs field elements into 41 bits each, little endian, the last byte padded with zeros.
pub fn pack(values: &[u64]) -> Vec<u8> {
    pack_bits(values, P_BITS)
}

/// The inverse of [`pack`]; refuses a wrong length, a value >= p and non-zero padding.
pub fn unpack(bytes: &[u8], n: usize) -> Result<Vec<u64>> {
    let values = unpack_bits(bytes, n, P_BITS)?;
    if values.iter().any(|&v| v >= P) {
        return Err(Error::BadArgument("a packed field element is not below p".into()));
    }
    Ok(values)
}

/// Bytes of n packed values of `bits` bits.
pub const fn packed_len(n: usize, bits: usize) -> usize {
    (n * bits).div_ceil(8)
}

/// Packs the low `bits` bits (1 to 57) of each value.
pub fn pack_bits(values: &[u64], bits: usize) -> Vec<u8> {
    debug_assert!((1..=57).contains(&bits));
    let mut out = Vec::with_capacity(packed_len(values.len(), bits) + 8);
    let (mut acc, mut have) = (0u128, 0usize);
    for &v in values {
        acc |= ((v & ((1 << bits) - 1)) as u128) << have;
        have += bits;
        while have >= 8 {
            out.push(acc as u8);
            acc >>= 8;
            have -= 8;
        }
    }
    if have > 0 {
        out.push(acc as u8);
    }
    out
}

/// The inverse of [`pack_bits`].
pub fn unpack_bits(bytes: &[u8], n: usize, bits: usize) -> Result<Vec<u64>> {
    if bytes.len() != packed_len(n, bits) {
        return Err(Error::BadArgument(format!("{} bytes where {} were expected", bytes.len(), packed_len(n, bits))));
    }
    // Before memory is taken: bad bytes must not cost what good ones do.
    let padding = bytes.len() * 8 - n * bits;
    if bytes.last().is_some_and(|&last| padding > 0 && last >> (8 - padding) != 0) {
        return Err(Error::BadArgument("the padding of a packed vector is not zero".into()));
    }
    let mut out = Vec::with_capacity(n);
    let (mut acc, mut have, mut at) = (0u128, 0usize, 0usize);
    for _ in 0..n {
        while have < bits {
            acc |= (bytes[at] as u128) << have;
            at += 1;
            have += 8;
        }
        out.push((acc as u64) & ((1 << bits) - 1));
        acc >>= bits;
        have -= bits;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiplication_is_the_product_of_integers() {
        let mut rng = SecretRng::from_os();
        let edge = [0, 1, 2, P - 1, P - 2, P / 2, P / 2 + 1, 1 << 40];
        for &a in &edge {
            for &b in &edge {
                assert_eq!(mul(a, b) as u128, a as u128 * b as u128 % P as u128);
            }
        }
        let (a, b) = (random_vector(&mut rng, 10_000), random_vector(&mut rng, 10_000));
        for (&a, &b) in a.iter().zip(&b) {
            assert_eq!(mul(a, b) as u128, a as u128 * b as u128 % P as u128);
            assert_eq!(add(a, sub(b, a)), b);
        }
    }

    #[test]
    fn packing_is_exact_and_refuses_what_it_would_not_write() {
        let mut rng = SecretRng::from_os();
        for n in [0, 1, 7, 8, 9, 1000] {
            let v = random_vector(&mut rng, n);
            assert_eq!(unpack(&pack(&v), n).unwrap(), v);
        }
        assert!(unpack(&pack_bits(&[P], P_BITS), 1).is_err());
        assert!(unpack(&[0; 5], 1).is_err());
        assert!(unpack(&[0, 0, 0, 0, 0, 0x80], 1).is_err());
    }
}
