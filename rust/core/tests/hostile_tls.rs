//! Strangers, thieves and broken links under TLS: each ends in a typed error on our side, in time, without a panic.

mod session_common;

use cloister_core::net::identity::{Fingerprint, Identity, KeyKind, Trust};
use cloister_core::net::{Channel, Kind, Limits, Pipe, SocketPipe, tls};
use cloister_core::session::Session;
use cloister_core::{Error, Result};
use rustls::crypto::aws_lc_rs;
use session_common::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

fn quick() -> Limits {
    Limits { handshake: Duration::from_millis(600), ..short_frames() }
}

fn tls_outcomes(client_trusts: Trust, server_trusts: Trust, c: &Identity, s: &Identity) -> (Result<()>, Result<()>) {
    let limits = short();
    let (a, b) = sockets();
    let use_it = |pipe: Result<SocketPipe>| {
        let mut channel = Channel::new(Box::new(pipe?));
        channel.exchange(Kind::Opening, &[0; 10], 10).map(drop)
    };
    both(|| use_it(tls::connect(a, c, &client_trusts, &limits)), || use_it(tls::accept(b, s, &server_trusts, &limits)))
}

#[test]
fn a_wrong_key_is_refused_by_whoever_sees_it_and_the_other_learns_that() {
    for kind in [KeyKind::Ed25519, KeyKind::P256] {
        let (c, s, other) = (someone(kind), someone(kind), someone(kind));
        let (a, b) = tls_outcomes(s.trusted(), c.trusted(), &c.identity, &s.identity);
        a.unwrap();
        b.unwrap();
        let refused = |r: &Result<()>| matches!(r, Err(Error::NotAuthenticated(_)));
        for (case, (a, b)) in [
            ("the server is another", tls_outcomes(other.trusted(), c.trusted(), &c.identity, &s.identity)),
            ("the client is another", tls_outcomes(s.trusted(), other.trusted(), &c.identity, &s.identity)),
            ("both are", tls_outcomes(other.trusted(), other.trusted(), &c.identity, &s.identity)),
        ] {
            assert!(refused(&a), "{case}: the client ends with {a:?}");
            assert!(refused(&b), "{case}: the server ends with {b:?}");
        }
    }
    let c = someone(KeyKind::Ed25519);
    let (a, _b) = sockets();
    assert!(matches!(tls::connect(a, &c.identity, &Trust::Keys(vec![]), &short()), Err(Error::BadArgument(_))));
}

#[test]
fn a_certificate_without_its_key_is_not_an_identity() {
    let (c, s, thief) = (someone(KeyKind::Ed25519), someone(KeyKind::Ed25519), someone(KeyKind::Ed25519));
    // The thief shows the client's certificate and signs with a key of its own.
    let stolen = Identity::from_pem(&c.files.certificate, &thief.files.key).unwrap();
    let (a, b) = tls_outcomes(s.trusted(), c.trusted(), &stolen, &s.identity);
    assert!(matches!(a, Err(Error::NotAuthenticated(_))), "{a:?}");
    assert!(matches!(b, Err(Error::NotAuthenticated(_))), "{b:?}");
}

#[test]
fn an_authority_vouches_for_its_own_and_for_nobody_else() {
    let authority = |name: &str| {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let mut p = rcgen::CertificateParams::new(vec![]).unwrap();
        p.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        p.distinguished_name.push(rcgen::DnType::CommonName, name);
        let pem = p.self_signed(&key).unwrap().pem();
        (pem, rcgen::Issuer::new(p, key))
    };
    let ((roots, issuer), (other_roots, _)) = (authority("ours"), authority("theirs"));
    let member = |name: &str| {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let p = rcgen::CertificateParams::new(vec![name.into()]).unwrap();
        let pem = p.signed_by(&key, &issuer).unwrap().pem();
        Identity::from_pem(&pem, &key.serialize_pem()).unwrap()
    };
    let (c, s) = (member("client.test"), member("server.test"));
    let trust = |roots: &str, name: &str| Trust::Authority { certificates: roots.into(), server_name: name.into() };
    let ok = trust(&roots, "server.test");
    let (a, b) = tls_outcomes(ok.clone(), ok.clone(), &c, &s);
    a.unwrap();
    b.unwrap();
    let stranger = someone(KeyKind::Ed25519);
    for (case, (a, b)) in [
        ("another name", tls_outcomes(trust(&roots, "elsewhere.test"), ok.clone(), &c, &s)),
        ("another authority", tls_outcomes(trust(&other_roots, "server.test"), ok.clone(), &c, &s)),
        ("self-signed client", tls_outcomes(ok.clone(), ok.clone(), &stranger.identity, &s)),
        ("self-signed server", tls_outcomes(ok.clone(), ok.clone(), &c, &stranger.identity)),
    ] {
        assert!(matches!(a, Err(Error::NotAuthenticated(_))), "{case}: {a:?}");
        assert!(matches!(b, Err(Error::NotAuthenticated(_))), "{case}: {b:?}");
    }
}

