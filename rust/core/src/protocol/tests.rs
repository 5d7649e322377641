//! Each step against its plain twin.

use super::*;
use crate::field::{self, P, VALUE_BOUND, to_signed};
use crate::party::Role;
use crate::random::SecretRng;
use crate::testing::{open, run, share};

pub(super) fn edges() -> Vec<i64> {
    let mut v = vec![0, 1, -1, 2, -2, VALUE_BOUND - 1, 1 - VALUE_BOUND, VALUE_BOUND - 2, 2 - VALUE_BOUND];
    for k in 0..39 {
        v.extend([1 << k, -(1 << k), (1 << k) + 1, -(1 << k) - 1, (1 << k) - 1, 1 - (1 << k)]);
    }
    v.retain(|x| x.abs() < VALUE_BOUND);
    v
}

pub(super) fn values(n: usize, bound: i64) -> Vec<i64> {
    let mut rng = SecretRng::from_os();
    (0..n).map(|_| (rng.next_u64() % (2 * bound as u64 - 1)) as i64 - bound + 1).collect()
}

pub(super) fn xored(c: &[u8], s: &[u8]) -> Vec<u8> {
    assert!(c.iter().chain(s).all(|&b| b < 2));
    xor(c, s)
}

#[test]
fn truncation_rounds_down_or_up() {
    for f in [1, 2, 7, 12, 14, 16, 20, 24, 32] {
        let margin = if f > 14 { 1 << f } else { 0 };
        let mut x = edges();
        x.extend(values(2000, VALUE_BOUND));
        x.retain(|v| v.abs() < VALUE_BOUND - margin);
        let (a, b) = share(&x);
        let (c, s) = run(|p| truncate(p, &a, f), |p| truncate(p, &b, f));
        for (got, x) in open(&c.unwrap(), &s.unwrap()).iter().zip(&x) {
            let error = got - (x >> f);
            assert!((0..=1).contains(&error) || (f > 16 && error == -1), "{x} >> {f}: {got}");
        }
    }
}

#[test]
fn rings_and_back() {
    for kappa in [3, 7, 17, 20, 39, 40, 41, 48] {
        let mut x = edges();
        x.extend(values(500, VALUE_BOUND));
        let (a, b) = share(&x);
        let (c, s) = run(|p| to_ring(p, &a, 0, kappa), |p| to_ring(p, &b, 0, kappa));
        let (c, s) = (c.unwrap(), s.unwrap());
        for ((c, s), x) in c.iter().zip(&s).zip(&x) {
            assert_eq!((c + s) & ((1 << kappa) - 1), (*x as u64) & ((1 << kappa) - 1));
        }
        if kappa <= 41 {
            let inside: Vec<usize> =
                (0..x.len()).filter(|&i| -(1i64 << (kappa - 2)) <= x[i] && x[i] < 1i64 << (kappa - 2)).collect();
            let pick = |v: &[u64]| inside.iter().map(|&i| v[i]).collect::<Vec<_>>();
            let (c, s) = (pick(&c), pick(&s));
            let (c, s) = run(|p| from_ring(p, &c, kappa), |p| from_ring(p, &s, kappa));
            let back = open(&c.unwrap(), &s.unwrap());
            assert_eq!(back, inside.iter().map(|&i| x[i]).collect::<Vec<_>>(), "{kappa}");
            // Up to twice as far where nothing is negative.
            let most = (1i64 << (kappa - 1)) - 1;
            let x: Vec<i64> = x.iter().map(|x| x & most).chain([0, most]).filter(|&x| x < VALUE_BOUND).collect();
            let (a, b) = share(&x);
            let (c, s) = run(|p| to_ring(p, &a, 0, kappa), |p| to_ring(p, &b, 0, kappa));
            let (c, s) = (c.unwrap(), s.unwrap());
            let unsigned = super::wrap::from_ring_unsigned;
            let (c, s) = run(|p| unsigned(p, &c, kappa), |p| unsigned(p, &s, kappa));
            assert_eq!(open(&c.unwrap(), &s.unwrap()), x, "{kappa}");
        }
    }
}

#[test]
fn logic_on_every_pair_of_shares() {
    let all: Vec<[u8; 4]> = (0..16u8).map(|i| [i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3]).collect();
    let col = |k: usize| all.iter().map(|r| r[k]).collect::<Vec<_>>();
    let (a0, a1, b0, b1) = (col(0), col(1), col(2), col(3));
    let (c, s) = run(|p| Ok((and(p, &a0, &b0)?, or(p, &a0, &b0)?)), |p| Ok((and(p, &a1, &b1)?, or(p, &a1, &b1)?)));
    let (c, s) = (c.unwrap(), s.unwrap());
    assert_eq!(xored(&c.0, &s.0), all.iter().map(|r| (r[0] ^ r[1]) & (r[2] ^ r[3])).collect::<Vec<_>>());
    assert_eq!(xored(&c.1, &s.1), all.iter().map(|r| (r[0] ^ r[1]) | (r[2] ^ r[3])).collect::<Vec<_>>());
}

