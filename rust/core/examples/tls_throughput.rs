//! Bytes a second through one connection over the loopback interface, as a session uses it: whole messages, under TLS
//! and without.
//!
//! `cargo run --release --example tls_throughput -- [megabytes] [megabytes of a message]`; both parties are in this
//! process, so on two cores they share what the machine has.

use cloister_core::net::identity::{Identity, KeyKind, Trust, keygen};
use cloister_core::net::{Channel, Kind, Limits, SocketPipe, tcp, tls};
use cloister_core::{Error, Result};
use std::net::TcpListener;
use std::time::{Duration, Instant};

fn pair(encrypted: bool) -> Result<(SocketPipe, SocketPipe)> {
    let limits = Limits::default();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = tcp::connect(listener.local_addr()?, &limits)?;
    let server = tcp::accept(&listener, Duration::from_secs(5))?;
    if !encrypted {
        return Ok((tcp::insecure_plain_loopback(client, &limits)?, tcp::insecure_plain_loopback(server, &limits)?));
    }
    let someone = || -> Result<(Identity, Trust)> {
        let files = keygen(KeyKind::Ed25519)?;
        Ok((Identity::from_pem(&files.certificate, &files.key)?, Trust::Keys(vec![files.fingerprint])))
    };
    let ((mine, my_pin), (theirs, their_pin)) = (someone()?, someone()?);
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| tls::accept(server, &theirs, &my_pin, &limits));
        let connected = tls::connect(client, &mine, &their_pin, &limits)?;
        let accepted = accepting.join().map_err(|_| Error::Unsupported("the other end panicked".into()))?;
        Ok((connected, accepted?))
    })
}

/// Seconds for `count` messages of `bytes` bytes in one direction, the last one received and acknowledged.
fn one_way(encrypted: bool, count: usize, bytes: usize) -> Result<f64> {
    let (a, b) = pair(encrypted)?;
    let (mut a, mut b) = (Channel::new(Box::new(a)), Channel::new(Box::new(b)));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || -> Result<()> {
            for _ in 0..count {
                std::hint::black_box(b.receive(Kind::Answer, bytes)?);
            }
            b.send(Kind::Choices, &[1])?;
            b.flush()
        });
        let body = vec![7u8; bytes];
        for _ in 0..count {
            a.send(Kind::Answer, &body)?;
        }
        a.receive(Kind::Choices, 1)?;
        receiving.join().map_err(|_| Error::Unsupported("the other end panicked".into()))?
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

fn main() -> Result<()> {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let (total, message) = (given.first().copied().unwrap_or(2000), given.get(1).copied().unwrap_or(4));
    for (name, encrypted) in [("plain", false), ("TLS 1.3", true)] {
        let mut rates = Vec::new();
        for _ in 0..5 {
            let seconds = one_way(encrypted, total.div_ceil(message), message << 20)?;
            rates.push((total.div_ceil(message) * message) as f64 * 1.048576e-3 / seconds);
        }
        rates.sort_by(f64::total_cmp);
        println!("{name:<8} {:.2} GB/s (median of five; {:.2} to {:.2})", rates[2], rates[0], rates[4]);
    }
    Ok(())
}