/// A client made by hand, with something missing. Our server must refuse it.
fn odd_client(make: impl FnOnce(&Someone, &Someone) -> rustls::ClientConfig) -> Error {
    let (c, s) = (someone(KeyKind::P256), someone(KeyKind::P256));
    let config = make(&c, &s);
    let (a, b) = sockets();
    let limits = short();
    let (error, ()) = both(
        || our_error(SOON, || tls::accept(b, &s.identity, &c.trusted(), &limits)),
        || {
            let name = "peer.invalid".try_into().unwrap();
            let mut tls = rustls::ClientConnection::new(std::sync::Arc::new(config), name).unwrap();
            let mut stream = a;
            let _ = tls.complete_io(&mut stream);
            let _ = tls.writer().write_all(b"hello");
            let _ = tls.complete_io(&mut stream);
        },
    );
    error
}

#[derive(Debug)]
struct AnyServer;

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> std::result::Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> std::result::Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> std::result::Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        vec![rustls::SignatureScheme::ECDSA_NISTP256_SHA256, rustls::SignatureScheme::ED25519]
    }
}

fn hand_made(
    who: Option<&Someone>,
    groups: Vec<&'static dyn rustls::crypto::SupportedKxGroup>,
    alpn: &[&[u8]],
) -> rustls::ClientConfig {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = groups;
    let builder = rustls::ClientConfig::builder_with_provider(std::sync::Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(std::sync::Arc::new(AnyServer));
    let mut config = match who {
        None => builder.with_no_client_auth(),
        Some(who) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(who.files.certificate.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(who.files.key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    config.alpn_protocols = alpn.iter().map(|a| a.to_vec()).collect();
    config
}

#[test]
fn no_certificate_no_alpn_another_alpn_and_a_classical_key_exchange_are_refused() {
    let hybrid = || vec![aws_lc_rs::kx_group::X25519MLKEM768];
    let refused = |error: &Error| matches!(error, Error::NotAuthenticated(_));
    for (case, error) in [
        ("no certificate", odd_client(|_, _| hand_made(None, hybrid(), &[tls::ALPN]))),
        ("no ALPN", odd_client(|c, _| hand_made(Some(c), hybrid(), &[]))),
        ("another ALPN", odd_client(|c, _| hand_made(Some(c), hybrid(), &[b"http/1.1"]))),
        ("X25519 alone", odd_client(|c, _| hand_made(Some(c), vec![aws_lc_rs::kx_group::X25519], &[tls::ALPN]))),
    ] {
        assert!(refused(&error), "{case}: {error}");
    }
}

#[test]
fn a_tls12_client_is_refused() {
    // A ClientHello of TLS 1.2, by hand: our build of rustls has no TLS 1.2 to make one with.
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    hello.push(0);
    hello.extend([0, 2, 0xc0, 0x2f, 1, 0]);
    let extensions = [
        &[0, 10, 0, 4, 0, 2, 0, 23][..], // groups: P-256
        &[0, 11, 0, 2, 1, 0],            // point formats
        &[0, 13, 0, 4, 0, 2, 4, 3],      // signatures: ECDSA with SHA-256
    ]
    .concat();
    hello.extend((extensions.len() as u16).to_be_bytes());
    hello.extend(extensions);
    let mut record = vec![22, 3, 1];
    record.extend((hello.len() as u16 + 4).to_be_bytes());
    record.extend([1, 0]);
    record.extend((hello.len() as u16).to_be_bytes());
    record.extend(hello);
    let (c, s) = (someone(KeyKind::P256), someone(KeyKind::P256));
    let (a, b) = sockets();
    let limits = short();
    let (error, alert) = both(
        || our_error(SOON, || tls::accept(b, &s.identity, &c.trusted(), &limits)),
        || {
            (&a).write_all(&record).unwrap();
            let mut alert = [0; 7];
            (&a).read_exact(&mut alert).unwrap();
            alert
        },
    );
    assert!(matches!(&error, Error::NotAuthenticated(why) if why.contains("ersion")), "{error}");
    assert_eq!((alert[0], alert[6]), (21, 70), "an alert that says protocol_version");
}

/// Passes `most` bytes in one direction and everything in the other; then it hangs up, or holds the line.
fn cut_after(from: TcpStream, to: TcpStream, most: usize, hang_up: bool) {
    let (from2, to2) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = std::io::copy(&mut &to2, &mut &from2);
        });
        let _ = std::io::copy(&mut (&from).take(most as u64), &mut &to);
        if hang_up {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        } else {
            // Hold the line until both ends have given up.
            let _ = std::io::copy(&mut &from, &mut std::io::sink());
        }
    });
}

