//! `Party` and `Listener`: one method for each step of the core, the interpreter lock released while it runs.

use crate::convert::{bits, field, flags, signed, vector, words};
use crate::error::raise;
use cloister_core::engine::{self, Engine, Settings};
use cloister_core::matmul::single::Shape;
use cloister_core::matmul::{BatchedShape, ExpertWeights, Numbers, shared::Pair};
use cloister_core::net::identity::{self, Identity, KeyKind, Trust};
use cloister_core::ot::OtCounts;
use cloister_core::protocol::{self, NormPlan, Rows};
use cloister_core::{Error, Result, Role};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
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
    fn run<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Engine) -> Result<T> + Send) -> PyResult<T> {
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

fn role(name: &str) -> PyResult<Role> {
    match name {
        "client" => Ok(Role::Client),
        "server" => Ok(Role::Server),
        other => Err(raise(Error::BadArgument(format!("there is no role {other:?}; client and server are the roles")))),
    }
}

/// What a dictionary of settings from Python says. `cloister.crypto.engine.settings` writes it.
fn settings(given: &Bound<'_, PyDict>) -> PyResult<Settings> {
    let text = |name: &str| -> PyResult<Option<String>> { given.get_item(name)?.map(|v| v.extract()).transpose() };
    let number = |name: &str| -> PyResult<Option<f64>> {
        let found: Option<f64> = given.get_item(name)?.map(|v| v.extract()).transpose()?;
        match found {
            Some(x) if !(x.is_finite() && x >= 0.0) => {
                Err(raise(Error::BadArgument(format!("the setting {name} must be a number that is not negative"))))
            }
            other => Ok(other),
        }
    };
    let security = match (text("certificate")?, text("key")?, text("peer")?) {
        (Some(certificate), Some(key), Some(peer)) => engine::Security::Tls {
            identity: Identity::from_pem(&certificate, &key).map_err(raise)?,
            trust: Trust::Keys(vec![peer.parse().map_err(raise)?]),
        },
        (None, None, None) => engine::Security::InsecureLoopback,
        _ => {
            let why = "a certificate, its key and the peer's fingerprint belong together";
            return Err(raise(Error::BadArgument(why.into())));
        }
    };
    let mut settings = Settings::new(security);
    if let Some(seconds) = number("quiet_seconds")? {
        settings.limits.quiet = Duration::from_secs_f64(seconds.clamp(0.01, 86_400.0));
    }
    if let Some(threads) = number("threads")? {
        settings.threads = threads as usize;
    }
    if let Some(bits) = number("fraction_bits")? {
        settings.terms.fraction_bits = bits as u8;
    }
    if let Some(model) = given.get_item("model")? {
        settings.terms.model = model.extract::<[u8; 32]>()?;
    }
    if let Some(wanted) = given.get_item("post_quantum")? {
        settings.set_post_quantum(wanted.extract()?);
    }
    if let Some(kind) = text("transfers")? {
        settings.set_transfers(&kind).map_err(raise)?;
    }
    if number("link_bits_per_second")?.is_some_and(|bits| bits < 1000.0) {
        return Err(raise(Error::BadArgument("a link of less than 1,000 bits a second is not imitated".into())));
    }
    if let (Some(bits), Some(delay)) = (number("link_bits_per_second")?, number("link_delay_seconds")?) {
        settings.imitate_link(bits, delay);
    }
    Ok(settings)
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

    /// The costs of every step so far, as JSON.
    fn costs(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |engine| Ok(cloister_core::net::cost::to_json(&engine.party.channel.costs())))
    }

    /// Forgets the costs counted so far.
    fn reset_costs(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| {
            engine.party.channel.reset_costs();
            Ok(())
        })
    }

    /// Says goodbye and ends the session. What follows fails with `engine.session_over`.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        caught(py, || self.take().map_or(Ok(()), Engine::finish))
    }

    /// Drops the link without a goodbye.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }

    /// Makes transfers (as this party sees them: sent, received, sent of 16, received of 16) and triples ahead.
    fn preprocess(
        &self,
        py: Python<'_>,
        send: usize,
        receive: usize,
        send16: usize,
        receive16: usize,
        triples: usize,
    ) -> PyResult<()> {
        self.run(py, |engine| engine.preprocess(OtCounts { send, receive, send16, receive16 }, triples))
    }

    /// One empty message each way: both parties stand at the same point.
    fn meet(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| {
            engine.party.channel.exchange(cloister_core::net::Kind::Command, &[], 0)?;
            Ok(())
        })
    }
}

