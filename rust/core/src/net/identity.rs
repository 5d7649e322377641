//! Who a party is: a key, a certificate around it, and the fingerprint by which the other party knows it.

use crate::error::{Error, Result};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use rustls::server::ParsedCertificate;
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;
use zeroize::{Zeroize, Zeroizing};

/// The SHA-256 of a public key (of its SubjectPublicKeyInfo). Written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::BadArgument("a fingerprint is 64 hexadecimal digits".into());
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(wrong());
        }
        let digit = |c: u8| char::from(c).to_digit(16).ok_or_else(wrong);
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(out))
    }
}

/// Whom we accept as the peer.
#[derive(Clone, Debug)]
pub enum Trust {
    /// Exactly the holders of these keys.
    Keys(Vec<Fingerprint>),
    /// Whoever an authority of our own vouches for.
    Authority {
        /// The authority's certificates, in PEM.
        certificates: String,
        /// The name that the server's certificate must carry. Clients are not checked for a name.
        server_name: String,
    },
}

/// The kind of key that [`keygen`] makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyKind {
    /// The default.
    Ed25519,
    /// For places where only the NIST curves are allowed.
    P256,
}

/// A new identity as files: what [`Identity::from_pem`] reads. The key file belongs to its owner alone (mode 0600).
pub struct Generated {
    /// The certificate, public.
    pub certificate: String,
    /// The private key. Wiped on drop.
    pub key: Zeroizing<String>,
    /// What the other party pins, public.
    pub fingerprint: Fingerprint,
}

/// A party's own key and certificate.
pub struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Reads a certificate (its own first, then any of an authority's) and its private key, both PEM.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self> {
        let wrong = |what: &str| Error::BadArgument(format!("this is not a PEM {what}"));
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate.as_bytes())
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| wrong("certificate"))?;
        if chain.is_empty() {
            return Err(wrong("certificate"));
        }
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|_| wrong("private key"))?;
        let identity = Self { chain, key };
        identity.fingerprint()?;
        Ok(identity)
    }

    /// What the other party pins.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        key_of(&self.chain[0]).map_err(|_| Error::BadArgument("the certificate cannot be read".into()))
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// The fingerprint of the key in a PEM certificate.
pub fn fingerprint_of(certificate: &str) -> Result<Fingerprint> {
    let wrong = || Error::BadArgument("this is not a PEM certificate".into());
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|_| wrong())?;
    key_of(&certificate).map_err(|_| wrong())
}

/// Makes a key and a self-signed certificate around it.
pub fn keygen(kind: KeyKind) -> Result<Generated> {
    let failed = |e: rcgen::Error| Error::Unsupported(format!("no key could be made: {e}"));
    let algorithm = match kind {
        KeyKind::Ed25519 => &rcgen::PKCS_ED25519,
        KeyKind::P256 => &rcgen::PKCS_ECDSA_P256_SHA256,
    };
    let key = rcgen::KeyPair::generate_for(algorithm).map_err(failed)?;
    let mut parameters = rcgen::CertificateParams::new(vec!["peer.invalid".to_owned()]).map_err(failed)?;
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "cloister party");
    let certificate = parameters.self_signed(&key).map_err(failed)?.pem();
    let fingerprint = fingerprint_of(&certificate)?;
    Ok(Generated { certificate, key: Zeroizing::new(key.serialize_pem()), fingerprint })
}

/// The fingerprint of the key in a certificate that a peer showed.
pub(super) fn key_of(shown: &CertificateDer<'_>) -> std::result::Result<Fingerprint, rustls::Error> {
    let key = ParsedCertificate::try_from(shown)?.subject_public_key_info();
    Ok(Fingerprint(Sha256::digest(key.as_ref()).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_identity_reads_back_and_its_fingerprint_is_that_of_its_certificate() {
        for kind in [KeyKind::Ed25519, KeyKind::P256] {
            let made = keygen(kind).unwrap();
            let identity = Identity::from_pem(&made.certificate, &made.key).unwrap();
            assert_eq!(identity.fingerprint().unwrap(), made.fingerprint);
            assert_eq!(made.fingerprint.to_string().parse::<Fingerprint>().unwrap(), made.fingerprint);
            assert_ne!(keygen(kind).unwrap().fingerprint, made.fingerprint);
            assert!(Identity::from_pem(&made.key, &made.certificate).is_err());
            assert!(Identity::from_pem("", &made.key).is_err());
        }
        for text in ["", "ab", &"g".repeat(64), &"é".repeat(32), &"0".repeat(65)] {
            assert!(text.parse::<Fingerprint>().is_err());
        }
    }
}
