//! The public plan of a batched product: its shape, the layout that is cheapest for it, and the proof that it fits.

use super::batched::value_bytes;
use super::layout::{Layout, RowUse};
use super::ticket::Ticket;
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::rlwe::params::Shape;
use crate::rlwe::{AnswerPlan, Automorphism, LEVELS, N, RotationKeys, SeededCiphertext};

/// The shape of a batched product: every expert has `tokens` rows of `columns_in` values, and one or more matrices to
/// multiply them by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchedShape {
    /// Experts, each with weights of its own.
    pub experts: usize,
    /// Token slots of one expert.
    pub tokens: usize,
    /// Columns of the input.
    pub columns_in: usize,
    /// Columns of each output. Matrices on the same input share one request.
    pub columns_out: Vec<usize>,
}

impl BatchedShape {
    /// Values in the input.
    pub fn inputs(&self) -> usize {
        self.experts * self.tokens * self.columns_in
    }

    /// Values in the output of one matrix.
    pub fn outputs(&self, matrix: usize) -> usize {
        self.experts * self.tokens * self.columns_out[matrix]
    }

    /// Multiply-accumulates of the plain product.
    pub fn multiplications(&self) -> usize {
        self.inputs() * self.columns_out.iter().sum::<usize>()
    }
}

/// What the cost model knows of the world. Public, and the same at both parties.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Conditions {
    /// Bytes a second that the link carries, both directions together.
    pub bytes_per_second: f64,
    /// Cores that work at a time, both parties together.
    pub cores: f64,
}

impl Conditions {
    /// A local network: 3 Gbit/s, two cores.
    pub const LAN: Conditions = Conditions { bytes_per_second: 375e6, cores: 2.0 };
    /// A wide-area network: 400 Mbit/s, two cores.
    pub const WAN: Conditions = Conditions { bytes_per_second: 50e6, cores: 2.0 };
}

/// Seconds of one core (Skylake-SP, AVX-512, measured with the example `batched_product`) for the parts of a product; their
/// ratios are what the model needs.
mod seconds {
    /// Encrypting one request ciphertext and adding the server's share to it.
    pub const REQUEST: f64 = 2.1e-3;
    /// One key switch.
    pub const ROTATION: f64 = 1.35e-3;
    /// Hiding, switching and decrypting one answer.
    pub const ANSWER: f64 = 2.7e-3;
    /// One fused multiply-add of the kernel.
    pub const MULTIPLY: f64 = 3.7e-11;
    /// One coefficient of one weight polynomial, all primes.
    pub const COEFFICIENT: f64 = 1.43e-8;
}

/// The plan of one batched product. Both parties make it from the same public arguments.
#[derive(Clone, PartialEq, Debug)]
pub struct BatchedPlan {
    shape: BatchedShape,
    layout: Layout,
    /// The input columns are cut into so many segments, each with answers of its own, so that noise and memory stay bounded.
    segments: usize,
    answer: AnswerPlan,
}

/// Bytes of expanded request, in the order of the kernel, that the server holds at a time.
const REQUEST_MEMORY: usize = 1 << 30;

impl BatchedPlan {
    /// The fastest plan for a shape.
    pub fn new(shape: BatchedShape, conditions: Conditions) -> Result<Self> {
        Self::within(shape, conditions, usize::MAX)
    }

    /// The fastest plan for a shape that takes at most so many bytes, both directions together: sending input columns twice
    /// saves a third of the multiplications and most rotations, so time and bytes are traded. The keys of its rotations are not
    /// counted: they travel once a session ([`BatchedPlan::key_bytes`]).
    pub fn within(shape: BatchedShape, conditions: Conditions, most_bytes: usize) -> Result<Self> {
        let best = Self::layouts(&shape)?
            .into_iter()
            .filter_map(|layout| Self::with_layout(shape.clone(), layout).ok())
            .filter(|plan| plan.request_bytes() + plan.answer_bytes() <= most_bytes)
            .min_by(|a, b| a.seconds(conditions).total_cmp(&b.seconds(conditions)));
        best.ok_or_else(|| Error::Unsupported(format!("no layout of this batched product fits: {shape:?}")))
    }

