//! What a party brings to a session, and what both agree on before it begins.

use crate::error::{Error, Result};
use crate::net::Limits;
use crate::net::identity::{Identity, Trust};
use crate::net::shaped::Link;
use crate::ot::store::{self, Disk, Place, Policy, RealDisk};
use crate::ot::{BaseKind, GroupBits, OtConfig, OtKind};
use crate::party::Role;
use crate::rlwe::params;
use crate::session::{self, Network, Terms, TransferKind};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How the link is protected.
pub enum Security {
    /// TLS 1.3, both parties authenticated.
    Tls {
        /// Our key and certificate.
        identity: Identity,
        /// Whom we accept.
        trust: Trust,
    },
    /// No protection, on the loopback interface only: for tests and measurements.
    InsecureLoopback,
}

/// Where one-time correlations are kept between sessions with one peer.
pub struct StoreSettings {
    /// The two directories.
    pub place: Place,
    /// What happens when the store is empty or behind. The stricter of both parties' wishes holds.
    pub policy: Policy,
    /// The file system under it.
    pub disk: Arc<dyn Disk>,
}

impl StoreSettings {
    /// A store in a folder of its own. `beside` is the second place, with the key: outside every backup of the folder
    /// and best on a medium that can be erased; without it a folder inside the first, where a copy of the whole is
    /// found by the peer alone.
    pub fn new(folder: &Path, beside: Option<PathBuf>) -> Self {
        let beside = beside.unwrap_or_else(|| folder.join("key"));
        let place = Place { directory: folder.join("sealed"), beside };
        Self { place, policy: Policy::default(), disk: Arc::new(RealDisk) }
    }
}

/// What a party brings to a session.
pub struct Settings {
    /// How the link is protected.
    pub security: Security,
    /// What both parties must agree on.
    pub terms: Terms,
    /// How long a peer may take.
    pub limits: Limits,
    /// A slower link to imitate, for measurements.
    pub shaped: Option<Link>,
    /// Threads that work for this party.
    pub threads: usize,
    /// Where correlations are kept between sessions; without it they live as long as the session.
    pub store: Option<StoreSettings>,
}

impl Settings {
    /// The defaults of this build: a local network, SoftSpoken transfers, every core, no store.
    pub fn new(security: Security) -> Self {
        // Builds from different sources may compute differently although they speak alike: tables, plans, roundings.
        let table = format!("{:?} {:?} {}", params::PRIMES, params::SECURITY, env!("CLOISTER_CORE_SOURCES"));
        let table: [u8; 32] = Sha256::digest(table).into();
        let primes = params::PRIMES.iter().map(|&q| u64::from(q)).collect();
        let flood = (params::FLOODED_COEFFICIENTS_LOG2 + params::FLOOD_SECURITY_BITS) as u16;
        Self {
            security,
            terms: Terms::new(table, primes, flood, [0; 32]),
            limits: Limits::default(),
            shaped: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            store: None,
        }
    }

    /// Chooses the transfers by name; `by-link` takes the fastest kind on the link that both parties agreed on.
    pub fn set_transfers(&mut self, name: &str) -> Result<()> {
        self.terms.transfers = match name {
            "softspoken1" => TransferKind::SoftSpoken1,
            "softspoken2" => TransferKind::SoftSpoken2,
            "softspoken4" => TransferKind::SoftSpoken4,
            "softspoken8" => TransferKind::SoftSpoken8,
            "silent" => TransferKind::Silent,
            "by-link" => TransferKind::ByLink,
            other => return Err(Error::Unsupported(format!("there is no kind of transfers called {other:?}"))),
        };
        Ok(())
    }

    /// Rests the transfers on ML-KEM-768, which is safe against quantum computers, or on elliptic curves.
    pub fn set_post_quantum(&mut self, wanted: bool) {
        self.terms.base = if wanted { session::BaseKind::MlKem768 } else { session::BaseKind::Ristretto };
    }

    /// Imitates a slower link, and plans for it.
    pub fn imitate_link(&mut self, bits_per_second: f64, delay_seconds: f64) {
        let one_way = Duration::from_secs_f64(delay_seconds.clamp(0.0, 30.0));
        self.shaped = Some(Link { bits_per_second, one_way });
        let network = &mut self.terms.network;
        network.round_microseconds = (2 * one_way).as_micros() as u32;
        network.bytes_per_second = (bits_per_second / 8.0).clamp(125.0, 1e12) as u64;
    }

    /// The transfers on an agreed link.
    pub(super) fn transfers(&self, network: Network) -> Result<OtConfig> {
        let base = match self.terms.base {
            session::BaseKind::Ristretto => BaseKind::Ristretto,
            session::BaseKind::MlKem768 => BaseKind::MlKem768,
        };
        let group = |bits| Ok(OtConfig { base, kind: OtKind::SoftSpoken(GroupBits::new(bits)?) });
        match self.terms.transfers {
            TransferKind::SoftSpoken1 => group(1),
            TransferKind::SoftSpoken2 => group(2),
            TransferKind::SoftSpoken4 => group(4),
            TransferKind::SoftSpoken8 => group(8),
            TransferKind::Silent => Ok(OtConfig { base, kind: OtKind::Silent }),
            TransferKind::ByLink => {
                Ok(OtConfig { base, kind: OtKind::for_link(network.bytes_per_second as f64 * 8e-6) })
            }
        }
    }

    /// Who the store belongs to and what its items depend on: both parties' keys, the model, and what was asked of the
    /// transfers. Not the version of the software: what is stored means the same to every version that reads it.
    pub(super) fn store_identity(&self, role: Role) -> Result<store::Identity> {
        if self.terms.model == [0; 32] {
            return Err(Error::BadArgument(
                "a store needs the digest of the model's weights: what was prepared for other weights must not be used"
                    .into(),
            ));
        }
        let (own, peer) = match &self.security {
            Security::Tls { identity, trust: Trust::Keys(keys) } if keys.len() == 1 => {
                (identity.fingerprint()?.0, keys[0].0)
            }
            Security::Tls { .. } => {
                return Err(Error::BadArgument(
                    "a store belongs to one peer: name its fingerprint, and no other".into(),
                ));
            }
            Security::InsecureLoopback => {
                let nobody = |role: Role| Sha256::digest(format!("insecure loopback {role:?}")).into();
                (nobody(role), nobody(role.other()))
            }
        };
        let t = &self.terms;
        let kinds = [t.base as u8, t.transfers as u8, t.fraction_bits];
        let parameters = Sha256::new()
            .chain_update(b"cloister store 1")
            .chain_update(t.p.to_le_bytes())
            .chain_update(kinds)
            .chain_update(t.model)
            .finalize()
            .into();
        Ok(store::Identity { role, own, peer, parameters })
    }
}
