//! Loops over rows of residues. Each is written once, in plain arithmetic on doubles that hold exact integers, and
//! compiled three times; the compiler makes vector instructions of it. No result depends on which version runs,
//! because nothing is rounded but quotients, and a quotient that is off by one is mended.

use crate::field::P;

/// Defines a function and its versions for AVX-512 and AVX2; the best one that the processor has is called.
macro_rules! versions {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) {
            #[inline(always)]
            fn body($($arg: $type),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx512bw,fma")]
                fn avx512($($arg: $type),*) { body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) { body($($arg),*) }
                if may_use(2)
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                {
                    // SAFETY: the instructions were just seen.
                    return unsafe { avx512($($arg),*) };
                }
                if may_use(1) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the instructions were just seen.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

/// Whether the AVX2 (1) or AVX-512 (2) version may run: always, but that tests compare the versions.
#[cfg(not(test))]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
fn may_use(_: u8) -> bool {
    true
}

#[cfg(test)]
thread_local!(static WIDEST: std::cell::Cell<u8> = const { std::cell::Cell::new(2) });

#[cfg(test)]
fn may_use(version: u8) -> bool {
    version <= WIDEST.get()
}

/// 1.5 * 2^52: added and subtracted, it rounds to the nearest integer.
const ROUND: f64 = 6755399441055744.0;
/// 2^52: added to a small non-negative integer it shows the integer in the low bits.
const HIGH: f64 = 4503599627370496.0;

/// An automorphism moves blocks of evaluations of any power of two; this many 32-bit numbers are one AVX-512 register.
pub(super) const BLOCK: usize = 16;

/// The double of an integer below 2^31.
#[inline(always)]
fn double(x: u32) -> f64 {
    f64::from(x as i32)
}

/// An exact integer modulo q, centred: at most q / 2 and one in size. |x| must be below 2^53.
#[inline(always)]
pub(super) fn centred(x: f64, q: f64, reciprocal: f64) -> f64 {
    let quotient = (x * reciprocal + ROUND) - ROUND;
    x - quotient * q
}

/// The canonical residue of a number that [`centred`] gave.
#[inline(always)]
pub(super) fn canonical(r: f64, q: f64) -> u32 {
    let r = r + if r < 0.0 { q } else { 0.0 };
    (r + HIGH).to_bits() as u32
}

versions! {
    /// sum += a, modulo q, canonical.
    fn add(sum: &mut [u32], a: &[u32], q: u32) {
        for (s, &a) in sum.iter_mut().zip(a) {
            let t = *s + a;
            *s = t.min(t.wrapping_sub(q));
        }
    }
}

versions! {
    /// sum = a - sum, modulo q, canonical.
    fn subtract_from(sum: &mut [u32], a: &[u32], q: u32) {
        for (s, &a) in sum.iter_mut().zip(a) {
            let t = a.wrapping_sub(*s);
            *s = t.min(t.wrapping_add(q));
        }
    }
}

versions! {
    /// sum += a * b, modulo q, canonical.
    fn add_product(sum: &mut [u32], a: &[u32], b: &[u32], q: u32) {
        let (q, reciprocal) = (f64::from(q), 1.0 / f64::from(q));
        for ((s, &a), &b) in sum.iter_mut().zip(a).zip(b) {
            *s = canonical(centred(double(a) * double(b) + double(*s), q, reciprocal), q);
        }
    }
}

versions! {
    /// For k = 0 and 1: sums\[k\] += the sum of row 0 times row 1 + k over at most six triples of rows, modulo q, canonical:
    /// six products of 25-bit numbers stay below 2^53.
    fn add_dots(sums: [&mut [u32]; 2], triples: &[[&[u32]; 3]], q: u32) {
        debug_assert!(triples.len() <= 6);
        const LANES: usize = 32;
        let (q, reciprocal) = (f64::from(q), 1.0 / f64::from(q));
        let [first, second] = sums;
        for (k, (first, second)) in
            first.as_chunks_mut::<LANES>().0.iter_mut().zip(second.as_chunks_mut::<LANES>().0).enumerate()
        {
            let mut totals = [[0f64; LANES]; 2];
            let part = |row: &[u32]| -> [f64; LANES] {
                let row = &row.as_chunks::<LANES>().0[k];
                std::array::from_fn(|lane| double(row[lane]))
            };
            for [x, y, z] in triples {
                let (x, y, z) = (part(x), part(y), part(z));
                for lane in 0..LANES {
                    totals[0][lane] += x[lane] * y[lane];
                    totals[1][lane] += x[lane] * z[lane];
                }
            }
            for (sum, total) in [first, second].into_iter().zip(&totals) {
                for (s, &t) in sum.iter_mut().zip(total) {
                    *s = canonical(centred(centred(t, q, reciprocal) + double(*s), q, reciprocal), q);
                }
            }
        }
    }
}

versions! {
    /// out\[k\] = from\[permutation\[k\]\], where the permutation moves whole blocks of [`BLOCK`] values and permutes within
    /// them.
    fn permute(out: &mut [u32], from: &[u32], permutation: &[u32]) {
        let (from, _) = from.as_chunks::<BLOCK>();
        for (out, at) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(permutation.as_chunks::<BLOCK>().0) {
            let from = &from[at[0] as usize / BLOCK];
            *out = std::array::from_fn(|k| from[at[k] as usize % BLOCK]);
        }
    }
}

versions! {
    /// Residues as numbers around zero.
    fn centre(out: &mut [i32], residues: &[u32], q: u32) {
        let half = (q / 2) as i32;
        for (y, &x) in out.iter_mut().zip(residues) {
            let x = x as i32;
            *y = if x > half { x - q as i32 } else { x };
        }
    }
}

versions! {
    /// The residues modulo q of w times exact integers of up to 2^52; w is centred.
    fn scale_row(out: &mut [u32], x: &[f64], w: f64, q: u32) {
        let (q, reciprocal) = (f64::from(q), 1.0 / f64::from(q));
        for (o, &x) in out.iter_mut().zip(x) {
            *o = canonical(centred(centred(x, q, reciprocal) * w, q, reciprocal), q);
        }
    }
}

versions! {
    /// m * w modulo p, exactly centred, for field elements m. The quotient comes from doubles and may be off by one;
    /// the rest, taken modulo 2^64, is exact.
    fn scale_p(out: &mut [f64], m: &[u64], w: u64) {
        const HALF: i64 = (P / 2) as i64;
        let share = w as f64 / P as f64;
        for (o, &m) in out.iter_mut().zip(m) {
            let quotient = (m as i64 as f64 * share + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
            let r = m.wrapping_mul(w).wrapping_sub(quotient.wrapping_mul(P)) as i64;
            let r = r - if r > HALF { P as i64 } else { 0 };
            let r = r + if r < -HALF { P as i64 } else { 0 };
            *o = r as f64;
        }
    }
}

versions! {
    /// The residues modulo q of small signed numbers.
    fn small_row(out: &mut [u32], small: &[i8], q: u32) {
        for (o, &x) in out.iter_mut().zip(small) {
            let x = i32::from(x) as u32;
            *o = x.min(x.wrapping_add(q));
        }
    }
}

versions! {
    /// The number of ones in bits 0 to 20 of each word minus that in bits 21 to 41.
    fn coins(out: &mut [i8], words: &[u64]) {
        const MASK: u64 = (1 << 21) - 1;
        for (o, &word) in out.iter_mut().zip(words) {
            *o = (word & MASK).count_ones() as i8 - (word >> 21 & MASK).count_ones() as i8;
        }
    }
}

versions! {
    /// For y = x * lift modulo q: wholes += y * whole, parts += y * part. `whole` is below 2^32.
    fn add_scaled(wholes: &mut [u64], parts: &mut [f64], x: &[u32], lift: f64, whole: u32, part: f64, q: u32) {
        let (q, reciprocal) = (f64::from(q), 1.0 / f64::from(q));
        for ((w, f), &x) in wholes.iter_mut().zip(parts.iter_mut()).zip(x) {
            let y = canonical(centred(double(x) * lift, q, reciprocal), q);
            *w = w.wrapping_add(u64::from(y) * u64::from(whole));
            *f += double(y) * part;
        }
    }
}

versions! {
    /// out += plus and the sum of limb\[i\] * weight\[i\], modulo q. Limbs are below 2^26, in five rows; weights are
    /// centred.
    fn add_limbs(out: &mut [u32], limbs: &[f64], weights: [f64; 5], plus: f64, q: u32) {
        let (q, reciprocal) = (f64::from(q), 1.0 / f64::from(q));
        let n = out.len();
        let (l0, rest) = limbs.split_at(n);
        let (l1, rest) = rest.split_at(n);
        let (l2, rest) = rest.split_at(n);
        let (l3, l4) = rest.split_at(n);
        for (k, o) in out.iter_mut().enumerate() {
            let wide = l0[k] * weights[0] + l1[k] * weights[1] + l2[k] * weights[2] + l3[k] * weights[3] + l4[k] * weights[4];
            *o = canonical(centred(wide + (double(*o) + plus), q, reciprocal), q);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::params::{N, PRIMES};
    use super::super::slots::Automorphism;
    use super::*;
    use crate::random::SecretRng;

    /// Residues with the extreme ones among them.
    fn residues(rng: &mut SecretRng, n: usize, q: u32) -> Vec<u32> {
        (0..n)
            .map(|_| match rng.next_u64() % 8 {
                0 => q - 1,
                1 => q / 2,
                2 => q / 2 + 1,
                3 => 0,
                _ => (rng.next_u64() % u64::from(q)) as u32,
            })
            .collect()
    }

    #[test]
    fn every_version_of_every_loop_agrees_with_plain_integers() {
        for widest in 0..=2 {
            WIDEST.set(widest);
            loops_agree();
            loops_over_secrets_agree();
        }
    }

    fn loops_over_secrets_agree() {
        let mut rng = SecretRng::from_os();
        let mut m = vec![0, 1, P / 2, P / 2 + 1, P - 1];
        m.extend(crate::field::random_vector(&mut rng, 1000));
        for w in [1, P / 2, P / 2 + 1, P - 1, rng.next_u64() % P] {
            let mut out = vec![0f64; m.len()];
            scale_p(&mut out, &m, w);
            for (&r, &m) in out.iter().zip(&m) {
                assert_eq!(r as i64, crate::field::to_signed(crate::field::mul(m, w)));
            }
        }
        let words: Vec<u64> = (0..1000).map(|_| rng.next_u64()).collect();
        let mut small = vec![0i8; 1000];
        coins(&mut small, &words);
        for (&x, &word) in small.iter().zip(&words) {
            let bit = |k: u32| (word >> k & 1) as i8;
            assert_eq!(x, (0..21).map(bit).sum::<i8>() - (21..42).map(bit).sum::<i8>());
        }
        let mut row = vec![0; 1000];
        small_row(&mut row, &small, PRIMES[0]);
        assert!(row.iter().zip(&small).all(|(&r, &x)| i64::from(r) == i64::from(x).rem_euclid(PRIMES[0].into())));
        let (q, lift) = (PRIMES[1], 12_345_678u32);
        let x = residues(&mut rng, 1000, q);
        let (mut wholes, mut parts) = (vec![1u64; 1000], vec![0f64; 1000]);
        add_scaled(&mut wholes, &mut parts, &x, f64::from(lift), 1 << 31, 0.5, q);
        for ((&whole, &part), &x) in wholes.iter().zip(&parts).zip(&x) {
            let y = u64::from(x) * u64::from(lift) % u64::from(q);
            assert!(whole == 1 + (y << 31) && part == y as f64 / 2.0);
        }
    }

    fn loops_agree() {
        let mut rng = SecretRng::from_os();
        let n = 1024;
        for q in PRIMES {
            let wide = u128::from(q);
            let [a, b, s]: [Vec<u32>; 3] = std::array::from_fn(|_| residues(&mut rng, n, q));
            let check = |name: &str, got: &[u32], expected: &dyn Fn(usize) -> u128| {
                (0..n).for_each(|k| assert_eq!(u128::from(got[k]), expected(k) % wide, "{name}"));
            };
            let (x, y, z) = (|k: usize| u128::from(a[k]), |k: usize| u128::from(b[k]), |k: usize| u128::from(s[k]));
            let mut out = s.clone();
            add(&mut out, &a, q);
            check("add", &out, &|k| x(k) + z(k));
            out.clone_from(&s);
            subtract_from(&mut out, &a, q);
            check("subtract_from", &out, &|k| x(k) + wide - z(k));
            out.clone_from(&s);
            add_product(&mut out, &a, &b, q);
            check("add_product", &out, &|k| x(k) * y(k) + z(k));
            out.clone_from(&s);
            let mut other = s.clone();
            add_dots([&mut out, &mut other], &[[&a[..], &b, &s]; 6], q);
            check("add_dots", &out, &|k| 6 * x(k) * y(k) + z(k));
            check("add_dots", &other, &|k| 6 * x(k) * z(k) + z(k));
            let mut signed = vec![0; n];
            centre(&mut signed, &a, q);
            for (&got, &x) in signed.iter().zip(&a) {
                assert!(got.rem_euclid(q as i32) as u32 == x && got.unsigned_abs() <= q / 2);
            }
            for k in [5, 16383, 12345] {
                let permutation = Automorphism::from_exponent(k).unwrap().permutation();
                let from = residues(&mut rng, N, q);
                let mut out = vec![0; N];
                permute(&mut out, &from, &permutation);
                assert!(out.iter().zip(&permutation).all(|(&x, &at)| x == from[at as usize]));
            }
            let large: Vec<f64> = (0..n).map(|_| (rng.next_u64() >> 12) as f64).collect();
            scale_row(&mut out, &large, f64::from(q / 2), q);
            check("scale_row", &out, &|k| large[k] as u128 * (wide / 2));
            let limbs: Vec<f64> = (0..5 * n).map(|_| (rng.next_u64() >> 38) as f64).collect();
            out.clone_from(&s);
            add_limbs(&mut out, &limbs, [f64::from(q / 2); 5], 3.0, q);
            check("add_limbs", &out, &|k| {
                (0..5).map(|i| limbs[i * n + k] as u128).sum::<u128>() * (wide / 2) + z(k) + 3
            });
        }
    }
}
