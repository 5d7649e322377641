//! The matrix on the right of a product, borrowed from whoever holds it: small integers or field elements.

use crate::error::{Error, Result};
use crate::field::{self, P_BITS};

#[derive(Clone, Copy)]
enum Entries<'a> {
    Bits16(&'a [i16]),
    Bits32(&'a [i32]),
    Field(&'a [u64]),
}

/// A matrix of `rows` x `columns`, row after row, borrowed. Secret: it has no `Debug`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    rows: usize,
    columns: usize,
    bits: u32,
    entries: Entries<'a>,
}

impl<'a> Matrix<'a> {
    /// Weights of 16 bits.
    pub fn from_i16(rows: usize, columns: usize, entries: &'a [i16]) -> Result<Self> {
        check(rows, columns, entries.len())?;
        Ok(Self { rows, columns, bits: 16, entries: Entries::Bits16(entries) })
    }

    /// Weights in [-2^(bits - 1), 2^(bits - 1)), `bits` at most 24.
    pub fn from_i32(rows: usize, columns: usize, bits: u32, entries: &'a [i32]) -> Result<Self> {
        check(rows, columns, entries.len())?;
        if !(1..=24).contains(&bits) {
            return Err(Error::Unsupported(format!("weights of {bits} bits; at most 24")));
        }
        let bound = 1i32 << (bits - 1);
        if entries.iter().any(|&w| w < -bound || w >= bound) {
            return Err(Error::BadArgument(format!("a weight does not fit {bits} bits")));
        }
        Ok(Self { rows, columns, bits, entries: Entries::Bits32(entries) })
    }

    /// Field elements of full size: a share.
    pub fn from_field(rows: usize, columns: usize, entries: &'a [u64]) -> Result<Self> {
        check(rows, columns, entries.len())?;
        if entries.iter().any(|&w| w >= field::P) {
            return Err(Error::BadArgument("a share is not below p".into()));
        }
        Ok(Self { rows, columns, bits: P_BITS as u32, entries: Entries::Field(entries) })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bits of an entry, sign included.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// The signed entries `from..from + out.len()` of one row.
    pub(super) fn read(&self, row: usize, from: usize, out: &mut [i64]) {
        let at = row * self.columns + from;
        let n = out.len();
        match self.entries {
            Entries::Bits16(e) => out.iter_mut().zip(&e[at..at + n]).for_each(|(o, &e)| *o = i64::from(e)),
            Entries::Bits32(e) => out.iter_mut().zip(&e[at..at + n]).for_each(|(o, &e)| *o = i64::from(e)),
            Entries::Field(e) => out.iter_mut().zip(&e[at..at + n]).for_each(|(o, &e)| {
                // Centred without a branch: shares are secret.
                let over = (field::P / 2).wrapping_sub(e) >> 63;
                *o = e as i64 - (field::P & over.wrapping_neg()) as i64;
            }),
        }
    }
}

fn check(rows: usize, columns: usize, entries: usize) -> Result<()> {
    if rows.checked_mul(columns) == Some(entries) {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("{entries} entries where {rows} x {columns} were expected")))
    }
}

/// The transpose of a row-major matrix of field elements.
pub(crate) fn transpose(rows: usize, columns: usize, entries: &[u64]) -> Vec<u64> {
    debug_assert_eq!(entries.len(), rows * columns);
    let mut out = vec![0; entries.len()];
    for (i, row) in entries.chunks_exact(columns.max(1)).enumerate() {
        for (j, &e) in row.iter().enumerate() {
            out[j * rows + i] = e;
        }
    }
    out
}