/// Values in and out.
#[pymethods]
impl Party {
    /// Shares of the owner's signed integers; the other party passes None and their number.
    #[pyo3(signature = (owner, values, n))]
    fn share<'py>(
        &self,
        py: Python<'py>,
        owner: &str,
        values: Option<PyBuffer<i64>>,
        n: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let owner = role(owner)?;
        let values = values.map(|v| vector(py, &v)).transpose()?;
        let out = self.run(py, |engine| protocol::share_from(&mut engine.party, owner, values.as_deref(), n))?;
        words(py, &out)
    }

    /// Opens values to one party: this reveals them to it. The other gets None.
    fn reveal_to<'py>(&self, py: Python<'py>, to: &str, x: PyBuffer<u64>) -> PyResult<Option<Bound<'py, PyByteArray>>> {
        let (to, x) = (role(to)?, field(py, &x)?);
        let out = self.run(py, |engine| protocol::reveal_to(&mut engine.party, to, &x))?;
        out.map(|values| signed(py, &values)).transpose()
    }

    /// Opens values to both parties.
    fn reveal_to_both<'py>(&self, py: Python<'py>, x: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let out = self.run(py, |engine| protocol::reveal_to_both(&mut engine.party, &x))?;
        signed(py, &out)
    }
}

/// Products with weights that the server passes, and of shared matrices.
#[pymethods]
impl Party {
    /// (rows x columns) times the server's (columns x outputs).
    #[pyo3(signature = (x, rows, columns, outputs, weight_bits, weights))]
    fn product<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        rows: usize,
        columns: usize,
        outputs: usize,
        weight_bits: u32,
        weights: Option<PyBuffer<i32>>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let weights = weights.map(|w| vector(py, &w)).transpose()?;
        let shape = Shape { rows, columns, outputs };
        let out = self.run(py, |engine| engine.product(&x, shape, weight_bits, weights.as_deref()))?;
        words(py, &out)
    }

    /// `[expert][token][column]` times each of the server's matrices `[expert][output][column]` of 16-bit numbers.
    #[pyo3(signature = (x, experts, tokens, columns, outputs, weights, most_bytes))]
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
    ) -> PyResult<Vec<Bound<'py, PyByteArray>>> {
        let x = field(py, &x)?;
        let weights: Option<Vec<Vec<i16>>> =
            weights.map(|all| all.iter().map(|w| vector(py, w)).collect()).transpose()?;
        let shape = BatchedShape { experts, tokens, columns_in: columns, columns_out: outputs.clone() };
        let out = self.run(py, |engine| {
            let matrices: Option<Vec<ExpertWeights>> = match &weights {
                None => None,
                Some(all) if all.len() == outputs.len() => Some(
                    all.iter()
                        .zip(&outputs)
                        .map(|(w, &out)| ExpertWeights::new(Numbers::I16(w), experts, out, columns))
                        .collect::<Result<_>>()?,
                ),
                Some(all) => {
                    let why = format!("{} matrices of weights for {} outputs", all.len(), outputs.len());
                    return Err(Error::BadArgument(why));
                }
            };
            engine.batched_product(&x, shape, most_bytes, matrices.as_deref())
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

/// Bits and order.
#[pymethods]
impl Party {
    /// [x < y], of which `kappa` bits above `drop_bits` are compared.
    fn less_than<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        y: PyBuffer<u64>,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let (x, y) = (field(py, &x)?, field(py, &y)?);
        let out = self.run(py, |engine| protocol::less_than(&mut engine.party, &x, &y, kappa, drop_bits))?;
        Ok(flags(py, &out))
    }

    /// [x < 0].
    fn is_negative<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let out = self.run(py, |engine| protocol::is_negative(&mut engine.party, &x, kappa, drop_bits))?;
        Ok(flags(py, &out))
    }

    /// [x = y].
    fn equal<'py>(&self, py: Python<'py>, x: PyBuffer<u64>, y: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let (x, y) = (field(py, &x)?, field(py, &y)?);
        let out = self.run(py, |engine| protocol::equal(&mut engine.party, &x, &y))?;
        Ok(flags(py, &out))
    }

    /// a and b.
    fn bits_and<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, b: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, b) = (bits(py, &a)?, bits(py, &b)?);
        let out = self.run(py, |engine| protocol::and(&mut engine.party, &a, &b))?;
        Ok(flags(py, &out))
    }

    /// a or b.
    fn bits_or<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, b: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, b) = (bits(py, &a)?, bits(py, &b)?);
        let out = self.run(py, |engine| protocol::or(&mut engine.party, &a, &b))?;
        Ok(flags(py, &out))
    }

    /// not a.
    fn bits_not<'py>(&self, py: Python<'py>, a: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let a = bits(py, &a)?;
        let out = self.run(py, |engine| Ok(protocol::not(&engine.party, &a)))?;
        Ok(flags(py, &out))
    }

    /// Bits as the numbers 0 and 1.
    fn bits_to_field<'py>(&self, py: Python<'py>, a: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let a = bits(py, &a)?;
        let out = self.run(py, |engine| protocol::bits_to_field(&mut engine.party, &a))?;
        words(py, &out)
    }

    /// x where the bit is 1, else 0.
    fn select<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, x: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, x) = (bits(py, &a)?, field(py, &x)?);
        let out = self.run(py, |engine| protocol::select(&mut engine.party, &a, &x))?;
        words(py, &out)
    }

    /// The largest of each row.
    fn maximum<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out = self.run(py, |engine| protocol::maximum(&mut engine.party, &x, rows))?;
        words(py, &out)
    }

    /// [value is among the k largest of its row].
    fn top_k_mask<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        k: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out = self.run(py, |engine| protocol::top_k_mask(&mut engine.party, &x, rows, k, &engine.link.clone()))?;
        Ok(flags(py, &out))
    }

    /// For each row the 0/1 matrix (slots x length) that picks its largest values in order.
    fn dispatch_ranks<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        slots: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out =
            self.run(py, |engine| protocol::dispatch_ranks(&mut engine.party, &x, rows, slots, &engine.link.clone()))?;
        words(py, &out)
    }
}

