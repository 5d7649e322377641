//! The server's weights, held as compactly as the caller has them, and their way into the kernel.

use super::kernel_transform::SIDE;
use super::layout::{Coset, Layout, Shift, places};
use crate::error::{Error, Result};

/// Fixed-point numbers of either width.
#[derive(Clone, Copy)]
pub enum Numbers<'a> {
    /// 16 bits each.
    I16(&'a [i16]),
    /// 32 bits each.
    I32(&'a [i32]),
}

/// One weight matrix for each expert: `[expert][output column][input column]`.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    numbers: Numbers<'a>,
    experts: usize,
    columns_out: usize,
    columns_in: usize,
}

impl<'a> ExpertWeights<'a> {
    /// Weights of this shape; the most negative 32-bit number is not one of them.
    pub fn new(numbers: Numbers<'a>, experts: usize, columns_out: usize, columns_in: usize) -> Result<Self> {
        let have = match numbers {
            Numbers::I16(n) => n.len(),
            Numbers::I32(n) => n.len(),
        };
        let want = experts.checked_mul(columns_out).and_then(|n| n.checked_mul(columns_in));
        if want != Some(have) {
            return Err(Error::BadArgument(format!(
                "{have} weights where {experts} x {columns_out} x {columns_in} were expected"
            )));
        }
        if matches!(numbers, Numbers::I32(n) if n.contains(&i32::MIN)) {
            return Err(Error::BadArgument("a weight is the most negative 32-bit number".into()));
        }
        Ok(Self { numbers, experts, columns_out, columns_in })
    }

    /// (experts, output columns, input columns).
    pub fn shape(&self) -> (usize, usize, usize) {
        (self.experts, self.columns_out, self.columns_in)
    }

    /// Bits of the numbers, sign included.
    pub(super) fn bits(&self) -> u32 {
        match self.numbers {
            Numbers::I16(_) => 16,
            Numbers::I32(_) => 32,
        }
    }

    /// Part of one row of one expert's matrix as doubles, from input column `from` on.
    pub(super) fn row(&self, expert: usize, column_out: usize, from: usize, into: &mut [f64]) {
        let start = (expert * self.columns_out + column_out) * self.columns_in + from;
        let range = start..start + into.len();
        match self.numbers {
            Numbers::I16(n) => into.iter_mut().zip(&n[range]).for_each(|(x, &w)| *x = f64::from(w)),
            Numbers::I32(n) => into.iter_mut().zip(&n[range]).for_each(|(x, &w)| *x = f64::from(w)),
        }
    }
}

/// One row of the kernel: the sums of one shift of one output ciphertext.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Which of the matrices of the product.
    pub matrix: usize,
    /// The group of experts.
    pub group: usize,
    /// The output ciphertext of that matrix and group.
    pub output: usize,
    /// The index of the shift in [`Layout::shifts`].
    pub shift: usize,
}

/// A slot of a weight polynomial that is not always zero.
#[derive(Clone, Copy)]
struct Source {
    /// Index of the slot among `[place][row]`.
    slot: usize,
    coset: Coset,
}

/// Fills slots of weight polynomials from the matrices.
pub(super) struct Gather {
    columns_in: usize,
    columns_out: usize,
    experts: usize,
    /// For each shift, the slots that hold a weight; the others are zero.
    sources: Vec<Vec<Source>>,
    /// For each matrix and shift the same slots, and how far their weights are from that of the first expert and columns.
    offsets: Vec<Vec<Vec<(usize, usize)>>>,
}

impl Gather {
    pub fn new(layout: &Layout, weights: &[ExpertWeights]) -> Self {
        let size = layout.cosets();
        let places = places(size);
        let of = |shift: Shift| {
            let all = (0..2).flat_map(|s| (0..size / 2).map(move |i| (s, i)));
            let source =
                |(s, i): (usize, usize)| Some(Source { slot: places[s][i] * SIDE, coset: layout.weight(shift, s, i)? });
            let mut found: Vec<Source> = all.filter_map(source).collect();
            // Neighbours in memory one after another.
            found.sort_by_key(|f| (f.coset.expert, f.coset.column_out, f.coset.column_in));
            found
        };
        let sources: Vec<Vec<Source>> = layout.shifts().into_iter().map(of).collect();
        let of_matrix = |m: &ExpertWeights| -> Vec<Vec<(usize, usize)>> {
            let offset = |c: &Coset| (c.expert * m.columns_out + c.column_out) * m.columns_in + c.column_in;
            sources.iter().map(|all| all.iter().map(|s| (s.slot, offset(&s.coset))).collect()).collect()
        };
        Self {
            columns_in: layout.columns_in(),
            columns_out: layout.columns_out(),
            experts: layout.experts_in_ciphertext(),
            offsets: weights.iter().map(of_matrix).collect(),
            sources,
        }
    }

    /// The slots of the weight polynomials of up to eight rows and input ciphertext `input`: `[place][row]`. Columns and
    /// experts beyond the matrix are zero, and so are missing rows. Only public sizes decide what is read.
    pub fn slots(&self, weights: &[ExpertWeights], rows: &[Row], input: usize, slots: &mut [f64]) {
        slots.fill(0.0);
        for (side, row) in rows.iter().enumerate().take(SIDE) {
            let matrix = &weights[row.matrix];
            let first = [row.group * self.experts, row.output * self.columns_out, input * self.columns_in];
            let end = [first[0] + self.experts, first[1] + self.columns_out, first[2] + self.columns_in];
            let start = (first[0] * matrix.columns_out + first[1]) * matrix.columns_in + first[2];
            let offsets = &self.offsets[row.matrix][row.shift];
            let slots = &mut slots[side..];
            if end[0] <= matrix.experts && end[1] <= matrix.columns_out && end[2] <= matrix.columns_in {
                match matrix.numbers {
                    Numbers::I16(n) => fill(offsets, &n[start..], slots),
                    Numbers::I32(n) => fill(offsets, &n[start..], slots),
                }
                continue;
            }
            for (source, &(slot, offset)) in self.sources[row.shift].iter().zip(offsets) {
                if first[0] + source.coset.expert < matrix.experts
                    && first[1] + source.coset.column_out < matrix.columns_out
                    && first[2] + source.coset.column_in < matrix.columns_in
                {
                    slots[slot] = match matrix.numbers {
                        Numbers::I16(n) => f64::from(n[start + offset]),
                        Numbers::I32(n) => f64::from(n[start + offset]),
                    };
                }
            }
        }
    }
}

#[inline]
fn fill<T: Copy + Into<f64>>(offsets: &[(usize, usize)], numbers: &[T], slots: &mut [f64]) {
    for &(slot, offset) in offsets {
        slots[slot] = numbers[offset].into();
    }
}
