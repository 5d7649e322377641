//! What a hostile peer can make us hold: at most twice what it sent and a mebibyte, by a counting allocator.

#[path = "hostile_common/counting.rs"]
mod counting;
mod session_common;

use cloister_core::net::{Channel, Kind, Limits, tcp};
use cloister_core::session::{Hello, Session};
use cloister_core::{Error, Role};
use counting::{Counting, growth};
use session_common::*;
use std::io::Write;
use std::time::Duration;

#[global_allocator]
static COUNTING: Counting = Counting;

/// One test, because the counters are those of the whole process.
#[test]
fn memory_grows_with_what_was_received_and_not_with_what_was_announced() {
    let limits = Limits { hello: Duration::from_millis(500), quiet: Duration::from_millis(500), ..Limits::default() };
    // A body of 1 GiB is due and announced; `sent` bytes of it come, and then nothing.
    for sent in [0usize, 1000, 300_000, 1 << 20, 10_000_000, 40_000_000] {
        let (ours, theirs) = sockets();
        let part = vec![0u8; sent];
        let (error, most) = growth(|| {
            let pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
            both(
                || {
                    our_error(Duration::from_secs(30), move || {
                        let mut channel = Channel::new(Box::new(pipe));
                        channel.receive(Kind::Shares, 1 << 30)
                    })
                },
                || {
                    let mut header = [0u8; 16];
                    header[..4].copy_from_slice(&(1u32 << 30).to_le_bytes());
                    header[4..6].copy_from_slice(&(Kind::Shares as u16).to_le_bytes());
                    (&theirs).write_all(&header).unwrap();
                    (&theirs).write_all(&part).unwrap();
                    theirs.shutdown(std::net::Shutdown::Write).unwrap();
                },
            )
            .0
        });
        assert!(matches!(error, Error::PeerGone { .. }), "{error}");
        println!("{sent} bytes sent of 1 GiB announced: {most} bytes held");
        assert!(most <= 2 * sent + (1 << 20), "{sent} bytes sent, {most} held");
    }
    // A flood that nobody waits for: the cap, and not the flood.
    let limits = Limits { unread: 4 << 20, ..limits };
    let (ours, theirs) = sockets();
    theirs.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let block = vec![0u8; 1 << 16];
    let (pipe, most) = growth(|| {
        let pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
        while (&theirs).write_all(&block).is_ok() {}
        pipe
    });
    println!("a flood against a cap of {} bytes: {most} bytes held", limits.unread);
    assert!(most <= limits.unread + (2 << 20), "{most}");
    drop(pipe);
    // A hello as long as allowed, and one that says it is longer.
    let hello = Hello::new(Role::Client, &terms(), [1; 32], &vec![7; 4096]).encode();
    for announced in [hello.len(), u32::MAX as usize] {
        let (ours, theirs) = sockets();
        let mut wire = (announced as u32).to_le_bytes().to_vec();
        wire.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        wire.extend(&hello);
        let (error, most) = growth(|| {
            (&theirs).write_all(&wire).unwrap();
            let pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
            our_error(Duration::from_secs(5), move || Session::accept(Box::new(pipe), &terms(), b"", &limits))
        });
        println!("a hello that announces {announced}: {error}; {most} bytes held");
        assert!(most <= 2 * wire.len() + (1 << 20), "{most}");
    }
}