pub(super) fn bit_shares(bits: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut rng = SecretRng::from_os();
    let mask: Vec<u8> = bits.iter().map(|_| (rng.next_u64() & 1) as u8).collect();
    (xor(bits, &mask), mask)
}

#[test]
fn bits_become_values_and_select_them() {
    let mut x = edges();
    x.extend(values(1000, VALUE_BOUND));
    let bits: Vec<u8> = (0..x.len()).map(|i| (i % 2) as u8).collect();
    let (b0, b1) = bit_shares(&bits);
    let (x0, x1) = share(&x);
    let body = |b: Vec<u8>, x: Vec<u64>| {
        move |p: &mut Party| {
            let ring: Vec<u64> = x.iter().map(|v| v & 0xff).collect();
            Ok((bits_to_field(p, &b)?, bits_to_ring(p, &b, 7)?, select(p, &b, &x)?, select_ring(p, &b, &ring, 8)?))
        }
    };
    let (c, s) = run(body(b0, x0.clone()), body(b1, x1.clone()));
    let (c, s) = (c.unwrap(), s.unwrap());
    let as_i64: Vec<i64> = bits.iter().map(|&b| b.into()).collect();
    assert_eq!(open(&c.0, &s.0), as_i64);
    assert!(c.1.iter().zip(&s.1).zip(&bits).all(|((c, s), &b)| (c + s) & 127 == u64::from(b)));
    assert_eq!(open(&c.2, &s.2), x.iter().zip(&as_i64).map(|(x, b)| x * b).collect::<Vec<_>>());
    for i in 0..x.len() {
        assert_eq!((c.3[i] + s.3[i]) & 255, ((x0[i] + x1[i]) & 255) * u64::from(bits[i]));
    }
}

#[test]
fn products() {
    let x = values(500, 1 << 19);
    let y = values(500, 1 << 19);
    let ((x0, x1), (y0, y1)) = (share(&x), share(&y));
    let body = |x: Vec<u64>, y: Vec<u64>| {
        move |p: &mut Party| {
            Ok((multiply(p, &x, &y)?, square(p, &x)?, multiply_truncate(p, &x, &y, 12)?, inner_products(p, &x, &y, 2)?))
        }
    };
    let (c, s) = run(body(x0, y0), body(x1, y1));
    let (c, s) = (c.unwrap(), s.unwrap());
    let product: Vec<i64> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
    assert_eq!(open(&c.0, &s.0), product);
    assert_eq!(open(&c.1, &s.1), x.iter().map(|x| x * x).collect::<Vec<_>>());
    assert!(open(&c.2, &s.2).iter().zip(&product).all(|(got, p)| (0..=1).contains(&(got - (p >> 12)))));
    assert_eq!(open(&c.3, &s.3), product.chunks(2).map(|r| r[0] + r[1]).collect::<Vec<_>>());
}

#[test]
fn comparison_is_exact_over_the_whole_range() {
    let mut x = edges();
    x.extend(values(3000, VALUE_BOUND));
    let (a, b) = share(&x);
    let (c, s) = run(|p| is_negative(p, &a, 41, 0), |p| is_negative(p, &b, 41, 0));
    let got = xored(&c.unwrap(), &s.unwrap());
    for (got, x) in got.iter().zip(&x) {
        assert_eq!(*got == 1, *x < 0, "{x}");
    }
    // Shares at the borders of the cases, not only random ones.
    let special = [0, 1, 2, (P - 1) / 4, (P - 3) / 2, (P - 1) / 2, P.div_ceil(2), (P + 3) / 2, P - 2, P - 1];
    let (mut a, mut b, mut x) = (vec![], vec![], vec![]);
    for mine in special {
        for v in edges() {
            a.push(mine);
            b.push(field::sub(field::from_signed(v), mine));
            x.push(v);
        }
    }
    for (kappa, drop) in [(41, 0), (40, 0), (39, 0), (39, 1), (30, 10), (20, 18), (41 - 8, 8)] {
        let (c, s) = run(|p| is_negative(p, &a, kappa, drop), |p| is_negative(p, &b, kappa, drop));
        let got = xored(&c.unwrap(), &s.unwrap());
        for (got, &x) in got.iter().zip(&x) {
            let most = ((1 << (kappa - 1)) - 1) << drop;
            if x.abs() < most || (drop == 0 && x.abs() == most) {
                let near = -(1i64 << drop) <= x && x < 0 && drop > 0;
                assert!((*got == 1) == (x < 0) || (near && *got == 0), "{x} at {kappa}, {drop}");
            }
        }
    }
}

