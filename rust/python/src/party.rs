//! `Party` and `Listener`: the session itself. The methods for products and for all other steps lie in `products` and
//! `steps`; every one releases the interpreter lock while the core runs.

use crate::error::raise;
use crate::progress::Raised;
use crate::settings::settings;
use cloister_core::engine::{self, Engine};
use cloister_core::net::StepCost;
use cloister_core::net::identity::{self, KeyKind};
use cloister_core::preprocess::{Demand, Phase};
use cloister_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::net::TcpListener;
use std::sync::Mutex;
use std::time::Duration;

/// One party of a running computation. Not for several threads at once: a second call waits for the first.
#[pyclass]
pub struct Party(Mutex<Option<Engine>>);

impl Drop for Party {
    fn drop(&mut self) {
        // Closing the link may wait for the peer; the interpreter must not wait with it.
        if let Some(engine) = self.take() {
            Python::attach(|py| py.detach(|| drop(engine)));
        }
    }
}

/// Runs `body` without the interpreter lock; a panic becomes an error.
fn caught<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let bug = || Error::Unsupported("the core met a case that it was not written for".into());
    py.detach(|| std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_else(|_| Err(bug())))
        .map_err(raise)
}

impl Party {
    fn take(&self) -> Option<Engine> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// Runs `body` without the interpreter lock. A panic in the core is a bug, never an answer to a peer: it ends the
    /// session and reaches Python as an error like any other.
    pub fn run<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Engine) -> Result<T> + Send) -> PyResult<T> {
        py.detach(|| {
            let mut guard = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let engine = guard.as_mut().ok_or(Error::SessionOver)?;
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(engine)));
            outcome.unwrap_or_else(|_| {
                *guard = None;
                Err(Error::Unsupported("the core met a case that it was not written for; the session is over".into()))
            })
        })
        .map_err(raise)
    }
}

/// A socket that waits for clients.
#[pyclass]
pub struct Listener(TcpListener);

#[pymethods]
impl Listener {
    /// Listens at `host:port`; port 0 lets the system choose.
    #[new]
    fn new(host: &str, port: u16) -> PyResult<Self> {
        TcpListener::bind((host, port)).map(Self).map_err(|e| raise(Error::Link(e)))
    }

    /// The port it listens at.
    #[getter]
    fn port(&self) -> PyResult<u16> {
        self.0.local_addr().map(|a| a.port()).map_err(|e| raise(Error::Link(e)))
    }

    /// Waits for one client and sets the session up with it.
    fn accept(&self, py: Python<'_>, seconds: f64, given: &Bound<'_, PyDict>) -> PyResult<Party> {
        let settings = settings(given)?;
        if seconds.is_nan() {
            return Err(raise(Error::BadArgument("the time to wait is not a number".into())));
        }
        let wait = Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0));
        let engine = caught(py, || engine::accept(&self.0, wait, settings))?;
        Ok(Party(Mutex::new(Some(engine))))
    }
}

/// Makes a key and a certificate: (certificate, key, fingerprint), the first two in PEM.
#[pyfunction]
pub fn generate_identity() -> PyResult<(String, String, String)> {
    let made = identity::keygen(KeyKind::Ed25519).map_err(raise)?;
    Ok((made.certificate.clone(), made.key.to_string(), made.fingerprint.to_string()))
}

/// The fingerprint of the key in a PEM certificate.
#[pyfunction]
pub fn fingerprint(certificate: &str) -> PyResult<String> {
    identity::fingerprint_of(certificate).map(|f| f.to_string()).map_err(raise)
}

/// The session itself.
#[pymethods]
impl Party {
    /// Connects to a server and sets the session up with it.
    #[staticmethod]
    fn connect(py: Python<'_>, host: String, port: u16, given: &Bound<'_, PyDict>) -> PyResult<Self> {
        let settings = settings(given)?;
        let engine = caught(py, || engine::connect(&host, port, settings))?;
        Ok(Party(Mutex::new(Some(engine))))
    }

    /// Begins a named step; every cost until the matching `leave` is counted under it.
    fn enter(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.run(py, |engine| {
            engine.party.channel.enter(name);
            Ok(())
        })
    }

    /// Ends the step entered last.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| {
            engine.party.channel.leave();
            Ok(())
        })
    }

    /// Ends the step entered last, if the session still stands.
    fn leave_if_open(&self, py: Python<'_>) {
        let _ = self.leave(py);
    }

    /// The costs of every step so far: (step, bytes sent, bytes received, messages sent, rounds, seconds, phase).
    #[allow(clippy::type_complexity)] // A row, as Python takes it.
    fn costs(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, u64, u64, u64, f64, &'static str)>> {
        self.run(py, |engine| {
            let row = |c: StepCost| {
                let phase = Phase::of(&c.step).name();
                (c.step, c.bytes_sent, c.bytes_received, c.messages_sent, c.rounds, c.seconds, phase)
            };
            Ok(engine.party.channel.costs().into_iter().map(row).collect())
        })
    }

    /// Forgets the costs and the demand counted so far.
    fn reset_costs(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| {
            engine.reset_costs();
            Ok(())
        })
    }

    /// Says goodbye, ends the session and closes the store. What follows fails with `engine.session_over`.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        caught(py, || self.take().map_or(Ok(()), Engine::finish))
    }

    /// Drops the link without a goodbye.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }

    /// Makes transfers (1-of-2 sent by the client, by the server; 1-of-16 likewise) and triples ahead. `listener` is told how far it has come; it
    /// must not call this party.
    #[pyo3(signature = (demand, listener))]
    fn preprocess(&self, py: Python<'_>, demand: [u64; 5], listener: Option<Py<PyAny>>) -> PyResult<()> {
        let demand = demand_of(demand);
        let mut raised = Raised::default();
        let outcome =
            self.run(py, |engine| engine.preprocess(&demand, &mut |progress| raised.tell(listener.as_ref(), progress)));
        raised.first(outcome)
    }

    /// Burns in the store what a computation of this demand will take, in one round.
    fn reserve(&self, py: Python<'_>, demand: [u64; 5]) -> PyResult<()> {
        let demand = demand_of(demand);
        self.run(py, |engine| engine.reserve(&demand))
    }

    /// What the steps took since the costs were reset, in the order of `preprocess`.
    fn demand(&self, py: Python<'_>) -> PyResult<[u64; 5]> {
        self.run(py, |engine| Ok(row(engine.demand())))
    }

    /// What is there for steps to take, in the order of `preprocess`.
    fn stored(&self, py: Python<'_>) -> PyResult<[u64; 5]> {
        self.run(py, |engine| engine.stored().map(row))
    }

    /// Why both parties threw away what was stored when they met, if they did.
    fn started_over(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.run(py, |engine| Ok(engine.agreement().and_then(|agreement| agreement.started_over)))
    }

    /// One empty message each way: both parties stand at the same point.
    fn meet(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| {
            engine.party.channel.exchange(cloister_core::net::Kind::Command, &[], 0)?;
            Ok(())
        })
    }
}

fn demand_of(row: [u64; 5]) -> Demand {
    let [pads_from_client, pads_from_server, pads16_from_client, pads16_from_server, triples] = row;
    Demand { pads_from_client, pads_from_server, pads16_from_client, pads16_from_server, triples }
}

fn row(demand: Demand) -> [u64; 5] {
    let Demand { pads_from_client, pads_from_server, pads16_from_client, pads16_from_server, triples } = demand;
    [pads_from_client, pads_from_server, pads16_from_client, pads16_from_server, triples]
}