    /// The plan with a given layout.
    pub fn with_layout(shape: BatchedShape, layout: Layout) -> Result<Self> {
        let layout = layout.new()?;
        Self::check(&shape)?;
        if layout.degree != N || layout.tokens < shape.tokens {
            return Err(Error::BadArgument("this layout is not for this product".into()));
        }
        let inputs = shape.columns_in.div_ceil(layout.columns_in());
        let held = (REQUEST_MEMORY / value_bytes(&layout)).max(1);
        let mut segments = inputs.div_ceil(held);
        loop {
            let noise = Self::noise(&layout, inputs.div_ceil(segments));
            match AnswerPlan::slots(&noise) {
                Ok(answer) => return Ok(Self { shape, layout, segments, answer }),
                Err(error) if segments >= inputs => return Err(error),
                Err(_) => segments = (2 * segments).min(inputs),
            }
        }
    }

    /// What the noise bound of an answer rests on: every product that is added into it, and every key switch.
    ///
    /// Of tokens one slot wide, a shift by r and one by r less the whole row are one rotation: what two such sums make of
    /// one request may add up in phase, which doubles their mean square.
    fn noise(layout: &Layout, inputs: usize) -> Shape {
        let in_phase = if layout.tokens == 1 && layout.rotated > 1 { 2 } else { 1 };
        Shape {
            level: LEVELS,
            products: inputs * layout.shifts().len() * in_phase,
            nonzero: layout.cosets(),
            magnitude: P as f64 / 2.0,
            rotations: layout.shifts().len() - 1,
        }
    }

    fn check(shape: &BatchedShape) -> Result<()> {
        let sizes = [shape.experts, shape.tokens, shape.columns_in, shape.columns_out.len()];
        let columns = shape.columns_out.iter().chain([&shape.columns_in]);
        if sizes.contains(&0) || columns.clone().any(|&c| c == 0 || c > 1 << 16) || shape.experts > 1 << 12 {
            return Err(Error::BadArgument(format!("a batched product cannot have this shape: {shape:?}")));
        }
        if shape.tokens > N / 2 {
            return Err(Error::Unsupported(format!("more than {} rows must be multiplied in parts", N / 2)));
        }
        Ok(())
    }

    /// All layouts worth considering: as many experts in a ciphertext as fit, the rest split in every way.
    fn layouts(shape: &BatchedShape) -> Result<Vec<Layout>> {
        Self::check(shape)?;
        let tokens = shape.tokens.next_power_of_two();
        let row = N / 2 / tokens;
        let wanted = shape.experts.next_power_of_two();
        let powers = |most: usize| (0..).map(|k| 1usize << k).take_while(move |&p| p <= most);
        let mut found = Vec::new();
        for rows in [RowUse::Experts, RowUse::Rotated, RowUse::Copied, RowUse::Partial] {
            if rows == RowUse::Experts && wanted < 2 * row {
                continue;
            }
            let experts = wanted.min(row);
            let blocks = row / experts;
            for rotated in powers(blocks.min(16)) {
                for copied in powers(blocks / rotated) {
                    let partial = blocks / rotated / copied;
                    found.push(Layout { degree: N, tokens, experts, rows, rotated, copied, partial });
                }
            }
        }
        Ok(found)
    }

