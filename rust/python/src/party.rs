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
use std::net::{Shutdown, TcpListener};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

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

/// How often a call looks whether the user wants to stop it.
const LOOK: Duration = Duration::from_millis(100);
/// Steps run on a thread of their own, with as much stack as a main thread has.
const STACK: usize = 8 << 20;

fn bug() -> Error {
    Error::Unsupported("the core met a case that it was not written for; the session is over".into())
}

/// Runs `body`; a panic becomes an error.
fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_else(|_| Err(bug()))
}

/// Waits for an outcome and looks for signals meanwhile. What a signal's handler raises (Ctrl-C raises
/// KeyboardInterrupt) comes back as the error.
fn wait_for<T: Send>(py: Python<'_>, outcome: &Mutex<Receiver<Result<T>>>) -> PyResult<Result<T>> {
    loop {
        let next = py.detach(|| outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv_timeout(LOOK));
        match next {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(bug())),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

/// Runs `body` on a thread that is left behind when the user interrupts: it ends within the time-outs of connecting, and
/// what it then has is dropped.
fn left_behind<T: Send + 'static>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send + 'static) -> PyResult<T> {
    let (done, outcome) = sync_channel(1);
    let worker = std::thread::Builder::new().stack_size(STACK).spawn(move || drop(done.send(caught(body))));
    worker.map_err(|e| raise(Error::Link(e)))?;
    wait_for(py, &Mutex::new(outcome))?.map_err(raise)
}

impl Party {
    fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take(&self) -> Option<Engine> {
        self.lock().take()
    }

    /// Runs what neither waits for the peer nor works for long.
    fn briefly<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Engine) -> Result<T> + Send) -> PyResult<T> {
        py.detach(|| caught(|| body(self.lock().as_mut().ok_or(Error::SessionOver)?))).map_err(raise)
    }

    /// Runs `body` without the interpreter lock, on a thread of its own, so that this one can see Ctrl-C: then the link
    /// is shut down, which ends the step and the session, and KeyboardInterrupt is raised in its stead. A panic in the
    /// core is a bug, never an answer to a peer: it ends the session and reaches Python as an error like any other.
    pub fn run<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Engine) -> Result<T> + Send) -> PyResult<T> {
        let stopper = self.briefly(py, |engine| Ok(engine.party.channel.stopper()))?;
        let (done, outcome) = sync_channel(1);
        let outcome = Mutex::new(outcome);
        let work = || {
            let mut guard = self.lock();
            let outcome = match guard.as_mut() {
                Some(engine) => std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(engine))),
                None => Ok(Err(Error::SessionOver)),
            };
            let outcome = outcome.unwrap_or_else(|_| {
                *guard = None;
                Err(bug())
            });
            drop(guard);
            // The other end waits until it has this.
            let _ = done.send(outcome);
        };
        std::thread::scope(|scope| {
            let worker = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
            let worker = worker.map_err(|e| raise(Error::Link(e)))?;
            let seen = wait_for(py, &outcome);
            if seen.is_err()
                && let Some(stream) = &stopper
            {
                // An error here means that it is closed already.
                let _ = stream.shutdown(Shutdown::Both);
            }
            py.detach(|| drop(worker.join()));
            if seen.is_err() {
                // Half a step was done: nothing may follow it, however far the step still came.
                py.detach(|| drop(self.take()));
            }
            seen?.map_err(raise)
        })
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
        let cannot = |e| raise(Error::BadArgument(format!("cannot listen at {host}:{port}: {e}; choose another")));
        TcpListener::bind((host, port)).map(Self).map_err(cannot)
    }

    /// The port it listens at.
    #[getter]
    fn port(&self) -> PyResult<u16> {
        self.0.local_addr().map(|a| a.port()).map_err(|e| raise(Error::Link(e)))
    }

    /// Waits for one client and sets the session up with it. Whoever connects is answered, and a stranger who cannot
    /// prove a key ends the call with an error: a server calls this in a loop.
    fn accept(&self, py: Python<'_>, seconds: f64, given: &Bound<'_, PyDict>) -> PyResult<Party> {
        if seconds.is_nan() {
            return Err(raise(Error::BadArgument("the time to wait is not a number".into())));
        }
        let deadline = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0));
        loop {
            // In slices, so that an interrupted call takes no client away from the next one.
            let settings = settings(given)?;
            let left = deadline.saturating_duration_since(Instant::now());
            let listener = self.0.try_clone().map_err(|e| raise(Error::Link(e)))?;
            let accepted = left_behind(py, move || match engine::accept(&listener, left.min(LOOK), settings) {
                Err(Error::TimedOut { step, .. }) if step == "accept" => Ok(None),
                outcome => outcome.map(Some),
            });
            if accepted.is_err() {
                // The slice that is left behind must be over before another call waits for the next client.
                py.detach(|| std::thread::sleep(LOOK));
            }
            let accepted = accepted?;
            if let Some(engine) = accepted {
                return Ok(Party(Mutex::new(Some(engine))));
            }
            py.check_signals()?;
            if Instant::now() >= deadline {
                return Err(raise(Error::TimedOut { step: "accept".into(), seconds: seconds.max(0.0) as u64 }));
            }
        }
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
        let engine = left_behind(py, move || engine::connect(&host, port, settings))?;
        Ok(Party(Mutex::new(Some(engine))))
    }

    /// Begins a named step; every cost until the matching `leave` is counted under it.
    fn enter(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.briefly(py, |engine| {
            engine.party.channel.enter(name);
            Ok(())
        })
    }

    /// Ends the step entered last.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.briefly(py, |engine| {
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
        self.briefly(py, |engine| {
            let row = |c: StepCost| {
                let phase = Phase::of(&c.step).name();
                (c.step, c.bytes_sent, c.bytes_received, c.messages_sent, c.rounds, c.seconds, phase)
            };
            Ok(engine.party.channel.costs().into_iter().map(row).collect())
        })
    }

    /// Forgets the costs and the demand counted so far.
    fn reset_costs(&self, py: Python<'_>) -> PyResult<()> {
        self.briefly(py, |engine| {
            engine.reset_costs();
            Ok(())
        })
    }

    /// Says goodbye, ends the session and closes the store. What follows fails with `engine.session_over`.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let Some(engine) = self.take() else { return Ok(()) };
        left_behind(py, move || engine.finish())
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
        self.briefly(py, |engine| Ok(row(engine.demand())))
    }

    /// What is there for steps to take, in the order of `preprocess`.
    fn stored(&self, py: Python<'_>) -> PyResult<[u64; 5]> {
        self.briefly(py, |engine| engine.stored().map(row))
    }

    /// Why both parties threw away what was stored when they met, if they did.
    fn started_over(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.briefly(py, |engine| Ok(engine.agreement().and_then(|agreement| agreement.started_over)))
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