#[test]
fn a_handshake_cut_anywhere_ends_in_time_at_both_ends() {
    let (c, s) = (someone(KeyKind::Ed25519), someone(KeyKind::Ed25519));
    let limits = quick();
    let mut tried = 0;
    for from_client in [true, false] {
        // Inside each flight: the hello (1.2 kB of key share), the certificate, the verification, the end.
        for most in [0, 1, 5, 100, 700, 1300, 1450, 1700, 1900, 2100] {
            for hang_up in [true, false] {
                if !hang_up && most % 100 != 0 {
                    continue;
                }
                let ((a, near), (far, b)) = (sockets(), sockets());
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        if from_client {
                            cut_after(near, far, most, hang_up)
                        } else {
                            cut_after(far, near, most, hang_up)
                        }
                    });
                    let use_it = |pipe: Result<SocketPipe>| {
                        let mut channel = Channel::new(Box::new(pipe?));
                        channel.exchange(Kind::Opening, &[0; 3000], 3000).map(drop)
                    };
                    let started = Instant::now();
                    let (x, y) = both(
                        || use_it(tls::connect(a, &c.identity, &s.trusted(), &limits)),
                        || use_it(tls::accept(b, &s.identity, &c.trusted(), &limits)),
                    );
                    assert!(started.elapsed() < SOON);
                    // Where the cut comes last, the party whose bytes were not cut may be content.
                    assert!(x.is_err() || y.is_err(), "{most} bytes of {from_client}");
                    for error in [x, y].into_iter().filter_map(Result::err) {
                        let typed = matches!(
                            error,
                            Error::PeerGone { .. }
                                | Error::TimedOut { .. }
                                | Error::NotAuthenticated(_)
                                | Error::Link(_)
                        );
                        assert!(typed, "{error}");
                    }
                });
                tried += 1;
            }
        }
    }
    println!("{tried} cuts of a handshake");
}

#[test]
fn garbage_instead_of_tls_and_tls_that_was_tampered_with_are_refused() {
    let (c, s) = (someone(KeyKind::Ed25519), someone(KeyKind::Ed25519));
    let (a, b) = sockets();
    let (error, ()) = both(
        || our_error(SOON, || tls::accept(b, &s.identity, &c.trusted(), &short())),
        || (&a).write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap(),
    );
    assert!(matches!(error, Error::NotAuthenticated(_)), "{error}");

    // One bit of the stream flips after the handshake.
    let ((a, near), (far, b)) = (sockets(), sockets());
    let limits = short();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut &far2, &mut &near2));
            let (mut seen, mut buffer) = (0usize, [0u8; 4096]);
            while let Ok(n @ 1..) = (&near).read(&mut buffer) {
                if (seen..seen + n).contains(&50_000) {
                    buffer[50_000 - seen] ^= 1;
                }
                seen += n;
                if (&far).write_all(&buffer[..n]).is_err() {
                    break;
                }
            }
        });
        let (_, error) = both(
            || {
                let mut pipe = tls::connect(a, &c.identity, &s.trusted(), &limits)?;
                pipe.send(&vec![0; 100_000])?;
                pipe.flush()?;
                pipe.receive(&mut [0; 1])
            },
            || {
                our_error(SOON, || {
                    tls::accept(b, &s.identity, &c.trusted(), &limits).and_then(|mut pipe| pipe.receive_vec(100_000))
                })
            },
        );
        assert!(matches!(error, Error::NotAuthenticated(_)), "{error}");
    });
}

#[test]
fn a_peer_that_stops_after_the_handshake_or_after_its_hello_is_late() {
    let limits = short_frames();
    for after_hello in [false, true] {
        let (a, mut b) = tls_pair(&limits);
        let terms = terms();
        let (error, _held) = both(
            || our_error(SOON, || Session::connect(Box::new(a), &terms, b"", &limits)),
            || {
                if after_hello {
                    let hello = cloister_core::session::Hello::new(cloister_core::Role::Server, &terms, [1; 32], b"");
                    b.send(&frame(Kind::Hello as u16, 0, &hello.encode())).unwrap();
                    b.flush().unwrap();
                }
                std::thread::sleep(Duration::from_secs(2));
                b
            },
        );
        assert!(matches!(&error, Error::TimedOut { step, .. } if step == "hello"), "{error}");
    }
}

#[test]
fn a_fingerprint_is_exact() {
    let s = someone(KeyKind::Ed25519);
    let mut near = s.files.fingerprint;
    near.0[31] ^= 1;
    let c = someone(KeyKind::Ed25519);
    let (a, _) = tls_outcomes(Trust::Keys(vec![near]), c.trusted(), &c.identity, &s.identity);
    assert!(matches!(a, Err(Error::NotAuthenticated(_))), "{a:?}");
    assert_ne!(near, Fingerprint([0; 32]));
}
