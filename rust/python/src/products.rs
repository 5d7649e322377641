//! Products with weights that the server passes, whole or prepared ahead, and of shared matrices.

use crate::convert::{field, vector, words};
use crate::error::raise;
use crate::party::Party;
use crate::progress::Raised;
use cloister_core::Error;
use cloister_core::engine::ahead::{FetchWeights, expert_weights};
use cloister_core::engine::{Layer, LayerWeights, Linear};
use cloister_core::matmul::single::Shape;
use cloister_core::matmul::{BatchedShape, shared::Pair};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::sync::Mutex;

/// Products with weights that the server passes, and of shared matrices.
#[pymethods]
impl Party {
    /// (rows x columns) times the server's (columns x outputs).
    /// `prepared` names the layer whose preparation is used, if one is left.
    #[pyo3(signature = (x, rows, columns, outputs, weight_bits, weights, prepared))]
    fn product<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        rows: usize,
        columns: usize,
        outputs: usize,
        weight_bits: u32,
        weights: Option<PyBuffer<i32>>,
        prepared: Option<&str>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let weights = weights.map(|w| vector(py, &w)).transpose()?;
        let shape = Shape { rows, columns, outputs };
        let out = self.run(py, |engine| engine.product(&x, shape, weight_bits, weights.as_deref(), prepared))?;
        words(py, &out)
    }

    /// `[expert][token][column]` times each of the server's matrices `[expert][output][column]` of 16-bit numbers.
    #[pyo3(signature = (x, experts, tokens, columns, outputs, weights, most_bytes, prepared))]
    fn batched_product<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        experts: usize,
        tokens: usize,
        columns: usize,
        outputs: Vec<usize>,
        weights: Option<Vec<PyBuffer<i16>>>,
        most_bytes: Option<usize>,
        prepared: Option<&str>,
    ) -> PyResult<Vec<Bound<'py, PyByteArray>>> {
        let x = field(py, &x)?;
        let weights: Option<Vec<Vec<i16>>> =
            weights.map(|all| all.iter().map(|w| vector(py, w)).collect()).transpose()?;
        let shape = BatchedShape { experts, tokens, columns_in: columns, columns_out: outputs };
        let out = self.run(py, |engine| {
            let matrices = weights.as_ref().map(|all| expert_weights(&shape, all)).transpose()?;
            engine.batched_product(&x, shape.clone(), most_bytes, matrices.as_deref(), prepared)
        })?;
        out.iter().map(|share| words(py, share)).collect()
    }

    /// `count` products (rows x columns) times (columns x outputs) of shared matrices, one after another in x and y.
    fn shared_products<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        y: PyBuffer<u64>,
        count: usize,
        rows: usize,
        columns: usize,
        outputs: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let (x, y) = (field(py, &x)?, field(py, &y)?);
        let out = self.run(py, |engine| {
            if count == 0 || rows == 0 || columns == 0 || outputs == 0 {
                return Err(Error::BadArgument("a product needs at least one row, column and output".into()));
            }
            let elements = |a: usize, b: usize| count.checked_mul(a).and_then(|n| n.checked_mul(b));
            if Some(x.len()) != elements(rows, columns) || Some(y.len()) != elements(columns, outputs) {
                return Err(Error::BadArgument(format!(
                    "{} and {} elements for {count} products of {rows} x {columns} and {columns} x {outputs}",
                    x.len(),
                    y.len()
                )));
            }
            let pairs: Vec<Pair> = x
                .chunks_exact(rows * columns)
                .zip(y.chunks_exact(columns * outputs))
                .map(|(x, y)| Pair { x, y })
                .collect();
            Ok(engine.shared_products(&pairs, Shape { rows, columns, outputs })?.concat())
        })?;
        words(py, &out)
    }
}

/// A layer as Python says it: (name, rows, columns, outputs, weight bits), or with experts, where the rows are tokens of each.
type SaidLayer = (String, usize, usize, Vec<usize>, u32, Option<usize>, Option<usize>);

fn layer((name, rows, columns, outputs, weight_bits, experts, most_bytes): SaidLayer) -> PyResult<Layer> {
    let linear = match (experts, &outputs[..]) {
        (Some(experts), _) => {
            let shape = BatchedShape { experts, tokens: rows, columns_in: columns, columns_out: outputs };
            Linear::Experts { shape, most_bytes }
        }
        (None, &[outputs]) => Linear::Single { shape: Shape { rows, columns, outputs }, weight_bits },
        (None, _) => return Err(raise(Error::BadArgument("a layer without experts has one matrix".into()))),
    };
    Ok(Layer { name, linear })
}

/// Linear layers made ahead.
#[pymethods]
impl Party {
    /// Makes layers ahead, `passes` of each. At the server `fetch` gives the weights of the layer with a number: 32-bit (columns x outputs), or with
    /// experts a list of 16-bit `[expert][output][column]`.
    #[pyo3(signature = (layers, passes, fetch, listener))]
    fn prepare(
        &self,
        py: Python<'_>,
        layers: Vec<SaidLayer>,
        passes: u64,
        fetch: Option<Py<PyAny>>,
        listener: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let layers: Vec<Layer> = layers.into_iter().map(layer).collect::<PyResult<_>>()?;
        let raised = Mutex::new(Raised::default());
        let hold = || raised.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let outcome = self.run(py, |engine| {
            let mut weights = |number: usize| {
                hold().call(|py| {
                    let given = fetch.as_ref().map_or_else(|| Ok(py.None()), |fetch| fetch.call1(py, (number,)))?;
                    weights_of(py, &layers[number], given.bind(py))
                })
            };
            let weights: Option<FetchWeights> = if fetch.is_some() { Some(&mut weights) } else { None };
            engine.prepare(&layers, passes, weights, &mut |progress| hold().tell(listener.as_ref(), progress))
        });
        raised.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).first(outcome)
    }

    /// How many preparations of a layer are left.
    fn prepared(&self, py: Python<'_>, said: SaidLayer) -> PyResult<usize> {
        let layer = layer(said)?;
        self.run(py, |engine| engine.prepared(&layer))
    }
}

fn weights_of(py: Python<'_>, layer: &Layer, given: &Bound<'_, PyAny>) -> PyResult<LayerWeights> {
    match layer.linear {
        Linear::Single { .. } => Ok(LayerWeights::Single(vector(py, &given.extract::<PyBuffer<i32>>()?)?)),
        Linear::Experts { .. } => {
            let all: Vec<PyBuffer<i16>> = given.extract()?;
            Ok(LayerWeights::Experts(all.iter().map(|w| vector(py, w)).collect::<PyResult<_>>()?))
        }
    }
}
