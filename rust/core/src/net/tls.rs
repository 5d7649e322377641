//! TLS 1.3 between the two parties, each of which proves its key to the other.
//!
//! One version, one key exchange (X25519MLKEM768: both ends are this crate, so there is nobody to fall back for), no
//! early data, no resumption, one application protocol. A peer is known by the SHA-256 of its public key, or by an
//! authority that both sides name; everything else is refused in the handshake. With pinned keys the dates and names in
//! a certificate say nothing and are not read: the key is the identity, and it is revoked by removing the pin.

use super::identity::{Fingerprint, Identity, Trust, key_of};
use super::socket::SocketPipe;
use super::tcp::Limits;
use crate::error::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, DistinguishedName,
    PeerIncompatible, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The application protocol that both parties must name.
pub const ALPN: &[u8] = b"cloister-engine/1";
const STEP: &str = "the TLS handshake";

/// The client's end: proves who we are, and accepts only whom `trust` names.
pub fn connect(stream: TcpStream, identity: &Identity, trust: &Trust, limits: &Limits) -> Result<SocketPipe> {
    let provider = provider();
    let (verifier, name): (Arc<dyn ServerCertVerifier>, _) = match trust {
        Trust::Keys(pins) => (Arc::new(Pinned::new(pins, &provider)?), "peer.invalid".to_owned()),
        Trust::Authority { certificates, server_name } => {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots(certificates)?, provider.clone())
                .build()
                .map_err(|e| Error::BadArgument(format!("the authority's certificates cannot be used: {e}")))?;
            (verifier, server_name.clone())
        }
    };
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(configuration)?
        .dangerous() // The name of rustls for "a verifier of our own": the pins, or WebPKI itself.
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified(identity, &provider)?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    config.enable_sni = matches!(trust, Trust::Authority { .. });
    let name = ServerName::try_from(name).map_err(|_| Error::BadArgument("this is not a server name".into()))?;
    let connection = ClientConnection::new(Arc::new(config), name).map_err(configuration)?;
    establish(stream, connection.into(), limits)
}

/// The server's end: asks for the client's certificate, and accepts only whom `trust` names.
pub fn accept(stream: TcpStream, identity: &Identity, trust: &Trust, limits: &Limits) -> Result<SocketPipe> {
    let provider = provider();
    let verifier: Arc<dyn ClientCertVerifier> = match trust {
        Trust::Keys(pins) => Arc::new(Pinned::new(pins, &provider)?),
        Trust::Authority { certificates, .. } => {
            WebPkiClientVerifier::builder_with_provider(roots(certificates)?, provider.clone())
                .build()
                .map_err(|e| Error::BadArgument(format!("the authority's certificates cannot be used: {e}")))?
        }
    };
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(configuration)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified(identity, &provider)?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    let connection = ServerConnection::new(Arc::new(config)).map_err(configuration)?;
    establish(stream, connection.into(), limits)
}

/// The library of primitives, with one key exchange.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768];
    Arc::new(provider)
}

fn certified(identity: &Identity, provider: &CryptoProvider) -> Result<CertifiedKey> {
    let key = provider.key_provider.load_private_key(identity.key.clone_key()).map_err(configuration)?;
    Ok(CertifiedKey::new(identity.chain.clone(), key))
}

fn roots(pem: &str) -> Result<Arc<RootCertStore>> {
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|_| Error::BadArgument("this is not a PEM certificate".into()))?;
        store.add(certificate).map_err(configuration)?;
    }
    Ok(Arc::new(store))
}

fn configuration(error: rustls::Error) -> Error {
    Error::BadArgument(format!("TLS cannot be set up: {error}"))
}

/// What an error of TLS means, in words that name no secret.
pub(super) fn explain(error: &rustls::Error) -> String {
    match error {
        rustls::Error::AlertReceived(alert) => format!("the peer refused us ({alert:?})"),
        rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure) => {
            "the peer's key is not one that we were told to trust".into()
        }
        rustls::Error::NoCertificatesPresented => "the peer showed no certificate".into(),
        other => other.to_string(),
    }
}

