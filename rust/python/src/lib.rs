//! The Python module `cloister_native`. No cryptography here: arguments are converted, the interpreter lock is
//! released, errors of the core become Python exceptions.

use pyo3::prelude::*;

/// What Python imports as `cloister_native`.
#[pymodule]
fn cloister_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CORE_VERSION", cloister_core::VERSION)
}