/// Numbers at both ends of the range of a comparison with dropped bits, and around zero, under many shares.
#[test]
fn comparison_with_dropped_bits_is_right_up_to_both_ends_of_its_range() {
    for (kappa, drop) in [(17, 4), (17, 6), (17, 7), (2, 6), (3, 1), (8, 16), (12, 17), (20, 18), (8, 30), (30, 9)] {
        let end = (((1i64 << (kappa - 1)) - 1) << drop) - 1;
        let cell = 1i64 << drop;
        let mut x: Vec<i64> = vec![];
        for near in [end, end - cell / 2, end - cell, -end, cell / 2 - end, cell - end, 0, -cell, cell, -cell - 1] {
            x.extend([near - 2, near - 1, near, near + 1, near + 2]);
        }
        x.extend((0..100).map(|i| i * cell / 100));
        x.retain(|v| v.abs() <= end);
        let x = x.repeat(200);
        let (a, b) = share(&x);
        let (c, s) = run(|p| is_negative(p, &a, kappa, drop), |p| is_negative(p, &b, kappa, drop));
        for (&got, &x) in xored(&c.unwrap(), &s.unwrap()).iter().zip(&x) {
            let missed = got == 0 && -cell <= x && x < 0;
            let invented = got == 1 && drop > 16 && (0..1 << 16).contains(&x);
            assert!((got == 1) == (x < 0) || missed || invented, "{x} at {kappa}, {drop}");
        }
    }
}

#[test]
fn a_step_that_fails_ends_the_session_and_a_mistake_before_it_does_not() {
    let (mut p, peer) = crate::testing::parties();
    assert!(matches!(truncate(&mut p, &[1], 33), Err(Error::BadArgument(_))) && !p.channel.is_over());
    drop(peer);
    assert!(matches!(truncate(&mut p, &[1], 12), Err(Error::PeerGone { .. })));
    assert!(matches!(truncate(&mut p, &[1], 12), Err(Error::SessionOver)));
    // A supply that is used up, after nothing has been sent: the peer may be in the middle of the step.
    struct Empty;
    impl crate::party::TripleSupply for Empty {
        fn triples(&mut self, _: &mut crate::net::Channel, _: usize) -> Result<crate::party::Triples> {
            Err(Error::Exhausted("none left".into()))
        }
    }
    let (mut p, _peer) = crate::testing::parties();
    p.triples = Box::new(Empty);
    assert!(matches!(multiply(&mut p, &[1], &[1]), Err(Error::Exhausted(_))) && p.channel.is_over());
}

#[test]
fn comparison_of_narrow_values_is_exact() {
    for kappa in 2..=24 {
        let bound = 1i64 << (kappa - 1);
        let mut x: Vec<i64> = edges();
        x.retain(|v| -bound < *v && *v < bound);
        x.extend(values(300, bound));
        let (a, b) = share(&x);
        let (c, s) = run(|p| is_negative(p, &a, kappa, 0), |p| is_negative(p, &b, kappa, 0));
        let got = xored(&c.unwrap(), &s.unwrap());
        assert!(got.iter().zip(&x).all(|(g, x)| (*g == 1) == (*x < 0)), "{kappa}");
    }
}

#[test]
fn equality() {
    let mut x = edges();
    x.extend(values(500, VALUE_BOUND));
    let y: Vec<i64> = x.iter().enumerate().map(|(i, &v)| if i % 2 == 0 { v } else { v ^ (1 << (i % 40)) }).collect();
    let ((x0, x1), (y0, y1)) = (share(&x), share(&y));
    let (c, s) = run(|p| equal(p, &x0, &y0), |p| equal(p, &x1, &y1));
    let got = xored(&c.unwrap(), &s.unwrap());
    assert!((0..x.len()).all(|i| (got[i] == 1) == (x[i] == y[i])));
    let (c, s) = run(|p| equal(p, &[], &[]), |p| equal(p, &[], &[]));
    assert!(c.unwrap().is_empty() && s.unwrap().is_empty());
}

