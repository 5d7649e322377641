//! The functions of one real variable, softmax and the norms: against f64 over their whole ranges, and their costs.

use super::exponential::exp2_of_fraction;
use super::*;
use crate::field::{P, VALUE_BOUND};
use crate::random::SecretRng;
use crate::testing::{open, run, share};

/// Result and this party's bytes sent without headers, rounds and seconds.
type Measured = (Vec<u64>, u64, u64);

/// Opens `step` on shares of x; returns values, bits an element both directions, rounds of the client.
fn measured(x: &[i64], step: impl Fn(&mut Party, &[u64]) -> Result<Vec<u64>> + Sync) -> (Vec<i64>, f64, u64) {
    let (a, b) = share(x);
    let body = |p: &mut Party, x: &[u64]| -> Result<Measured> {
        let out = step(p, x)?;
        let (mut bytes, mut rounds) = (0, 0);
        for cost in p.channel.costs() {
            bytes += cost.bytes_sent - 16 * cost.messages_sent;
            rounds += cost.rounds;
        }
        Ok((out, bytes, rounds))
    };
    let (c, s) = run(|p| body(p, &a), |p| body(p, &b));
    let (c, s) = (c.unwrap(), s.unwrap());
    (open(&c.0, &s.0), (c.1 + s.1) as f64 * 8.0 / x.len() as f64, c.2)
}

/// Bits an element, rounds of the client.
fn costed(x: &[i64], step: impl Fn(&mut Party, &[u64]) -> Result<Vec<u64>> + Sync) -> (f64, u64) {
    let (_, bits, rounds) = measured(x, step);
    (bits, rounds)
}

fn opened(x: &[i64], step: impl Fn(&mut Party, &[u64]) -> Result<Vec<u64>> + Sync) -> Vec<i64> {
    measured(x, step).0
}

fn largest(errors: impl Iterator<Item = f64>) -> f64 {
    errors.fold(0.0, f64::max)
}

