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

/// Where a slot's weight comes from, relative to a row and an input ciphertext.
struct Source {
    place: usize,
    coset: Coset,
}

/// Fills slots of weight polynomials from the matrices.
pub(super) struct Gather {
    columns_in: usize,
    columns_out: usize,
    experts: usize,
    /// For each shift, the slots that hold a weight; the others are zero.
    sources: Vec<Vec<Source>>,
}

impl Gather {
    pub fn new(layout: &Layout) -> Self {
        let size = layout.cosets();
        let places = places(size);
        let of = |shift: Shift| {
            let all = (0..2).flat_map(|s| (0..size / 2).map(move |i| (s, i)));
            let mut found: Vec<Source> = all
                .filter_map(|(s, i)| layout.weight(shift, s, i).map(|coset| Source { place: places[s][i], coset }))
                .collect();
            // Neighbours in memory one after another.
            found.sort_by_key(|f| (f.coset.expert, f.coset.column_out, f.coset.column_in));
            found
        };
        Self {
            columns_in: layout.columns_in(),
            columns_out: layout.columns_out(),
            experts: layout.experts_in_ciphertext(),
            sources: layout.shifts().into_iter().map(of).collect(),
        }
    }

    /// The slots of the weight polynomials of up to eight rows and input ciphertext `input`: `[place][row]`. Columns and
    /// experts beyond the matrix are zero, and so are missing rows.
    pub fn slots(&self, weights: &[ExpertWeights], rows: &[Row], input: usize, slots: &mut [f64]) {
        slots.fill(0.0);
        for (side, row) in rows.iter().enumerate().take(SIDE) {
            let matrix = &weights[row.matrix];
            let (first_expert, first_out) = (row.group * self.experts, row.output * self.columns_out);
            let first_in = input * self.columns_in;
            for source in &self.sources[row.shift] {
                let (e, o, c) = (
                    first_expert + source.coset.expert,
                    first_out + source.coset.column_out,
                    first_in + source.coset.column_in,
                );
                // Only public sizes are compared here.
                if e < matrix.experts && o < matrix.columns_out && c < matrix.columns_in {
                    let at = (e * matrix.columns_out + o) * matrix.columns_in + c;
                    slots[source.place * SIDE + side] = match matrix.numbers {
                        Numbers::I16(n) => f64::from(n[at]),
                        Numbers::I32(n) => f64::from(n[at]),
                    };
                }
            }
        }
    }
}
