//! Where every value of a batched product sits: slots of a ciphertext, columns, sums and their shifts.
//!
//! The slots of a ciphertext are rows s = 0, 1 of i in [0, N/2): slot (s, i) is the evaluation at zeta^(±5^i). Raising X to
//! the power 5^r shifts each row left by r; raising it to -1 swaps the rows. With t' tokens a row splits into M = N / (2 t')
//! *cosets* i mod M, each holding the t' tokens of one expert and column block, and a weight that is the same for all
//! tokens is a polynomial in Y = X^t': constant on cosets, A = N / t' = 2 M coefficients.
//!
//! A coset is (s, e, b): expert e, column block b = rotated + B * (copied + R * partial). The three kinds of block:
//! * *rotated*: input and output both hold B columns. A weight for shift r meets input block b and belongs to output block
//!   b - r. What would leave [0, B) is zero, because it would move to the next token; so B dense products cost 2 B - 1.
//! * *copied*: the input holds each column R times, so each copy meets the weights of a different output column.
//! * *partial*: the output holds Q partial sums of each column, which the client adds after decryption.
//!
//! The row s plays any of these parts, or holds more experts; as a rotated block it costs nothing extra, since the swap
//! has no edge.

use crate::error::{Error, Result};

/// What the two rows of a ciphertext hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowUse {
    /// Different experts.
    Experts,
    /// Different columns on both sides; sums are rotated.
    Rotated,
    /// The same input columns twice.
    Copied,
    /// Two partial sums of the same output column.
    Partial,
}

/// The shape of the ciphertexts of one batched product. All sizes are powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Ring degree.
    pub degree: usize,
    /// Token slots of one expert, t'.
    pub tokens: usize,
    /// Experts in one row of a ciphertext.
    pub experts: usize,
    /// What the rows hold.
    pub rows: RowUse,
    /// Rotated blocks in a row, B.
    pub rotated: usize,
    /// Copied blocks in a row, R.
    pub copied: usize,
    /// Partial blocks in a row, Q.
    pub partial: usize,
}

/// One coset of slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coset {
    /// Expert inside the group.
    pub expert: usize,
    /// Which of the ciphertext's input columns stands here.
    pub column_in: usize,
    /// Which of the ciphertext's output columns stands here.
    pub column_out: usize,
}

/// A set of sums that is rotated as a whole: swap the rows or not, shift the rows left by `shift` rotated blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shift {
    /// Whether the rows are swapped.
    pub swap: bool,
    /// By how many rotated blocks the rows are shifted left; negative is right.
    pub shift: isize,
}

impl Layout {
    /// Checks that the parts fill a ciphertext.
    pub fn new(self) -> Result<Self> {
        let parts = [self.degree, self.tokens, self.experts, self.rotated, self.copied, self.partial];
        let fills =
            parts.iter().all(|p| p.is_power_of_two()) && 2 * self.tokens * self.experts * self.blocks() == self.degree;
        if fills {
            Ok(self)
        } else {
            Err(Error::BadArgument("the parts of this layout do not fill a ciphertext".into()))
        }
    }

    /// Blocks in a row.
    pub fn blocks(&self) -> usize {
        self.rotated * self.copied * self.partial
    }

    /// Cosets of a ciphertext, which is also the number of coefficients of a weight polynomial.
    pub fn cosets(&self) -> usize {
        self.degree / self.tokens
    }

    /// Experts in a ciphertext.
    pub fn experts_in_ciphertext(&self) -> usize {
        self.experts * if self.rows == RowUse::Experts { 2 } else { 1 }
    }

    /// Input columns in a ciphertext.
    pub fn columns_in(&self) -> usize {
        self.rotated * self.partial * if matches!(self.rows, RowUse::Rotated | RowUse::Partial) { 2 } else { 1 }
    }

    /// Output columns in a ciphertext.
    pub fn columns_out(&self) -> usize {
        self.rotated * self.copied * if matches!(self.rows, RowUse::Rotated | RowUse::Copied) { 2 } else { 1 }
    }

    /// How many partial sums of one output column an answer holds.
    pub fn partial_sums(&self) -> usize {
        self.partial * if self.rows == RowUse::Partial { 2 } else { 1 }
    }

    /// The shifts that have sums of their own, the unshifted ones first.
    pub fn shifts(&self) -> Vec<Shift> {
        let b = self.rotated as isize;
        let swaps: &[bool] = if self.rows == RowUse::Rotated { &[false, true] } else { &[false] };
        let each = |&swap: &bool| (0..b).chain(1 - b..0).map(move |shift| Shift { swap, shift });
        swaps.iter().flat_map(each).collect()
    }

    /// The coset of row `s` that starts at slot `i`, i in [0, M).
    pub fn coset(&self, s: usize, i: usize) -> Coset {
        let (e, b) = (i % self.experts, i / self.experts);
        let (rotated, copied, partial) =
            (b % self.rotated, b / self.rotated % self.copied, b / self.rotated / self.copied);
        let row = |used: bool| if used { s } else { 0 };
        Coset {
            expert: e + self.experts * row(self.rows == RowUse::Experts),
            column_in: rotated
                + self.rotated * (partial + self.partial * row(matches!(self.rows, RowUse::Rotated | RowUse::Partial))),
            column_out: rotated
                + self.rotated * (copied + self.copied * row(matches!(self.rows, RowUse::Rotated | RowUse::Copied))),
        }
    }