#[test]
fn values_enter_and_leave() {
    let x = edges();
    let n = x.len();
    let (c, s) = run(
        |p| {
            let v = share_from(p, Role::Client, Some(&x), n)?;
            Ok((reveal_to(p, Role::Server, &v)?, reveal_to_both(p, &v)?))
        },
        |p| {
            let v = share_from(p, Role::Client, None, n)?;
            Ok((reveal_to(p, Role::Server, &v)?, reveal_to_both(p, &v)?))
        },
    );
    let (c, s) = (c.unwrap(), s.unwrap());
    assert!(c.0.is_none() && s.0.as_ref() == Some(&x) && c.1 == x && s.1 == x);
    assert_eq!(to_signed(0), 0);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// Any shares, not only random ones, of any value in the range.
    #[test]
    fn any_shares_of_any_value(mine in proptest::collection::vec(0..P, 16), x in -VALUE_BOUND + 1..VALUE_BOUND, f in 1u32..15) {
        let rest: Vec<u64> = mine.iter().map(|&m| field::sub(field::from_signed(x), m)).collect();
        let body = |shares: Vec<u64>| move |p: &mut Party| {
            Ok((is_negative(p, &shares, 41, 0)?, truncate(p, &shares, f)?, to_ring(p, &shares, 0, 41)?))
        };
        let (c, s) = run(body(mine.clone()), body(rest));
        let (c, s) = (c.unwrap(), s.unwrap());
        proptest::prop_assert!(xored(&c.0, &s.0).iter().all(|&b| (b == 1) == (x < 0)));
        proptest::prop_assert!(open(&c.1, &s.1).iter().all(|v| (0..=1).contains(&(v - (x >> f)))));
        proptest::prop_assert!(c.2.iter().zip(&s.2).all(|(c, s)| (c + s) & ((1 << 41) - 1) == x as u64 & ((1 << 41) - 1)));
    }
}

#[test]
fn small_rings_exhaustively() {
    // Every pair of shares of every sign, and of every value that may come back.
    for kappa in 3..=6 {
        let size = 1u64 << kappa;
        let pairs: Vec<(u64, u64)> = (0..size * size).map(|i| (i / size, i % size)).collect();
        let (a, b): (Vec<u64>, Vec<u64>) = pairs.iter().copied().unzip();
        let signed = |a: u64, b: u64| ((((a + b) % size) << (64 - kappa)) as i64) >> (64 - kappa);
        let (c, s) = run(|p| ring_is_negative(p, &a, kappa), |p| ring_is_negative(p, &b, kappa));
        let got = xored(&c.unwrap(), &s.unwrap());
        assert!(got.iter().zip(&pairs).all(|(&g, &(a, b))| (g == 1) == (signed(a, b) < 0)));
        let (c, s) = run(|p| from_ring(p, &a, kappa), |p| from_ring(p, &b, kappa));
        for (got, &(a, b)) in open(&c.unwrap(), &s.unwrap()).iter().zip(&pairs) {
            let x = signed(a, b);
            assert!(*got == x || !(-(1 << (kappa - 2)) <= x && x < 1 << (kappa - 2)), "{a} + {b}: {got}");
        }
    }
}

#[test]
fn extended_transfers_serve_every_step_as_the_dealers_do() {
    use crate::ot::{BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind};
    let mut x = edges();
    x.extend(values(500, VALUE_BOUND));
    let (a, b) = share(&x);
    let body = |x: Vec<u64>| {
        move |p: &mut Party| {
            let config = OtConfig { base: BaseKind::Ristretto, kind: OtKind::SoftSpoken(GroupBits::new(2)?) };
            p.ot = Box::new(ExtendedOt::set_up(&mut p.channel, p.role, &[9; 32], config, &mut SecretRng::from_os())?);
            let negative = is_negative(p, &x, 41, 0)?;
            let part = select(p, &negative, &x)?;
            let low: Vec<u64> = to_ring(p, &x, 0, 5)?;
            Ok((negative, part, one_hot(p, &low, 5, 32)?, low, truncate(p, &x, 12)?))
        }
    };
    let (c, s) = run(body(a), body(b));
    let (c, s) = (c.unwrap(), s.unwrap());
    assert!(xored(&c.0, &s.0).iter().zip(&x).all(|(&b, &x)| (b == 1) == (x < 0)));
    assert!(open(&c.1, &s.1).iter().zip(&x).all(|(&got, &x)| got == x.min(0)));
    for (i, row) in xored(&c.2, &s.2).chunks(32).enumerate() {
        assert!(row.iter().enumerate().all(|(place, &bit)| (bit == 1) == (place as u64 == (c.3[i] + s.3[i]) & 31)));
    }
    assert!(open(&c.4, &s.4).iter().zip(&x).all(|(got, x)| (0..=1).contains(&(got - (x >> 12)))));
}
