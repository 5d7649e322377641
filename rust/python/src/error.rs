//! The core's errors as one Python exception with the arguments (code, message); `cloister.crypto.native` maps the
//! codes to classes.

use cloister_core::Error;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(cloister_native, EngineError, PyException, "An error of the Rust core: (code, message).");

/// The exception for an error of the core.
pub fn raise(error: Error) -> PyErr {
    EngineError::new_err((error.code(), error.to_string()))
}