    /// Which (expert, output column, input column) the weight for `shift` in coset (s, i) is; none where the sum would
    /// leave its blocks, and the weight is zero.
    pub fn weight(&self, shift: Shift, s: usize, i: usize) -> Option<Coset> {
        let b = (i / self.experts % self.rotated) as isize;
        let target = b - shift.shift;
        if target < 0 || target >= self.rotated as isize {
            return None;
        }
        let moved = (i as isize - shift.shift * self.experts as isize) as usize;
        let to = self.coset(if shift.swap { 1 - s } else { s }, moved);
        Some(Coset { column_out: to.column_out, ..self.coset(s, i) })
    }

    /// By how many slots a row is shifted for one rotated block.
    pub fn slots_in_block(&self) -> usize {
        self.experts
    }

    /// The slot of a row at which token `token` of the coset that starts at `i` stands.
    pub fn slot(&self, i: usize, token: usize) -> usize {
        i + token * self.cosets() / 2
    }
}

/// The number whose `bits` low bits are those of k reversed.
pub fn reverse_bits(k: usize, bits: u32) -> usize {
    if bits == 0 { 0 } else { k.reverse_bits() >> (usize::BITS - bits) }
}

/// Where slot (s, i) stands in the bit-reversed order of a negacyclic transform of `size` points, whose place k holds the
/// evaluation at the (2 brv(k) + 1)-th power of the root: 5^i or -5^i mod 2 size is that power.
pub fn places(size: usize) -> [Vec<usize>; 2] {
    let (bits, order) = (size.trailing_zeros(), 2 * size);
    let mut power = 1usize;
    let mut rows = [Vec::with_capacity(size / 2), Vec::with_capacity(size / 2)];
    for _ in 0..size / 2 {
        rows[0].push(reverse_bits((power - 1) / 2, bits));
        rows[1].push(reverse_bits((order - power - 1) / 2, bits));
        power = power * 5 % order;
    }
    rows
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Every layout of this degree for this many token slots.
    pub fn all(degree: usize, tokens: usize) -> Vec<Layout> {
        let powers = |most: usize| (0..).map(|k| 1usize << k).take_while(move |&p| p <= most);
        let cosets = degree / tokens / 2;
        let mut found = Vec::new();
        for rows in [RowUse::Experts, RowUse::Rotated, RowUse::Copied, RowUse::Partial] {
            for rotated in powers(cosets) {
                for copied in powers(cosets / rotated) {
                    for partial in powers(cosets / rotated / copied) {
                        let experts = cosets / rotated / copied / partial;
                        let layout = Layout { degree, tokens, experts, rows, rotated, copied, partial };
                        found.push(layout.new().unwrap());
                    }
                }
            }
        }
        found
    }

    #[test]
    fn every_weight_is_met_exactly_once_and_lands_where_it_belongs() {
        for layout in all(64, 4) {
            let m = layout.cosets() / 2;
            let mut met = std::collections::HashMap::new();
            for shift in layout.shifts() {
                for s in 0..2 {
                    for i in 0..m {
                        let Some(w) = layout.weight(shift, s, i) else { continue };
                        assert_eq!((w.expert, w.column_in), {
                            let c = layout.coset(s, i);
                            (c.expert, c.column_in)
                        });
                        // Where a left shift takes the slot, for every token.
                        let to = (i as isize - shift.shift * layout.slots_in_block() as isize) as usize;
                        let row = s ^ usize::from(shift.swap);
                        let there = layout.coset(row, to);
                        assert_eq!((there.expert, there.column_out), (w.expert, w.column_out));
                        for token in 0..layout.tokens {
                            let from = layout.slot(i, token) as isize;
                            let moved = (from - shift.shift * layout.slots_in_block() as isize) as usize;
                            assert_eq!(moved, layout.slot(to, token), "the token changes");
                        }
                        *met.entry((w.expert, w.column_out, w.column_in)).or_insert(0) += 1;
                    }
                }
            }
            let all = layout.experts_in_ciphertext() * layout.columns_in() * layout.columns_out();
            assert_eq!(met.len(), all, "{layout:?}");
            assert!(met.values().all(|&n| n == 1), "{layout:?}");
        }
    }

    #[test]
    fn places_of_a_coset_are_neighbours() {
        let (large, small) = (places(64), places(16));
        for s in 0..2 {
            for i in 0..32 {
                assert_eq!(large[s][i] / 4, small[s][i % 8], "slots with the same Y share a block");
            }
        }
    }

    #[test]
    fn four_columns_in_a_ciphertext_cost_six_products() {
        let layout = |rows, rotated, copied| {
            Layout { degree: 8192, tokens: 32, experts: 64, rows, rotated, copied, partial: 1 }.new().unwrap()
        };
        assert_eq!(layout(RowUse::Rotated, 2, 1).shifts().len(), 6);
        assert_eq!(layout(RowUse::Rotated, 1, 2).shifts().len(), 2);
    }
}
