//! Hostile and broken peers over real sockets, below TLS (`hostile_tls.rs` has what is above): each ends in a typed error on our side, in time, without a panic.

mod session_common;

use cloister_core::Error;
use cloister_core::net::{Channel, Kind, Limits, Pipe, tcp};
use session_common::*;
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Our side waits for the messages `Opening` (100 bytes) and `Choices` (10 bytes); the peer writes what it likes.
fn against(limits: Limits, peer: impl FnOnce(TcpStream) + Send) -> Error {
    let (ours, theirs) = sockets();
    let pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
    let (error, ()) = both(
        || {
            our_error(SOON, move || {
                let mut channel = Channel::new(Box::new(pipe));
                channel.step("test", |ch| {
                    ch.receive(Kind::Opening, 100)?;
                    ch.receive(Kind::Choices, 10)
                })
            })
        },
        || peer(theirs),
    );
    error
}

fn bad(error: &Error) -> bool {
    matches!(error, Error::BadMessage { step, .. } if step == "test")
}

fn gone(error: &Error) -> bool {
    matches!(error, Error::PeerGone { .. })
}

fn late(error: &Error) -> bool {
    matches!(error, Error::TimedOut { .. })
}

#[test]
fn wrong_frames_are_refused() {
    let opening = Kind::Opening as u16;
    let good = frame(opening, 0, &[0; 100]);
    let mut reserved = good.clone();
    reserved[6] = 1;
    let mut huge = good.clone();
    huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    let cases: [(&str, Vec<u8>); 12] = [
        ("oversized", frame(opening, 0, &[0; 101])),
        ("undersized", frame(opening, 0, &[0; 99])),
        ("empty", frame(opening, 0, &[])),
        ("4 GiB announced", huge),
        ("early next step", frame(Kind::Choices as u16, 0, &[0; 100])),
        ("unknown kind", frame(999, 0, &[0; 100])),
        ("kind zero", frame(0, 0, &[0; 100])),
        ("reserved bits", reserved),
        ("number skipped", frame(opening, 1, &[0; 100])),
        ("duplicate", [good.clone(), good.clone()].concat()),
        ("replayed", [good.clone(), frame(Kind::Choices as u16, 0, &[0; 10])].concat()),
        ("random", (0..4000u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect()),
    ];
    for (name, bytes) in cases {
        let error = against(short(), move |mut s| s.write_all(&bytes).unwrap());
        assert!(bad(&error), "{name}: {error}");
    }
    let bye = frame(Kind::Goodbye as u16, 0, &[]);
    assert!(gone(&against(short(), move |mut s| s.write_all(&bye).unwrap())));
}

#[test]
fn a_peer_that_stops_anywhere_in_a_frame_is_late_and_one_that_hangs_up_there_is_gone() {
    let good = frame(Kind::Opening as u16, 0, &[0; 100]);
    for k in [0, 1, 15, 16, 17, 115, 116] {
        let part = good[..k].to_vec();
        let error = against(short_frames(), move |mut s| {
            s.write_all(&part).unwrap();
            std::thread::sleep(Duration::from_millis(1500));
        });
        assert!(late(&error), "stops after {k}: {error}");
    }
    for k in 0..=116 {
        let part = good[..k].to_vec();
        let error = against(short(), move |mut s| {
            s.write_all(&part).unwrap();
            s.shutdown(Shutdown::Write).unwrap();
        });
        assert!(gone(&error), "FIN after {k}: {error}");
    }
}

#[test]
fn a_reset_in_a_frame_is_a_broken_link() {
    for k in [0, 5, 50] {
        let (ours, theirs) = sockets();
        let pipe = tcp::insecure_plain_loopback(ours, &short()).unwrap();
        let (error, ()) = both(
            || {
                our_error(SOON, move || {
                    let mut channel = Channel::new(Box::new(pipe));
                    channel.step("test", |ch| ch.exchange(Kind::Opening, &[0; 100], 100))
                })
            },
            || {
                (&theirs).write_all(&frame(Kind::Opening as u16, 0, &[0; 100])[..k]).unwrap();
                // Our message lies unread in it by then, so closing it is a reset.
                std::thread::sleep(Duration::from_millis(100));
                drop(theirs);
            },
        );
        assert!(matches!(&error, Error::Link(e) if e.kind() == ErrorKind::ConnectionReset), "RST after {k}: {error}");
    }
}

#[test]
fn a_peer_that_resets_while_we_write_ends_our_writing() {
    let (ours, theirs) = sockets();
    let mut pipe = tcp::insecure_plain_loopback(ours, &short()).unwrap();
    let (error, ()) = both(
        || {
            our_error(SOON, || {
                loop {
                    pipe.send(&[0; 1 << 16])?;
                    pipe.flush()?;
                }
                #[allow(unreachable_code)]
                Ok(())
            })
        },
        // Bytes of ours lie unread in it, so closing it is a reset.
        || {
            std::thread::sleep(Duration::from_millis(50));
            drop(theirs);
        },
    );
    assert!(
        // Which of the three is noticed first depends on which thread meets the closed socket.
        matches!(&error, Error::Link(e) if matches!(
            e.kind(),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof
        )),
        "{error}"
    );
}

#[test]
fn a_trickle_is_late_though_it_is_never_silent() {
    for body in [false, true] {
        let started = Instant::now();
        let error = against(short_frames(), move |mut s| {
            let good = frame(Kind::Opening as u16, 0, &[0; 100]);
            let (now, slowly) = good.split_at(if body { 16 } else { 0 });
            let _ = s.write_all(now);
            for byte in slowly {
                std::thread::sleep(Duration::from_millis(100));
                if s.write_all(&[*byte]).is_err() {
                    break;
                }
            }
        });
        assert!(late(&error), "{error}");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    }
}

#[test]
fn a_peer_that_never_reads_ends_our_writing_in_time() {
    let limits = Limits { unsent: 1 << 20, ..short_frames() };
    let (ours, theirs) = sockets();
    let mut pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
    let error = our_error(SOON, || {
        for _ in 0..4096 {
            pipe.send(&[0; 1 << 16])?;
        }
        pipe.flush()
    });
    assert!(matches!(&error, Error::Link(e) if e.kind() == ErrorKind::TimedOut), "{error}");
    drop(theirs);
}

#[test]
fn a_flood_stops_at_the_cap_and_the_first_wrong_frame_ends_it() {
    let limits = Limits { unread: 1 << 20, ..short() };
    let (ours, theirs) = sockets();
    let pipe = tcp::insecure_plain_loopback(ours, &limits).unwrap();
    let (taken, ()) = both(
        || {
            theirs.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
            let (mut taken, block) = (0usize, vec![0; 1 << 16]);
            while let Ok(n) = (&theirs).write(&block) {
                taken += n;
                assert!(taken < 64 << 20, "the flood is read without end");
            }
            taken
        },
        || {
            std::thread::sleep(Duration::from_millis(1500));
            assert!(bad(&our_error(SOON, move || {
                Channel::new(Box::new(pipe)).step("test", |ch| ch.receive(Kind::Opening, 100))
            })));
        },
    );
    println!("a flood of {taken} bytes was taken, by a cap of {} and the buffers of the kernel", limits.unread);
}

#[test]
fn a_refused_connection_is_a_link_error() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(matches!(tcp::connect(closed, &Limits::default()), Err(Error::Link(_))));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(late(&our_error(SOON, || tcp::accept(&nobody, Duration::from_millis(50)))));
}