/// Runs the handshake to its end within its time, whatever the peer does with its bytes, and starts the pipe.
fn establish(stream: TcpStream, mut tls: Connection, limits: &Limits) -> Result<SocketPipe> {
    let deadline = Instant::now() + limits.handshake;
    stream.set_nodelay(true)?;
    tls.set_buffer_limit(None);
    let mut raw = vec![0u8; 16 << 10];
    let mut early = Vec::new();
    loop {
        write_pending(&stream, &mut tls, deadline, limits)?;
        if !tls.is_handshaking() {
            break;
        }
        stream.set_read_timeout(Some(left(deadline, limits)?))?;
        let n = match (&stream).read(&mut raw) {
            Ok(0) => return Err(Error::PeerGone { step: STEP.into() }),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(handshake_link(e, limits)),
        };
        let mut bytes = &raw[..n];
        while !bytes.is_empty() {
            tls.read_tls(&mut bytes).map_err(|e| Error::NotAuthenticated(e.to_string()))?;
            match tls.process_new_packets() {
                Ok(news) => {
                    let have = early.len();
                    early.resize(have + news.plaintext_bytes_to_read(), 0);
                    tls.reader().read_exact(&mut early[have..])?;
                }
                Err(error) => {
                    // The alert that tells the peer why; if it cannot leave, the reason is still ours to report.
                    let _ = write_pending(&stream, &mut tls, deadline, limits);
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                    return Err(Error::NotAuthenticated(explain(&error)));
                }
            }
        }
    }
    if tls.alpn_protocol() != Some(ALPN) {
        return Err(Error::NotAuthenticated("the peer does not speak cloister-engine/1".into()));
    }
    let binding = [0u8; 32];
    let binding = match &tls {
        Connection::Client(c) => c.export_keying_material(binding, b"EXPORTER-cloister-engine-session", None),
        Connection::Server(s) => s.export_keying_material(binding, b"EXPORTER-cloister-engine-session", None),
    }
    .map_err(|e| Error::NotAuthenticated(explain(&e)))?;
    SocketPipe::start(stream, Some(tls), early, Some(binding), limits)
}

fn left(deadline: Instant, limits: &Limits) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(handshake_link(ErrorKind::TimedOut.into(), limits)) } else { Ok(left) }
}

fn handshake_link(error: std::io::Error, limits: &Limits) -> Error {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            Error::TimedOut { step: STEP.into(), seconds: limits.handshake.as_secs() }
        }
        ErrorKind::UnexpectedEof => Error::PeerGone { step: STEP.into() },
        _ => Error::Link(error),
    }
}

fn write_pending(mut stream: &TcpStream, tls: &mut Connection, deadline: Instant, limits: &Limits) -> Result<()> {
    while tls.wants_write() {
        stream.set_write_timeout(Some(left(deadline, limits)?))?;
        match tls.write_tls(&mut stream) {
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(handshake_link(e, limits)),
        }
    }
    stream.flush()?;
    Ok(())
}

/// Accepts exactly the peers whose public keys are pinned.
#[derive(Debug)]
struct Pinned {
    pins: Vec<Fingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pinned {
    fn new(pins: &[Fingerprint], provider: &CryptoProvider) -> Result<Self> {
        if pins.is_empty() {
            return Err(Error::BadArgument("no key of the peer is pinned, so nobody could be accepted".into()));
        }
        Ok(Self { pins: pins.to_vec(), algorithms: provider.signature_verification_algorithms })
    }

    fn check(&self, shown: &CertificateDer<'_>) -> std::result::Result<(), rustls::Error> {
        if self.pins.contains(&key_of(shown)?) {
            Ok(())
        } else {
            Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }
}

/// How a signature is checked is the same whoever made it: as TLS 1.3 says, and never as TLS 1.2 did.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
            Err(rustls::Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            shown: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
            verify_tls13_signature(message, shown, signed, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}
