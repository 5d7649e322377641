use super::*;
use proptest::prelude::*;

/// The equations as they are written, in double precision: every token's weights over the experts.
fn slow(pass: &Pass<'_>) -> Vec<Vec<f64>> {
    let count = pass.scores.len() / pass.experts;
    let score = |token: usize, expert: usize| f64::from(pass.scores[token * pass.experts + expert]);
    (0..count)
        .map(|token| {
            let begun = token / pass.tokens * pass.tokens;
            let last = if pass.context == Context::Prefix { token } else { begun + pass.tokens - 1 };
            let seen: Vec<usize> = (begun..=last).filter(|t| pass.is_real(*t)).collect();
            let wide = pass.experts + 1;
            let earlier = |place: usize| match pass.earlier {
                Some(sums) => f64::from(sums[token / pass.tokens * wide + place]),
                None => 0.0,
            };
            let blended = |expert: usize| {
                let own = score(token, expert);
                if pass.context == Context::None {
                    return own;
                }
                let many = seen.len() as f64 + earlier(pass.experts);
                let sum = seen.iter().map(|t| score(*t, expert)).sum::<f64>() + earlier(expert);
                let share = 1.0 / (1.0 + (-f64::from(pass.blend)).exp());
                (1.0 - share) * own + share * sum / many.max(1.0)
            };
            let raised: Vec<f64> = (0..pass.experts).map(|expert| blended(expert).exp()).collect();
            raised.iter().map(|value| value / raised.iter().sum::<f64>()).collect()
        })
        .collect()
}

fn contexts() -> impl Strategy<Value = Context> {
    prop::sample::select(vec![Context::None, Context::Sequence, Context::Prefix])
}

proptest! {
    #[test]
    fn the_choice_is_the_equations(
        (tokens, experts, scores, real, earlier) in (1usize..4, 1usize..6, 1usize..5).prop_flat_map(|(b, t, e)| (
            Just(t), Just(e), prop::collection::vec(-4f32..4.0, b * t * e), prop::collection::vec(0u8..2, b * t),
            prop::option::of(prop::collection::vec(0f32..3.0, b * (e + 1))),
        )),
        context in contexts(),
        blend in -6f32..6.0,
    ) {
        let earlier = earlier.as_deref().filter(|_| context == Context::Prefix);
        let pass = Pass { scores: &scores, tokens, experts, context, blend, real: Some(&real), earlier };
        let found = choose(&pass).unwrap();
        let mut by_expert = vec![Vec::new(); experts + 1];
        let mut rest = &found.order[..];
        for (expert, count) in found.counts.iter().enumerate() {
            let (own, others) = rest.split_at(*count);
            by_expert[expert] = own.to_vec();
            rest = others;
        }
        by_expert[experts] = rest.to_vec();
        let all = slow(&pass);
        for (expert, those) in by_expert.iter().enumerate() {
            prop_assert!(those.is_sorted());
            for &token in those {
                let token = token as usize;
                prop_assert_eq!(real[token] == 0, expert == experts);
                if expert < experts {
                    let most = all[token].iter().fold(0.0f64, |a, b| a.max(*b));
                    prop_assert!((all[token][expert] - most).abs() < 1e-5);
                    prop_assert!((f64::from(found.weights[token]) - most).abs() < 1e-5);
                }
            }
        }
        let mut seen = found.order.clone();
        seen.sort_unstable();
        prop_assert!(seen.iter().enumerate().all(|(place, token)| place as i64 == *token));
    }

    #[test]
    fn a_prefix_in_two_passes_is_the_prefix_in_one(
        scores in prop::collection::vec(-4f32..4.0, 6 * 3), cut in 1usize..6, blend in -6f32..6.0,
    ) {
        let pass = Pass {
            scores: &scores, tokens: 6, experts: 3, context: Context::Prefix, blend, real: None, earlier: None,
        };
        let whole = choose(&pass).unwrap();
        let first = choose(&Pass { scores: &scores[..cut * 3], tokens: cut, ..pass }).unwrap();
        let last = &first.sums[first.sums.len() - 4..];
        let second =
            choose(&Pass { scores: &scores[cut * 3..], tokens: 6 - cut, earlier: Some(last), ..pass }).unwrap();
        let close = |a: Vec<f32>, b: Vec<f32>| a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5);
        prop_assert!(close([first.weights, second.weights].concat(), whole.weights));
        prop_assert!(close([first.sums, second.sums].concat(), whole.sums));
    }

    #[test]
    fn gathering_is_a_permutation_and_a_product(
        marks in prop::collection::vec(0usize..4, 1..20), width in 1usize..5,
    ) {
        let count = marks.len();
        let (counts, order) = sorted(&marks, 3);
        let weights: Vec<f32> = (0..count).map(|token| token as f32 + 1.0).collect();
        let value = |token: usize, column: usize| (token * width + column) as f32;
        let mut begun = 0;
        let parts: Vec<Vec<f32>> = counts.iter().map(|many| {
            let own = &order[begun..begun + many];
            begun += many;
            own.iter().flat_map(|&token| (0..width).map(move |column| value(token as usize, column))).collect()
        }).collect();
        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        let mut out = vec![f32::NAN; count * width];
        let choice = Choice { counts, order, weights, sums: Vec::new() };
        choice.gather(&parts, width, &mut out).unwrap();
        let weights = &choice.weights;
        for token in 0..count {
            for column in 0..width {
                let expected = if marks[token] == 3 { 0.0 } else { value(token, column) * weights[token] };
                prop_assert_eq!(out[token * width + column], expected);
            }
        }
    }
}

