//! Which expert a token goes to: what the router of a unified model does behind its scores, in one pass.
//!
//! Written out as tensor operations this is a dozen calls, each of them over a few numbers a token; for one image, or
//! one new token of a decoder, the calls take longer than what they compute. The equations are in
//! `docs/unify-model.md`; `cloister.unify.moe.routing` has the same as tensor operations, for what has a gradient, more
//! than one expert a token, or another number format.
//!
//! [`scores`] multiplies, [`choose`] decides, [`Choice::gather`] brings the experts' outputs back. Nothing here is secret from the process that runs it, so nothing here runs in constant time.

mod scores;

pub use scores::scores;

/// What the mean of the scores is taken over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Context {
    /// No mean: every token for itself.
    None,
    /// All real tokens of the sequence.
    Sequence,
    /// The real tokens of the sequence up to and with this one.
    Prefix,
}

/// The scores of a pass and what is known of its tokens. `B` sequences of `T` tokens, `E` experts.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// `B x T x E`.
    pub scores: &'a [f32],
    /// `T`.
    pub tokens: usize,
    /// `E`.
    pub experts: usize,
    /// What the mean is taken over.
    pub context: Context,
    /// The mean's share in a score, before the sigmoid.
    pub blend: f32,
    /// `B x T`, zero for padding; without it every token is real.
    pub real: Option<&'a [u8]>,
    /// `B x (E + 1)`: sums of the scores of earlier tokens, and how many they were.
    pub earlier: Option<&'a [f32]>,
}

/// Where every token goes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Choice {
    /// How many tokens each expert gets.
    pub counts: Vec<usize>,
    /// Tokens sorted by expert, those of one expert in their order; padding at the end.
    pub order: Vec<i64>,
    /// The weight of each token's expert.
    pub weights: Vec<f32>,
    /// For `Context::Prefix`, `B x T x (E + 1)`: sums of the scores up to and with each token, and how many are in it.
    pub sums: Vec<f32>,
}

/// What was given does not fit together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadShape(pub &'static str);

impl std::fmt::Display for BadShape {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(self.0)
    }
}

impl std::error::Error for BadShape {}

impl Pass<'_> {
    /// The number of tokens, `B x T`, if everything fits together.
    fn checked(&self) -> Result<usize, BadShape> {
        if self.experts == 0 || self.tokens == 0 {
            return Err(BadShape("there must be experts and tokens"));
        }
        let row = self.experts.checked_mul(self.tokens).ok_or(BadShape("too many tokens"))?;
        if !self.scores.len().is_multiple_of(row) {
            return Err(BadShape("the scores are not of whole sequences"));
        }
        let (batch, count) = (self.scores.len() / row, self.scores.len() / self.experts);
        if self.real.is_some_and(|real| real.len() != count) {
            return Err(BadShape("one mark a token is needed"));
        }
        if self.earlier.is_some_and(|sums| sums.len() != batch * (self.experts + 1)) {
            return Err(BadShape("one vector of earlier sums a sequence is needed"));
        }
        Ok(count)
    }

    fn is_real(&self, token: usize) -> bool {
        self.real.is_none_or(|real| real[token] != 0)
    }

    fn scores_of(&self, token: usize) -> &[f32] {
        &self.scores[token * self.experts..][..self.experts]
    }

    /// Adds a token's scores to a running sum, if it is real: the scores of padding may be anything.
    fn add(&self, token: usize, sum: &mut [f64]) {
        if self.is_real(token) {
            let (sums, count) = sum.split_at_mut(self.experts);
            sums.iter_mut().zip(self.scores_of(token)).for_each(|(sum, score)| *sum += f64::from(*score));
            count[0] += 1.0;
        }
    }
}

/// The mean of the scores that were added to a running sum.
fn mean(sum: &[f64], mean: &mut [f32]) {
    let (sums, count) = sum.split_at(mean.len());
    let count = count[0].max(1.0);
    mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / count) as f32);
}

