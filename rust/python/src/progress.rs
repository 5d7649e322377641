//! Python functions that the core calls during long work: who is told how far it has come, who fetches weights. What
//! they raise ends the work, and the session with it, and reaches the caller as it was raised.

use cloister_core::preprocess::Progress;
use cloister_core::{Error, Result};
use pyo3::prelude::*;

/// What a function of the caller's raised while the core worked.
#[derive(Default)]
pub struct Raised(Option<PyErr>);

impl Raised {
    /// Runs Python inside the core's work, and looks whether the user wants to stop it.
    pub fn call<T>(&mut self, body: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T> {
        let outcome = Python::attach(|py| {
            py.check_signals()?;
            body(py)
        });
        outcome.map_err(|error| {
            self.0 = Some(error);
            Error::SessionOver
        })
    }

    /// Tells a function (kind, there, wanted), if there is one.
    pub fn tell(&mut self, listener: Option<&Py<PyAny>>, progress: Progress) -> Result<()> {
        self.call(|py| match listener {
            Some(listener) => listener.call1(py, (progress.lane.name(), progress.stored, progress.wanted)).map(drop),
            None => Ok(()),
        })
    }

    /// The outcome, or what was raised in its stead.
    pub fn first<T>(self, outcome: PyResult<T>) -> PyResult<T> {
        match self.0 {
            Some(error) => Err(error),
            None => outcome,
        }
    }
}
