//! Routing for Python: a block's inputs in, each token's expert out.

use crate::convert::{numbers, signed, view};
use crate::error::raise;
use cloister_core::Error;
use cloister_routing::{BadShape, Choice, Context, Pass};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

fn bad(error: BadShape) -> PyErr {
    raise(Error::BadArgument(error.to_string()))
}

/// The numbers of an array that is to be written, for as long as the interpreter lock is held.
fn writable<'a>(_py: Python<'_>, buffer: &'a mut PyBuffer<f32>) -> PyResult<&'a mut [f32]> {
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(raise(Error::BadArgument("the result must be C-contiguous and writable".into())));
    }
    match buffer.item_count() {
        0 => Ok(&mut []), // such a buffer may have no pointer
        // SAFETY: a contiguous, writable buffer has `item_count` numbers behind its pointer for as long as the
        // `PyBuffer` lives, and whoever calls this has no other slice of that memory.
        count => Ok(unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<f32>(), count) }),
    }
}

/// Where every token of a pass goes.
#[pyclass(frozen)]
pub struct Routed(Choice);

/// One expert for every real token. `rows` are [sequences x tokens, hidden], `vectors` [experts, hidden]; `context` is
/// "none", "sequence" or "prefix"; `real` has a byte a token; `earlier` is [sequences, experts + 1], the last sums.
#[pyfunction]
#[pyo3(signature = (rows, vectors, hidden, tokens, context, blend, real=None, earlier=None))]
pub fn choose_experts(
    py: Python<'_>,
    rows: PyBuffer<f32>,
    vectors: PyBuffer<f32>,
    hidden: usize,
    tokens: usize,
    context: &str,
    blend: f32,
    real: Option<PyBuffer<u8>>,
    earlier: Option<PyBuffer<f32>>,
) -> PyResult<Routed> {
    let context = match context {
        "none" => Context::None,
        "sequence" => Context::Sequence,
        "prefix" => Context::Prefix,
        _ => return Err(raise(Error::BadArgument(format!("there is no context {context:?}")))),
    };
    let (rows, vectors) = (view(py, &rows)?, view(py, &vectors)?);
    if hidden == 0 || !rows.len().is_multiple_of(hidden) || !vectors.len().is_multiple_of(hidden) {
        return Err(raise(Error::BadArgument("inputs and vectors must be of whole rows".into())));
    }
    let scores = cloister_routing::scores(rows, vectors, hidden);
    let (real, earlier) = (real.as_ref().map(|real| view(py, real)), earlier.as_ref().map(|sums| view(py, sums)));
    let (real, earlier) = (real.transpose()?, earlier.transpose()?);
    let experts = vectors.len() / hidden;
    let pass = Pass { scores: &scores, tokens, experts, context, blend, real, earlier };
    cloister_routing::choose(&pass).map(Routed).map_err(bad)
}

#[pymethods]
impl Routed {
    /// How many tokens there are, padding too.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.order.len()
    }

    /// How many tokens each expert gets.
    #[getter]
    fn counts(&self) -> Vec<usize> {
        self.0.counts.clone()
    }

    /// The expert that gets every token, if there is one.
    #[getter]
    fn alone(&self) -> Option<usize> {
        self.0.counts.iter().position(|count| *count == self.0.order.len())
    }

    /// Tokens sorted by expert, padding at the end: 64-bit numbers.
    fn order<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        signed(py, &self.0.order)
    }

    /// The weight of each token's expert: single precision.
    fn weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        numbers(py, &self.0.weights, f32::to_ne_bytes)
    }

    /// [sequences x tokens, experts + 1] running sums of a prefix: single precision; empty without one.
    fn sums<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        numbers(py, &self.0.sums, f32::to_ne_bytes)
    }

    /// Writes the experts' outputs, each times its token's weight, where the tokens were: into `out`, [tokens, `width`].
    fn gather(&self, py: Python<'_>, parts: Vec<PyBuffer<f32>>, width: usize, mut out: PyBuffer<f32>) -> PyResult<()> {
        let (first, last) = (out.buf_ptr() as usize, out.buf_ptr() as usize + out.len_bytes());
        let inside = |part: &PyBuffer<f32>| {
            let begun = part.buf_ptr() as usize;
            begun < last && first < begun + part.len_bytes()
        };
        if parts.iter().any(inside) {
            return Err(raise(Error::BadArgument("the result must not lie where an output lies".into())));
        }
        let parts: Vec<&[f32]> = parts.iter().map(|part| view(py, part)).collect::<PyResult<_>>()?;
        self.0.gather(&parts, width, writable(py, &mut out)?).map_err(bad)
    }
}