/// A method for a step of one vector of values.
macro_rules! value_steps {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[pymethods]
        impl Party {
            $(#[$doc])*
            fn $name<'py>(&self, py: Python<'py>, x: PyBuffer<u64>, $($arg: $kind),*) -> PyResult<Bound<'py, PyByteArray>> {
                let x = field(py, &x)?;
                let out = self.run(py, move |engine| protocol::$name(&mut engine.party, &x, $($arg),*))?;
                words(py, &out)
            }
        }
    )* };
}

value_steps! {
    /// x / 2^f, off by at most one last place.
    truncate(f: u32);
    /// x * x, at twice the scale.
    square();
    /// max(x, 0).
    relu(f: u32);
    /// x times its logistic.
    silu(f: u32);
    /// x times the normal distribution function.
    gelu(f: u32);
    /// e^x at 2^g, for x at 2^f up to octaves * ln 2.
    exponential(f: u32, octaves: u32, g: u32);
    /// 2^total / x for 2^least <= x < 2^most.
    reciprocal(least: u32, most: u32, total: u32);
    /// numerator * 2^(total - 16) / sqrt(x) for 2^least <= x < 2^most.
    rsqrt(least: u32, most: u32, numerator: u32, total: u32);
}

/// Whole rows.
#[pymethods]
impl Party {
    /// Softmax of rows; `allowed` are public flags.
    #[pyo3(signature = (x, columns, allowed, f))]
    fn softmax<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        columns: usize,
        allowed: Option<PyBuffer<u8>>,
        f: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let allowed: Option<Vec<bool>> =
            allowed.map(|a| bits(py, &a)).transpose()?.map(|a| a.into_iter().map(|bit| bit == 1).collect());
        let out = self.run(py, |engine| protocol::softmax(&mut engine.party, &x, columns, allowed.as_deref(), f))?;
        words(py, &out)
    }

    /// RMSNorm, or LayerNorm if the mean is taken off first, without weights; epsilon in units of 2^-24.
    fn norm<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        columns: usize,
        f: u32,
        rms_bits: u32,
        epsilon: u32,
        centred: bool,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let plan = NormPlan { columns, f, rms_bits, epsilon };
        let out = self.run(py, |engine| {
            if centred {
                protocol::layer_norm(&mut engine.party, &x, &plan)
            } else {
                protocol::rms_norm(&mut engine.party, &x, &plan)
            }
        })?;
        words(py, &out)
    }
}

/// A method for a step of two vectors of values.
macro_rules! pair_steps {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[pymethods]
        impl Party {
            $(#[$doc])*
            fn $name<'py>(
                &self,
                py: Python<'py>,
                x: PyBuffer<u64>,
                y: PyBuffer<u64>,
                $($arg: $kind),*
            ) -> PyResult<Bound<'py, PyByteArray>> {
                let (x, y) = (field(py, &x)?, field(py, &y)?);
                let out = self.run(py, move |engine| protocol::$name(&mut engine.party, &x, &y, $($arg),*))?;
                words(py, &out)
            }
        }
    )* };
}

pair_steps! {
    /// x * y, at the sum of the scales.
    multiply();
    /// x * y / 2^f, off by at most one last place.
    multiply_truncate(f: u32);
    /// Sums of `length` products each.
    inner_products(length: usize);
}