#[test]
fn padding_may_hold_anything_and_a_token_that_is_not_a_number_stays_one() {
    let scores = [1.0, 2.0, f32::NAN, f32::INFINITY, 0.0, 3.0];
    let pass = Pass {
        scores: &scores,
        tokens: 3,
        experts: 2,
        context: Context::Sequence,
        blend: 0.5,
        real: Some(&[1, 0, 1]),
        earlier: None,
    };
    let found = choose(&pass).unwrap();
    assert_eq!((found.counts, found.order), (vec![0, 2], vec![0, 2, 1]));
    assert!(found.weights.iter().all(|weight| weight.is_finite()));
    let found = choose(&Pass { real: None, context: Context::None, ..pass }).unwrap();
    assert!(found.weights[1].is_nan() && found.weights[0].is_finite());
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let scores = [0.0; 12];
    let pass = Pass {
        scores: &scores,
        tokens: 2,
        experts: 3,
        context: Context::Prefix,
        blend: 0.5,
        real: None,
        earlier: None,
    };
    assert!(choose(&pass).is_ok());
    for wrong in [
        Pass { experts: 0, ..pass },
        Pass { tokens: 0, ..pass },
        Pass { tokens: 5, ..pass },
        Pass { experts: usize::MAX, tokens: 2, ..pass },
        Pass { real: Some(&[1; 3]), ..pass },
        Pass { earlier: Some(&[0.0; 7]), ..pass },
    ] {
        assert!(choose(&wrong).is_err(), "{wrong:?}");
    }
    let choice = choose(&pass).unwrap();
    let (part, mut out) = ([1.0; 8], [0.0; 8]);
    assert!(choice.gather(&[&part], 2, &mut out).is_ok());
    assert!(choice.gather(&[&part], 0, &mut out).is_err());
    assert!(choice.gather(&[&part], 3, &mut out).is_err());
    assert!(choice.gather(&[&part[..4]], 2, &mut out).is_err());
    assert!(choice.gather(&[&part, &part], 2, &mut out).is_err());
    assert!(choice.gather(&[&part], 2, &mut out[..6]).is_err());
}

#[test]
fn a_long_sequence_of_like_scores_loses_no_digits() {
    let scores = [0.1f32; 100_000];
    for context in [Context::Sequence, Context::Prefix] {
        let pass =
            Pass { scores: &scores, tokens: 100_000, experts: 1, context, blend: 2.0, real: None, earlier: None };
        let found = choose(&pass).unwrap();
        let sums = if context == Context::Prefix { &found.sums[..] } else { &[10_000.0, 100_000.0] };
        let last = &sums[sums.len() - 2..];
        assert!((last[0] - 10_000.0).abs() < 0.01 && last[1] == 100_000.0, "{last:?}");
    }
}