fn silu_of(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// x Phi(x), with the error function by its series and its continued fraction.
fn gelu_of(x: f64) -> f64 {
    let t = x.abs() / 2f64.sqrt();
    let upper = if t < 2.5 {
        let (mut term, mut sum) = (t, t);
        for k in 1..80 {
            term *= -t * t / f64::from(k);
            sum += term / f64::from(2 * k + 1);
        }
        0.5 - sum / std::f64::consts::PI.sqrt()
    } else {
        let tail = (1..60).rev().fold(t, |tail, k| t + f64::from(k) / 2.0 / tail);
        (-t * t).exp() / tail / std::f64::consts::PI.sqrt() / 2.0
    };
    if x < 0.0 { x * upper } else { x * (1.0 - upper) }
}

/// Every number on [-16, 16], a grid up to 1024, and both ends of the range (1024 - 1/64) under many shares.
fn activations(f: u32) -> Vec<i64> {
    let mut x: Vec<i64> = (-(16i64 << f)..=16 << f).collect();
    let most = (1024i64 << f) - (1 << (f - 5));
    x.extend((-most..most).step_by((most as usize) / 20_000));
    let end = (1024i64 << f) - (1 << (f - 6)) - 1;
    x.extend((0..400).flat_map(|i| [end - i % 5, i % 5 - end]));
    x
}

fn check_activation(
    f: u32,
    bound: f64,
    bits: f64,
    truth: fn(f64) -> f64,
    step: fn(&mut Party, &[u64], u32) -> Result<Vec<u64>>,
) {
    let x = activations(f);
    let one = f64::from(1u32 << f);
    let (got, cost, _) = measured(&x, |p, x| step(p, x, f));
    let error = largest(x.iter().zip(&got).map(|(&x, &y)| (y as f64 / one - truth(x as f64 / one)).abs()));
    println!("f {f}: error 2^{:.2}, {cost:.1} bits", error.log2());
    assert!(error <= bound, "error 2^{:.2}", error.log2());
    assert!((cost - bits).abs() < 1.0, "{cost} bits");
    for (&x, &y) in x.iter().zip(&got).filter(|(x, _)| x.abs() > 10 << f) {
        assert!((x.max(0) - y).abs() <= 1, "{x}: {y}");
    }
}

#[test]
fn relu_is_exact_outside_its_cell() {
    let x = activations(12);
    let (got, cost, _) = measured(&x, |p, x| relu(p, x, 12));
    for (&x, &y) in x.iter().zip(&got) {
        assert!(y == x.max(0) || (-64..0).contains(&x) && y == x, "{x}: {y}");
    }
    assert!((cost - 197.0).abs() < 1.0, "{cost} bits");
}

#[test]
fn silu_over_its_whole_range() {
    check_activation(12, 2f64.powf(-9.7), 1290.0, silu_of, silu);
}

#[test]
fn gelu_over_its_whole_range() {
    check_activation(12, 2f64.powf(-9.8), 1069.0, gelu_of, gelu);
}

#[test]
fn activations_at_other_scales() {
    check_activation(10, 2f64.powf(-8.4), 1290.0, silu_of, silu);
    check_activation(13, 2f64.powf(-10.1), 1290.0, silu_of, silu);
    check_activation(13, 2f64.powf(-10.1), 1069.0, gelu_of, gelu);
    let (c, s) = run(|p| silu(p, &[0], 14), |p| silu(p, &[0], 14));
    assert_eq!((c.unwrap_err().code(), s.unwrap_err().code()), ("engine.bad_argument", "engine.bad_argument"));
}

#[test]
fn powers_of_fractions() {
    let error = largest((0..1 << 16).map(|t| {
        let truth = (f64::from(t) / 65536.0).exp2() * f64::from(1 << 30);
        (exp2_of_fraction(t as u64) as f64 - truth).abs()
    }));
    assert!(error < 200.0, "{error}");
}

#[test]
fn exponentials_over_their_whole_range() {
    for (f, g, octaves) in [(12, 12, 0), (12, 16, 0), (10, 12, 0), (13, 16, 0), (12, 12, 8), (12, 20, 12), (12, 20, 0)]
    {
        let one = f64::from(1u32 << f);
        let ceiling = f64::from(octaves) * 2f64.ln();
        let top = ((ceiling + 1.3) * one) as i64;
        let mut x: Vec<i64> = (top - (21 << f)..=top).collect();
        let most = if f == 13 { 511i64 << f } else { 1023 << f };
        x.extend((-most..0).step_by(997 * 64));
        let (got, cost, _) = measured(&x, |p, x| exponential(p, x, f, octaves, g));
        let place = 2f64.powi(-(g as i32));
        for (&x, &y) in x.iter().zip(&got) {
            let truth = (x as f64 / one).exp();
            let error = (y as f64 * place - truth).abs();
            let places = if g + octaves < 18 { 2.0 } else { 1.0 };
            let bound = truth * (2f64.powf(-14.5) + 2f64.powf(-17.6) * (x as f64 / one).abs())
                + places * place
                + 2f64.powi(octaves as i32 - 18);
            assert!(error <= bound, "f {f} g {g} octaves {octaves}: {x}: {y} error {error} of {truth}");
        }
        assert!((cost - 839.0).abs() < 0.5, "{cost} bits");
    }
}

/// Dense near powers of two, spread elsewhere.
fn magnitudes(least: u32, most: u32) -> Vec<i64> {
    let mut rng = SecretRng::from_os();
    let mut x: Vec<i64> = (least..most)
        .flat_map(|k| {
            let one = 1i64 << k;
            let steps: Vec<i64> = (0..200).map(|i| one + one * i / 200).collect();
            steps.into_iter().chain((0..50).map(|i| one + i).filter(move |&v| v < 2 * one)).collect::<Vec<_>>()
        })
        .collect();
    x.extend((0..500).map(|_| (1i64 << least) + (rng.next_u64() % ((1 << most) - (1 << least))) as i64));
    x
}

#[test]
fn reciprocals_over_their_whole_range() {
    for (least, most, total) in [(16, 24, 36), (0, 12, 24), (16, 37, 44), (10, 11, 26), (12, 30, 29)] {
        let x = magnitudes(least, most);
        let got = opened(&x, |p, x| reciprocal(p, x, least, most, total));
        let worst = largest(x.iter().zip(&got).map(|(&x, &y)| {
            let truth = 2f64.powi(total as i32) / x as f64;
            ((y as f64 - truth).abs() - 2.0).max(0.0) / truth
        }));
        println!("reciprocal {least} {most}: 2^{:.2}", worst.log2());
        assert!(worst <= 2f64.powi(-14), "{least} {most} 2^{:.2}", worst.log2());
    }
    assert_eq!(run(|p| reciprocal(p, &[1], 0, 30, 30), |_| Ok(())).0.unwrap_err().code(), "engine.bad_argument");
}

#[test]
fn reciprocal_roots_over_their_whole_range() {
    for (least, most, total, numerator) in
        [(0, 20, 20, 65536u32), (12, 37, 30, 65536), (12, 37, 32, 92_682), (8, 36, 30, 131_071), (36, 37, 35, 70_000)]
    {
        let x = magnitudes(least, most);
        let got = opened(&x, |p, x| rsqrt(p, x, least, most, numerator, total));
        let worst = largest(x.iter().zip(&got).map(|(&x, &y)| {
            let truth = 2f64.powi(total as i32) / (x as f64).sqrt() * f64::from(numerator) / 65536.0;
            ((y as f64 - truth).abs() - 2.0).max(0.0) / truth
        }));
        println!("rsqrt {least} {most}: 2^{:.2}", worst.log2());
        assert!(worst <= 2f64.powf(-13.5), "{least} {most} 2^{:.2}", worst.log2());
    }
    assert_eq!(run(|p| rsqrt(p, &[1], 1, 30, 65536, 30), |_| Ok(())).0.unwrap_err().code(), "engine.bad_argument");
}

fn normal(rng: &mut SecretRng) -> f64 {
    (0..12).map(|_| rng.next_u64() as f64 / 2f64.powi(64)).sum::<f64>() - 6.0
}

fn softmax_error(x: &[i64], columns: usize, allowed: Option<&[bool]>, f: u32) -> f64 {
    let one = f64::from(1u32 << f);
    let got = opened(x, |p, x| softmax(p, x, columns, allowed, f));
    largest(x.chunks(columns).zip(got.chunks(columns)).enumerate().map(|(r, (row, got))| {
        let ok = |i: usize| allowed.is_none_or(|a| a[r * columns + i]);
        let most = row.iter().enumerate().filter(|(i, _)| ok(*i)).map(|(_, &v)| v).max().unwrap_or(0);
        let e: Vec<f64> =
            row.iter().enumerate().map(|(i, &v)| if ok(i) { ((v - most) as f64 / one).exp() } else { 0.0 }).collect();
        let sum: f64 = e.iter().sum::<f64>().max(1e-9);
        largest(e.iter().zip(got).map(|(e, &g)| (g as f64 / one - e / sum).abs()))
    }))
}

#[test]
fn softmax_over_rows() {
    let mut rng = SecretRng::from_os();
    for (rows, columns, scale, f) in [
        (128, 64, 3.0, 12),
        (50, 1, 3.0, 12),
        (20, 37, 0.01, 12),
        (20, 64, 60.0, 12),
        (4, 1024, 2.0, 12),
        (20, 64, 3.0, 13),
    ] {
        let x: Vec<i64> =
            (0..rows * columns).map(|_| (normal(&mut rng) * scale * f64::from(1u32 << f)) as i64).collect();
        let error = softmax_error(&x, columns, None, f);
        println!("softmax {rows} x {columns}, scale {scale}: 2^{:.2}", error.log2());
        assert!(error <= 2f64.powf(-11.0), "2^{:.2}", error.log2());
    }
    // Largest entries anywhere in the range, and all entries equal at both ends of it.
    let far = |v: i64| (0..64).map(|i| v - (i % 5) * 4096).collect::<Vec<_>>();
    let x =
        [far(510 * 4096), far(-506 * 4096), vec![-510 * 4096; 64], [vec![510 * 4096], vec![-510 * 4096; 63]].concat()];
    assert!(softmax_error(&x.concat(), 64, None, 12) <= 2f64.powf(-11.0));
    // A causal mask, and rows with nothing in them.
    let allowed: Vec<bool> = (0..33 * 32).map(|i| i % 32 < i / 32).collect();
    let x: Vec<i64> = (0..33 * 32).map(|_| (normal(&mut rng) * 8192.0) as i64).collect();
    assert!(softmax_error(&x, 32, Some(&allowed), 12) <= 2f64.powf(-11.0));
    let got = opened(&x, |p, x| softmax(p, x, 32, Some(&allowed), 12));
    assert!(allowed.iter().zip(&got).all(|(&a, &g)| a || g == 0));
}

fn norm_error(plan: &NormPlan, rms: f64, offset: f64, layer: bool) -> f64 {
    let mut rng = SecretRng::from_os();
    let one = f64::from(1u32 << plan.f);
    let n = plan.columns;
    let mut x: Vec<i64> = (0..6 * n).map(|_| ((normal(&mut rng) * rms + offset) * one) as i64).collect();
    if !layer {
        // One row with a single entry that carries everything.
        x[..n].fill(0);
        x[1] = (rms * (n as f64).sqrt() * one) as i64;
    }
    let got = opened(&x, |p, x| if layer { layer_norm(p, x, plan) } else { rms_norm(p, x, plan) });
    largest(x.chunks(n).zip(got.chunks(n)).flat_map(|(row, got)| {
        let mean = if layer { row.iter().sum::<i64>() as f64 / n as f64 } else { 0.0 };
        let square = row.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n as f64 / one / one;
        let scale = (square + f64::from(plan.epsilon) / 2f64.powi(24)).sqrt();
        row.iter()
            .zip(got)
            .map(move |(&v, &g)| {
                let truth = (v as f64 - mean) / one / scale;
                (g as f64 / one - truth).abs() / truth.abs().max(1.0)
            })
            .collect::<Vec<_>>()
    }))
}

#[test]
fn norms_over_their_ranges() {
    for (columns, rms_bits, rms, bound) in [
        (2048, 2, 1.0, -10.5),
        (2048, 2, 3.9, -10.5),
        (8192, 2, 1.0, -10.5),
        (8192, 7, 100.0, -10.5),
        (768, 4, 10.0, -10.5),
        (2, 2, 1.0, -10.0),
        (2048, 0, 0.05, -8.0),
    ] {
        let plan = NormPlan { columns, f: 12, rms_bits, epsilon: 168 };
        let error = norm_error(&plan, rms, 0.0, false);
        println!("rms_norm {columns} 2^{rms_bits} {rms}: 2^{:.2}", error.log2());
        assert!(error.log2() <= bound, "2^{:.2}", error.log2());
        if columns > 2 {
            let error = norm_error(&plan, rms * 0.9, rms * 0.4, true);
            println!("layer_norm: 2^{:.2}", error.log2());
            assert!(error.log2() <= bound + 1.0, "2^{:.2}", error.log2());
        }
    }
}

/// One line of what the plain backend computes: the step, its public numbers, arguments, results.
fn vector(line: &str) -> (&str, Vec<u32>, Vec<i64>, Vec<i64>) {
    let mut parts = line.split('|');
    let mut head = parts.next().unwrap().split(' ');
    let numbers = |text: &str| text.split(' ').map(|v| v.parse().unwrap()).collect::<Vec<i64>>();
    let name = head.next().unwrap();
    let public = head.map(|v| v.parse().unwrap()).collect();
    (name, public, numbers(parts.next().unwrap()), numbers(parts.next().unwrap()))
}

#[test]
fn the_plain_backend_computes_the_same() {
    let vectors = include_str!("../../tables/vectors.txt");
    for line in vectors.lines() {
        let (name, n, x, plain) = vector(line);
        // Last places, and what of the value the roundings inside may add.
        let (places, relative) = match name {
            "relu" => (0.0, 0.0),
            "silu" | "gelu" => (1.0, 0.0),
            "softmax" => (1.0, 2f64.powi(-13)),
            "exp" => (2f64.powi(n[2] as i32 + n[1] as i32 - 18).max(0.0) + 2.0, 2f64.powi(-14)),
            _ => (2.0, 2f64.powi(-14)),
        };
        let got = opened(&x, |p, x| match name {
            "relu" => relu(p, x, n[0]),
            "silu" => silu(p, x, n[0]),
            "gelu" => gelu(p, x, n[0]),
            "exp" => exponential(p, x, n[0], n[1], n[2]),
            "reciprocal" => reciprocal(p, x, n[0], n[1], n[2]),
            "rsqrt" => rsqrt(p, x, n[0], n[1], n[2], n[3]),
            "softmax" => softmax(p, x, n[0] as usize, None, n[1]),
            _ => {
                let plan = NormPlan { columns: n[0] as usize, f: n[1], rms_bits: n[2], epsilon: n[3] };
                if name == "rms_norm" { rms_norm(p, x, &plan) } else { layer_norm(p, x, &plan) }
            }
        });
        for ((x, g), p) in x.iter().zip(&got).zip(&plain) {
            let most = places + relative * p.abs() as f64;
            assert!((g - p).abs() as f64 <= most, "{name} {n:?} at {x}: {g} where {p} is plain");
        }
    }
    assert!(vectors.lines().count() >= 20);
}

#[test]
fn reciprocals_cost_what_they_say() {
    let one = 1 << 20;
    let x = [one; 1000];
    let (inverse, _) = costed(&x, |p, x| reciprocal(p, x, 20, 21, 36));
    let (root, _) = costed(&x, |p, x| rsqrt(p, x, 20, 22, 1 << 16, 26));
    let (multiple, _) = costed(&x, |p, x| rsqrt(p, x, 20, 22, 70_000, 26));
    for (cost, bits) in [(inverse, 1278.0), (root, 1690.0), (multiple, 1732.0)] {
        assert!((cost - bits).abs() < 1.0, "{cost} bits where {bits} are stated");
    }
}

#[test]
fn no_element_at_all() {
    for step in [relu, silu, gelu] {
        assert!(opened(&[], |p, x| step(p, x, 12)).is_empty());
    }
    assert!(opened(&[], |p, x| softmax(p, x, 4, None, 12)).is_empty());
    assert!(VALUE_BOUND < P as i64 / 4 + 1);
}

#[test]
fn rounds_are_those_stated() {
    let x = vec![-1; 64];
    let plan = NormPlan { columns: 64, f: 12, rms_bits: 2, epsilon: 168 };
    let rounds = [
        ("relu", costed(&x, |p, x| relu(p, x, 12)).1),
        ("silu", costed(&x, |p, x| silu(p, x, 12)).1),
        ("gelu", costed(&x, |p, x| gelu(p, x, 12)).1),
        ("exp", costed(&x, |p, x| exponential(p, x, 12, 0, 12)).1),
        ("softmax", costed(&x, |p, x| softmax(p, x, 64, None, 12)).1),
        ("rms_norm", costed(&x, |p, x| rms_norm(p, x, &plan)).1),
        ("layer_norm", costed(&x, |p, x| layer_norm(p, x, &plan)).1),
    ];
    let stated = [6, 17, 17, 11, 66, 26, 28];
    assert_eq!(rounds.map(|(_, rounds)| rounds), stated, "{rounds:?}");
}

#[test]
#[ignore = "a measurement: seconds for 2^18 activations and for softmax of 128 rows of 64"]
fn speed() {
    let x: Vec<i64> = (0..1 << 18).map(|i| i - (1 << 17)).collect();
    let clock = std::time::Instant::now();
    opened(&x, |p, x| silu(p, x, 12));
    println!("silu, 2^18, dealt correlations: {:.2} s", clock.elapsed().as_secs_f64());
    let clock = std::time::Instant::now();
    opened(&x[..8192], |p, x| softmax(p, x, 64, None, 12));
    println!("softmax 128 x 64, dealt correlations: {:.2} s", clock.elapsed().as_secs_f64());
}
