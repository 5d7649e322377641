//! Links that carry honest parties: nothing stands still, whatever both send at once, and it is fast enough.

mod session_common;

use cloister_core::net::{Channel, Kind, Limits, Pipe, cost};
use session_common::*;
use std::time::Instant;

#[test]
fn both_send_a_hundred_megabytes_before_either_receives() {
    let body = vec![0x5a; 100 << 20];
    let limits = Limits { unread: 4 << 20, unsent: 4 << 20, ..Limits::default() };
    for (a, b) in [plain_pair(&limits), tls_pair(&limits)] {
        let exchange = |pipe| {
            let mut channel = Channel::new(Box::new(pipe));
            let theirs = channel.step("big", |ch| ch.exchange(Kind::Shares, &body, body.len())).unwrap();
            assert!(theirs == body);
            (channel.costs(), channel)
        };
        let ((ours, _a), (theirs, _b)) = both(|| exchange(a), || exchange(b));
        assert_eq!(cost::difference(&ours, &theirs), None);
    }
}

#[test]
fn many_small_messages_arrive_in_order_and_the_books_agree() {
    let limits = Limits::default();
    let (a, b) = tls_pair(&limits);
    let work = |pipe, first: bool| {
        let mut channel = Channel::new(Box::new(pipe));
        for i in 0..2000usize {
            let length = i * 7 % 300;
            channel
                .step(if i % 2 == 0 { "even" } else { "odd" }, |ch| {
                    if first {
                        ch.send(Kind::Request, &vec![i as u8; length])?;
                        assert_eq!(ch.receive(Kind::Answer, 3)?, [1, 2, 3]);
                    } else {
                        assert_eq!(ch.receive(Kind::Request, length)?, vec![i as u8; length]);
                        ch.send(Kind::Answer, &[1, 2, 3])?;
                        ch.flush()?;
                    }
                    Ok(())
                })
                .unwrap();
        }
        channel.goodbye().unwrap();
        channel.costs()
    };
    let started = Instant::now();
    let (ours, theirs) = both(|| work(a, true), || work(b, false));
    println!("a round trip over TLS on loopback: {:.0} us", started.elapsed().as_secs_f64() / 2000.0 * 1e6);
    assert_eq!(cost::difference(&ours, &theirs), None);
    assert_eq!(cost::total(&ours).rounds, 2001);
}

#[test]
fn what_was_flushed_arrives_though_the_sender_is_dropped_at_once() {
    let limits = Limits::default();
    for (mut a, mut b) in [plain_pair(&limits), tls_pair(&limits)] {
        let body = vec![1; 3 << 20];
        let ((), got) = both(
            || {
                a.send(&body).unwrap();
                a.flush().unwrap();
                drop(a);
            },
            || b.receive_vec(3 << 20).unwrap(),
        );
        assert!(got == body);
    }
}

/// Processor seconds of this process so far, from Linux; zero elsewhere.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = |n: usize| stat.rsplit(')').next()?.split_whitespace().nth(n)?.parse::<f64>().ok();
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

/// `cargo test -p cloister-core --test session_links -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn throughput() {
    let piece = vec![7u8; 4 << 20];
    let count = 256;
    let total = (piece.len() * count) as f64 / 1e9;
    let limits = Limits::default();
    for (name, (mut a, mut b)) in [("plain", plain_pair(&limits)), ("TLS", tls_pair(&limits))] {
        let send = |pipe: &mut dyn Pipe| {
            for _ in 0..count {
                pipe.send(&piece).unwrap();
            }
            pipe.flush().unwrap();
        };
        let receive = |pipe: &mut dyn Pipe| {
            for _ in 0..count {
                pipe.receive_vec(4 << 20).unwrap();
            }
        };
        let (started, worked) = (Instant::now(), processor_seconds());
        both(|| send(&mut a), || receive(&mut b));
        let (wall, work) = (started.elapsed().as_secs_f64(), processor_seconds() - worked);
        println!("{name}, one direction: {:.2} GB/s, {:.2} processor s a GB at both ends", total / wall, work / total);
        let swap = |pipe: &mut dyn Pipe| {
            for _ in 0..count {
                pipe.send(&piece).unwrap();
                pipe.flush().unwrap();
                pipe.receive_vec(4 << 20).unwrap();
            }
        };
        let (started, worked) = (Instant::now(), processor_seconds());
        both(|| swap(&mut a), || swap(&mut b));
        let (wall, work) = (started.elapsed().as_secs_f64(), processor_seconds() - worked);
        println!(
            "{name}, both at once: {:.2} GB/s each, {:.2} processor s a GB at both ends",
            total / wall,
            work / total / 2.0
        );
    }
}
