//! Arrays across the boundary: C-contiguous buffers come in as copies (those of a router in place), results go out as
//! byte arrays that NumPy reads without another copy. A share is uniformly random, so a copy of one reveals nothing that
//! the caller does not hold.

use crate::error::raise;
use cloister_core::Error;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// The elements of a contiguous buffer.
pub fn vector<T: Element + Default>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<T>> {
    if !buffer.is_c_contiguous() {
        return Err(raise(Error::BadArgument("an array must be C-contiguous".into())));
    }
    let mut out = cloister_core::pages::zeros(buffer.item_count());
    buffer.copy_to_slice(py, &mut out)?;
    Ok(out)
}

/// The same in place, for as long as the interpreter lock is held: for arrays that no other thread writes meanwhile.
pub fn view<'a, T: Element>(_py: Python<'_>, buffer: &'a PyBuffer<T>) -> PyResult<&'a [T]> {
    if !buffer.is_c_contiguous() {
        return Err(raise(Error::BadArgument("an array must be C-contiguous".into())));
    }
    match buffer.item_count() {
        0 => Ok(&[]), // such a buffer may have no pointer
        // SAFETY: a contiguous buffer has `item_count` elements of its type behind its pointer for as long as the
        // `PyBuffer` lives, and `Element` promises that any bytes are one.
        count => Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<T>().cast_const(), count) }),
    }
}

/// Field elements from Python, checked to be below p: everything behind this door relies on it.
pub fn field(py: Python<'_>, buffer: &PyBuffer<u64>) -> PyResult<Vec<u64>> {
    let values = vector(py, buffer)?;
    if values.iter().any(|&v| v >= cloister_core::field::P) {
        return Err(raise(Error::BadArgument("a share is not below the prime".into())));
    }
    Ok(values)
}

/// Bits from Python, checked to be 0 or 1.
pub fn bits(py: Python<'_>, buffer: &PyBuffer<u8>) -> PyResult<Vec<u8>> {
    let values = vector(py, buffer)?;
    if values.iter().any(|&v| v > 1) {
        return Err(raise(Error::BadArgument("a bit share is neither 0 nor 1".into())));
    }
    Ok(values)
}

/// Numbers as bytes, each by its `to_ne_bytes`.
pub fn numbers<'py, const WIDE: usize, T: Copy>(
    py: Python<'py>,
    values: &[T],
    bytes: impl Fn(T) -> [u8; WIDE],
) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_with(py, values.len() * WIDE, |out| {
        out.chunks_exact_mut(WIDE).zip(values).for_each(|(to, value)| to.copy_from_slice(&bytes(*value)));
        Ok(())
    })
}

/// 64-bit words as bytes.
pub fn words<'py>(py: Python<'py>, values: &[u64]) -> PyResult<Bound<'py, PyByteArray>> {
    numbers(py, values, u64::to_ne_bytes)
}

/// Signed 64-bit words as bytes.
pub fn signed<'py>(py: Python<'py>, values: &[i64]) -> PyResult<Bound<'py, PyByteArray>> {
    numbers(py, values, i64::to_ne_bytes)
}

/// Bits as bytes.
pub fn flags<'py>(py: Python<'py>, values: &[u8]) -> Bound<'py, PyByteArray> {
    PyByteArray::new(py, values)
}