/// The best expert of one token and its weight: the softmax of the blended scores, of which only one is needed.
fn best(scores: &[f32], mean: Option<&[f32]>, share: f32, blended: &mut [f32]) -> (usize, f32) {
    blended.copy_from_slice(scores);
    if let Some(mean) = mean {
        blended.iter_mut().zip(mean).for_each(|(score, mean)| *score += share * (*mean - *score));
    }
    let mut chosen = 0;
    for (expert, score) in blended.iter().enumerate().skip(1) {
        if *score > blended[chosen] {
            chosen = expert;
        }
    }
    let largest = blended[chosen];
    (chosen, 1.0 / blended.iter().map(|score| (score - largest).exp()).sum::<f32>())
}

/// Chooses one expert for every real token.
pub fn choose(pass: &Pass<'_>) -> Result<Choice, BadShape> {
    let count = pass.checked()?;
    let wide = pass.experts + 1;
    let share = 1.0 / (1.0 + (-pass.blend).exp());
    let mut chosen = vec![pass.experts; count]; // the expert behind the last: nobody
    let mut weights = vec![0.0; count];
    let mut sums = if pass.context == Context::Prefix { vec![0.0; count * wide] } else { Vec::new() };
    // In double precision: a long sequence of like scores would lose digits otherwise.
    let (mut sum, mut seen, mut blended) = (vec![0.0f64; wide], vec![0.0; pass.experts], vec![0.0; pass.experts]);
    for sequence in 0..count / pass.tokens {
        let here = sequence * pass.tokens..(sequence + 1) * pass.tokens;
        match pass.earlier {
            Some(earlier) => {
                let own = &earlier[sequence * wide..][..wide];
                sum.iter_mut().zip(own).for_each(|(sum, before)| *sum = f64::from(*before));
            }
            None => sum.fill(0.0),
        }
        if pass.context == Context::Sequence {
            here.clone().for_each(|token| pass.add(token, &mut sum));
            mean(&sum, &mut seen);
        }
        for token in here {
            if pass.context == Context::Prefix {
                pass.add(token, &mut sum);
                let kept = &mut sums[token * wide..][..wide];
                kept.iter_mut().zip(&sum).for_each(|(kept, sum)| *kept = *sum as f32);
                mean(&sum, &mut seen);
            }
            if pass.is_real(token) {
                let seen = (pass.context != Context::None).then_some(&seen[..]);
                (chosen[token], weights[token]) = best(pass.scores_of(token), seen, share, &mut blended);
            }
        }
    }
    let (counts, order) = sorted(&chosen, pass.experts);
    Ok(Choice { counts, order, weights, sums })
}

/// How many tokens each expert gets, and the tokens sorted by expert.
fn sorted(chosen: &[usize], experts: usize) -> (Vec<usize>, Vec<i64>) {
    let mut counts = vec![0; experts + 1];
    chosen.iter().for_each(|&expert| counts[expert] += 1);
    let mut next: Vec<usize> = counts
        .iter()
        .scan(0, |begun, count| {
            *begun += count;
            Some(*begun - count)
        })
        .collect();
    let mut order = vec![0; chosen.len()];
    for (token, &expert) in chosen.iter().enumerate() {
        order[next[expert]] = token as i64;
        next[expert] += 1;
    }
    counts.pop();
    (counts, order)
}

impl Choice {
    /// Puts the experts' outputs back where their tokens were, each times its weight. `parts` are the outputs expert
    /// after expert, each of rows of `width` numbers; `out` has a row for every token, zero for padding.
    pub fn gather(&self, parts: &[&[f32]], width: usize, out: &mut [f32]) -> Result<(), BadShape> {
        if width == 0 || parts.iter().any(|part| !part.len().is_multiple_of(width)) {
            return Err(BadShape("an expert's output is not of whole rows"));
        }
        let computed: usize = self.counts.iter().sum();
        if parts.iter().map(|part| part.len() / width).sum::<usize>() != computed {
            return Err(BadShape("one row a token of the experts is needed"));
        }
        if Some(out.len()) != self.order.len().checked_mul(width) {
            return Err(BadShape("one row of the result a token is needed"));
        }
        let rows = parts.iter().flat_map(|part| part.chunks_exact(width));
        for (row, &token) in rows.zip(&self.order) {
            let (token, weight) = (token as usize, self.weights[token as usize]);
            let to = &mut out[token * width..][..width];
            to.iter_mut().zip(row).for_each(|(to, from)| *to = from * weight);
        }
        for &token in &self.order[computed..] {
            out[token as usize * width..][..width].fill(0.0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
