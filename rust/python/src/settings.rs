//! What a dictionary of settings from Python says; `cloister.crypto.engine.Settings` writes it.

use crate::error::raise;
use cloister_core::Error;
use cloister_core::engine::{self, Settings, StoreSettings};
use cloister_core::net::identity::{Identity, Trust};
use cloister_core::ot::store::{WhenBehind, WhenEmpty};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::time::Duration;

/// Reads the dictionary.
pub fn settings(given: &Bound<'_, PyDict>) -> PyResult<Settings> {
    let text = |name: &str| -> PyResult<Option<String>> { given.get_item(name)?.map(|v| v.extract()).transpose() };
    let flag = |name: &str| -> PyResult<bool> { given.get_item(name)?.map_or(Ok(false), |v| v.extract()) };
    let number = |name: &str| -> PyResult<Option<f64>> {
        let found: Option<f64> = given.get_item(name)?.map(|v| v.extract()).transpose()?;
        match found {
            Some(x) if !(x.is_finite() && x >= 0.0) => {
                Err(raise(Error::BadArgument(format!("the setting {name} must be a number that is not negative"))))
            }
            other => Ok(other),
        }
    };
    // More threads than any machine has cores would only take memory, at both parties.
    let count = |name: &str| -> PyResult<Option<u16>> {
        match number(name)? {
            Some(x) if !(1.0..=1024.0).contains(&x) || x.fract() != 0.0 => Err(raise(Error::BadArgument(format!(
                "the setting {name} is {x} and must be a whole number from 1 to 1024"
            )))),
            other => Ok(other.map(|x| x as u16)),
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
    if let Some(threads) = count("threads")? {
        settings.threads = usize::from(threads);
    }
    if let Some(bits) = number("fraction_bits")? {
        settings.terms.fraction_bits = bits as u8;
    }
    if let Some(model) = given.get_item("model")? {
        settings.terms.model = model.extract::<[u8; 32]>()?;
    }
    settings.set_post_quantum(flag("post_quantum")?);
    if let Some(cores) = count("cores")? {
        settings.terms.network.cores = cores;
    }
    if let Some(folder) = given.get_item("store")? {
        let beside: Option<PathBuf> = given.get_item("store_key")?.map(|v| v.extract()).transpose()?;
        let mut store = StoreSettings::new(&folder.extract::<PathBuf>()?, beside);
        if flag("store_refuses_when_empty")? {
            store.policy.when_empty = WhenEmpty::Refuse;
        }
        if flag("store_starts_over_when_behind")? {
            store.policy.when_behind = WhenBehind::StartOver;
        }
        settings.store = Some(store);
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
