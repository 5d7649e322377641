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
#[allow(clippy::mut_from_ref)] // the buffer is a handle: what it points at is Python's
fn writable<'a>(_py: Python<'_>, buffer: &'a PyBuffer<f32>) -> PyResult<&'a mut [f32]> {
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

/// What the routers of one forward pass have in common, and where they write.
#[pyclass(frozen)]
pub struct Routing {
    context: Context,
    tokens: usize,
    layers: usize,
    weights: PyBuffer<f32>,
    real: Option<PyBuffer<u8>>,
    earlier: Option<PyBuffer<f32>>,
    sums: Option<PyBuffer<f32>>,
}

#[pymethods]
impl Routing {
    /// `context` is "none", "sequence" or "prefix". `weights` is for the weight of each token's expert, a number a
    /// token, until the next router chooses; `real` has a byte a token; `earlier` is [sequences, layers x (experts +
    /// 1)], the last sums of a prefix before this pass, and `sums` is for those of this pass: [sequences x tokens,
    /// layers x (experts + 1)].
    #[new]
    #[pyo3(signature = (context, tokens, layers, weights, real=None, earlier=None, sums=None))]
    fn new(
        context: &str,
        tokens: usize,
        layers: usize,
        weights: PyBuffer<f32>,
        real: Option<PyBuffer<u8>>,
        earlier: Option<PyBuffer<f32>>,
        sums: Option<PyBuffer<f32>>,
    ) -> PyResult<Self> {
        let context = match context {
            "none" => Context::None,
            "sequence" => Context::Sequence,
            "prefix" => Context::Prefix,
            _ => return Err(raise(Error::BadArgument(format!("there is no context {context:?}")))),
        };
        Ok(Self { context, tokens, layers, weights, real, earlier, sums })
    }

    /// One expert for every real token. `rows` are [sequences x tokens, hidden], `vectors` [experts, hidden] those of
    /// the router of this `layer`; `blend` is the context's part in the scores before the sigmoid.
    fn choose(
        &self,
        py: Python<'_>,
        rows: PyBuffer<f32>,
        vectors: PyBuffer<f32>,
        blend: f32,
        layer: usize,
    ) -> PyResult<Routed> {
        let &[experts, hidden] = vectors.shape() else {
            return Err(raise(Error::BadArgument("the vectors must have two dimensions".into())));
        };
        if hidden == 0 || !rows.item_count().is_multiple_of(hidden) {
            return Err(raise(Error::BadArgument("inputs and vectors must be of whole rows".into())));
        }
        let part = Part { layer, layers: self.layers, wide: experts + 1 };
        let earlier = self.earlier.as_ref().map(|sums| part.taken(view(py, sums)?)).transpose()?;
        let scores = cloister_routing::scores(view(py, &rows)?, view(py, &vectors)?, hidden);
        let real = self.real.as_ref().map(|real| view(py, real)).transpose()?;
        let (tokens, context, earlier) = (self.tokens, self.context, earlier.as_deref());
        let choice =
            cloister_routing::choose(&Pass { scores: &scores, tokens, experts, context, blend, real, earlier })
                .map_err(bad)?;
        // No slice of the inputs is used from here on: what is written may lie where one of them lay.
        let weights = writable(py, &self.weights)?;
        if weights.len() != choice.weights.len() {
            return Err(raise(Error::BadArgument("one weight a token is needed".into())));
        }
        weights.copy_from_slice(&choice.weights);
        if let Some(sums) = &self.sums {
            part.put(&choice.sums, writable(py, sums)?)?;
        }
        Ok(Routed(choice))
    }
}

/// The place of one router's sums in those of all.
struct Part {
    layer: usize,
    layers: usize,
    wide: usize,
}

impl Part {
    /// The numbers of one row of all routers' sums, if whole rows are what there is.
    fn row(&self, numbers: usize) -> PyResult<usize> {
        match self.layers.checked_mul(self.wide) {
            Some(row) if self.layer < self.layers && numbers.is_multiple_of(row) => Ok(row),
            _ => Err(raise(Error::BadArgument("sums of all layers are needed, in whole rows".into()))),
        }
    }

    fn taken(&self, all: &[f32]) -> PyResult<Vec<f32>> {
        let (row, begun) = (self.row(all.len())?, self.layer * self.wide);
        Ok(all.chunks_exact(row).flat_map(|one| &one[begun..begun + self.wide]).copied().collect())
    }

    fn put(&self, own: &[f32], all: &mut [f32]) -> PyResult<()> {
        let (row, begun) = (self.row(all.len())?, self.layer * self.wide);
        if all.len() / row * self.wide != own.len() {
            return Err(raise(Error::BadArgument("room for one row of sums a token is needed".into())));
        }
        for (to, from) in all.chunks_exact_mut(row).zip(own.chunks_exact(self.wide)) {
            to[begun..begun + self.wide].copy_from_slice(from);
        }
        Ok(())
    }
}

/// Where every token of a pass goes.
#[pyclass(frozen)]
pub struct Routed(Choice);

#[pymethods]
impl Routed {
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

    /// Writes the experts' outputs, each times its token's weight, where the tokens were: into `out`, [tokens, `width`].
    fn gather(&self, py: Python<'_>, parts: Vec<PyBuffer<f32>>, width: usize, out: PyBuffer<f32>) -> PyResult<()> {
        let (first, last) = (out.buf_ptr() as usize, out.buf_ptr() as usize + out.len_bytes());
        let inside = |part: &PyBuffer<f32>| {
            let begun = part.buf_ptr() as usize;
            begun < last && first < begun + part.len_bytes()
        };
        if parts.iter().any(inside) {
            return Err(raise(Error::BadArgument("the result must not lie where an output lies".into())));
        }
        let parts: Vec<&[f32]> = parts.iter().map(|part| view(py, part)).collect::<PyResult<_>>()?;
        self.0.gather(&parts, width, writable(py, &out)?).map_err(bad)
    }
}
