//! The Python module `cloister_native`. Nothing is computed here: arguments are converted, the interpreter
//! lock is released where work is long, errors of the crates become Python exceptions.

// Arguments have names in Python, so a long list of them is readable there.
#![allow(clippy::too_many_arguments)]

mod convert;
mod error;
mod measure;
mod party;
mod products;
mod progress;
mod routing;
mod settings;
mod steps;

use pyo3::prelude::*;

const _: () = assert!(!cloister_core::HAS_INSECURE_TEST_DEALER, "a module with the dealer of the tests hides nothing");

/// What Python imports as `cloister_native`.
#[pymodule]
fn cloister_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CORE_VERSION", cloister_core::VERSION)?;
    module.add("PRIME", cloister_core::field::P)?;
    module.add("EngineError", module.py().get_type::<error::EngineError>())?;
    module.add_class::<party::Party>()?;
    module.add_class::<party::Listener>()?;
    module.add_class::<routing::Routing>()?;
    module.add_class::<routing::Routed>()?;
    module.add_function(wrap_pyfunction!(measure::inner_loop_throughput, module)?)?;
    module.add_function(wrap_pyfunction!(party::generate_identity, module)?)?;
    module.add_function(wrap_pyfunction!(party::fingerprint, module)?)
}
