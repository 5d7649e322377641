//! What the core says of its own speed.

use cloister_core::measure::Throughput;
use pyo3::prelude::*;

/// Operations a second of one core: the inner loop of the products, the processor's peak of the same instruction, and
/// its peak of 52-bit integer multiply-adds, or None where it has none.
#[pyfunction]
pub fn inner_loop_throughput(py: Python<'_>) -> (f64, f64, Option<f64>) {
    let seen = py.detach(Throughput::measure);
    (seen.inner_loop, seen.fused_peak, seen.ifma_peak)
}