    /// The shape.
    pub fn shape(&self) -> &BatchedShape {
        &self.shape
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How answers are hidden and how wide they travel.
    pub fn answer(&self) -> &AnswerPlan {
        &self.answer
    }

    /// Groups of experts, each with ciphertexts of its own.
    pub fn groups(&self) -> usize {
        self.shape.experts.div_ceil(self.layout.experts_in_ciphertext())
    }

    /// The input ciphertexts of one group, cut into segments.
    pub fn segments(&self) -> Vec<std::ops::Range<usize>> {
        let inputs = self.shape.columns_in.div_ceil(self.layout.columns_in());
        let step = inputs.div_ceil(self.segments);
        (0..inputs).step_by(step).map(|from| from..(from + step).min(inputs)).collect()
    }

    /// Output ciphertexts of one matrix, group and segment.
    pub fn outputs(&self, matrix: usize) -> usize {
        self.shape.columns_out[matrix].div_ceil(self.layout.columns_out())
    }

    /// Request ciphertexts in all.
    pub fn requests(&self) -> usize {
        self.groups() * self.shape.columns_in.div_ceil(self.layout.columns_in())
    }

    /// Answers in all.
    pub fn answers(&self) -> usize {
        let outputs: usize = (0..self.shape.columns_out.len()).map(|m| self.outputs(m)).sum();
        self.groups() * self.segments().len() * outputs
    }

    /// Products of a ciphertext and a weight polynomial.
    pub fn products(&self) -> usize {
        let outputs: usize = (0..self.shape.columns_out.len()).map(|m| self.outputs(m)).sum();
        self.requests() * outputs * self.layout.shifts().len()
    }

    /// Fused multiply-adds of the kernel, padding of narrow lanes included.
    pub fn kernel_multiplications(&self) -> usize {
        let lanes = super::batched::lanes(&self.layout);
        self.products() * LEVELS * self.layout.cosets() * lanes
    }

    /// Key switches in all.
    pub fn rotations(&self) -> usize {
        self.answers() * (self.layout.shifts().len() - 1)
    }

    /// The automorphisms that the server needs keys for.
    pub fn automorphisms(&self) -> Vec<Automorphism> {
        let mut found = Vec::new();
        let mut step = 1;
        while step < self.layout.rotated {
            let slots = (step * self.layout.slots_in_block()) as isize;
            found.extend([Automorphism::new(slots, false), Automorphism::new(-slots, false)]);
            step *= 2;
        }
        if self.layout.rows == RowUse::Rotated {
            found.push(Automorphism::new(0, true));
        }
        found
    }

    /// Bytes of all requests, frames excluded.
    pub fn request_bytes(&self) -> usize {
        self.requests() * SeededCiphertext::wire_len(LEVELS)
    }

    /// Bytes of all answers, frames excluded.
    pub fn answer_bytes(&self) -> usize {
        self.answers() * self.answer.answer_len(N)
    }

    /// Bytes of the keys of its rotations, of which a session sends only those that it has not sent before.
    pub fn key_bytes(&self) -> usize {
        RotationKeys::wire_len(self.automorphisms().len())
    }

    /// Bytes that the input of the online half of a prepared product takes, with the number of that product.
    pub fn online_bytes(&self) -> usize {
        Ticket::WIRE_LEN + field::packed_len(self.shape.inputs(), field::P_BITS)
    }

    /// What the cost model thinks this plan takes.
    pub fn seconds(&self, conditions: Conditions) -> f64 {
        let coefficients = self.products() * self.layout.cosets();
        let work = self.requests() as f64 * seconds::REQUEST
            + self.rotations() as f64 * seconds::ROTATION
            + self.answers() as f64 * seconds::ANSWER
            + self.kernel_multiplications() as f64 * seconds::MULTIPLY
            + coefficients as f64 * seconds::COEFFICIENT;
        work / conditions.cores + (self.request_bytes() + self.answer_bytes()) as f64 / conditions.bytes_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(columns_in: usize, columns_out: &[usize]) -> BatchedShape {
        BatchedShape { experts: 64, tokens: 32, columns_in, columns_out: columns_out.to_vec() }
    }

    #[test]
    fn a_deepseek_layer_fits_350_megabytes_with_its_first_input_sent_twice() {
        const MOST: usize = 350_000_000;
        let bytes = |p: &BatchedPlan| p.request_bytes() + p.answer_bytes();
        let first = BatchedPlan::new(layer(2048, &[1408, 1408]), Conditions::LAN).unwrap();
        assert_eq!((first.layout().copied, first.layout().rotated), (2, 1));
        let second = BatchedPlan::within(layer(1408, &[2048]), Conditions::LAN, MOST - bytes(&first)).unwrap();
        assert_eq!((second.layout().copied, second.layout().rotated), (1, 2));
        assert!(bytes(&first) + bytes(&second) <= MOST);
        assert!(BatchedPlan::within(layer(1408, &[2048]), Conditions::LAN, 100_000_000).is_err());
        // Never more than once each column: a link that slow decides for bytes.
        let slow = Conditions { bytes_per_second: 1e6, cores: 2.0 };
        let least = BatchedPlan::new(layer(2048, &[1408, 1408]), slow).unwrap();
        assert_eq!((least.layout().copied, least.layout().partial), (1, 1));
    }

    #[test]
    fn plans_exist_for_every_shape_that_is_promised() {
        for (experts, tokens, columns_in, columns_out) in [
            (64, 32, 2048, 1408),
            (64, 24, 1408, 2048),
            (8, 128, 4096, 14336),
            (1, 4096, 16384, 4096),
            (64, 1, 2048, 1408),
        ] {
            let shape = BatchedShape { experts, tokens, columns_in, columns_out: vec![columns_out] };
            let plan = BatchedPlan::new(shape, Conditions::LAN).unwrap();
            assert!(plan.segments().last().unwrap().end * plan.layout().columns_in() >= columns_in);
        }
        assert!(BatchedPlan::new(layer(0, &[1]), Conditions::LAN).is_err());
        let rows = BatchedShape { experts: 1, tokens: 4097, columns_in: 1, columns_out: vec![1] };
        assert!(BatchedPlan::new(rows, Conditions::LAN).is_err());
    }
}
