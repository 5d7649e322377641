//! Two parties begin a session only if they agree on everything, also when somebody in the middle rewrites a hello.

mod session_common;

use cloister_core::net::{Kind, Limits, Pipe, memory};
use cloister_core::session::hello::FIELDS;
use cloister_core::session::{BaseKind, Hello, MAX_MARKS, Network, Session, Terms, TransferKind};
use cloister_core::{Error, Result, Role};
use session_common::*;
use std::time::Duration;

/// Passes one frame on, rewritten.
fn hop(from: &mut dyn Pipe, to: &mut dyn Pipe, rewrite: impl Fn(&[u8]) -> Vec<u8>) -> Result<()> {
    let mut frame = vec![0; 16];
    from.receive(&mut frame)?;
    let length = u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize;
    let body = rewrite(&from.receive_vec(length)?);
    frame[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend(body);
    to.send(&frame)?;
    to.flush()
}

/// Hello and confirmation of both parties through somebody in the middle, who rewrites the hello of one of them.
fn in_the_middle(
    left: &mut dyn Pipe,
    right: &mut dyn Pipe,
    of: Role,
    rewrite: impl Fn(&[u8]) -> Vec<u8>,
) -> Result<()> {
    for first in [true, false] {
        let change = |who, body: &[u8]| if first && who == of { rewrite(body) } else { body.to_vec() };
        hop(left, right, |body| change(Role::Client, body))?;
        hop(right, left, |body| change(Role::Server, body))?;
    }
    Ok(())
}

fn meet(of: Role, rewrite: impl Fn(&[u8]) -> Vec<u8> + Send) -> (Result<Session>, Result<Session>) {
    let wait = Duration::from_secs(5);
    let (client, mut left) = memory::pipes(wait);
    let (mut right, server) = memory::pipes(wait);
    let (terms, limits) = (terms(), Limits::default());
    std::thread::scope(|scope| {
        // A party that refuses hangs up, which ends the one in the middle, which ends the other party.
        scope.spawn(move || in_the_middle(&mut left, &mut right, of, rewrite));
        both(
            || Session::connect(Box::new(client), &terms, b"client store", &limits),
            || Session::accept(Box::new(server), &terms, b"server store", &limits),
        )
    })
}

/// The fields of an encoded hello, apart.
fn split(hello: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut rest = &hello[8..];
    let mut fields = Vec::new();
    while let [number, low, high, tail @ ..] = rest {
        let (value, tail) = tail.split_at(usize::from(u16::from_le_bytes([*low, *high])));
        fields.push((*number, value.to_vec()));
        rest = tail;
    }
    fields
}

fn join(fields: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut out = b"CLOISTER".to_vec();
    for (number, value) in fields {
        out.push(*number);
        out.extend((value.len() as u16).to_le_bytes());
        out.extend(value);
    }
    out
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Change {
    Lower,
    Remove,
    Unknown,
    Swap,
}

fn change(hello: &[u8], field: usize, how: Change) -> Vec<u8> {
    let mut fields = split(hello);
    assert_eq!(join(&fields), hello);
    match how {
        Change::Lower => {
            // Less by one, as a number with the low byte first.
            for byte in &mut fields[field].1 {
                let (less, borrow) = byte.overflowing_sub(1);
                *byte = less;
                if !borrow {
                    break;
                }
            }
        }
        Change::Remove => drop(fields.remove(field)),
        Change::Unknown => fields[field].1.fill(0xfe),
        Change::Swap => fields.swap(field, (field + 1) % FIELDS.len()),
    }
    join(&fields)
}

#[test]
fn every_change_of_every_field_of_either_hello_is_refused_with_the_name_of_the_field() {
    let mut cases = 0;
    for of in [Role::Client, Role::Server] {
        for (field, &name) in FIELDS.iter().enumerate() {
            for how in [Change::Lower, Change::Remove, Change::Unknown, Change::Swap] {
                let (client, server) = meet(of, move |hello| change(hello, field, how));
                // Swapped with the first, the last field is missed where the first is due.
                let due = match how {
                    Change::Swap if field == FIELDS.len() - 1 => FIELDS[0],
                    // A slower link has no right value to compare with: the confirmation of the whole finds it.
                    Change::Lower if name == "network" => "transcript",
                    _ => name,
                };
                let mut named = 0;
                for outcome in [&client, &server] {
                    match outcome {
                        Ok(_) => panic!("{how:?} of {due} of the {of:?} was accepted"),
                        Err(Error::Disagreement { field, .. }) => {
                            assert_eq!(*field, due, "{how:?} of the {of:?}");
                            named += 1;
                        }
                        Err(Error::PeerGone { .. }) => {}
                        Err(other) => panic!("{how:?} of {due} of the {of:?}: {other}"),
                    }
                }
                assert!(named >= 1, "{how:?} of {due} of the {of:?} was named by nobody");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 136);
    println!("{cases} downgrades refused, each with its field named");
}

#[test]
fn unchanged_hellos_are_accepted_and_both_have_one_transcript_of_their_own() {
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (client, server) = meet(Role::Client, |hello| hello.to_vec());
        let (client, server) = (client.unwrap(), server.unwrap());
        assert_eq!(client.transcript, server.transcript);
        assert_eq!(
            (client.peer_marks.as_slice(), server.peer_marks.as_slice()),
            (&b"server store"[..], &b"client store"[..])
        );
        assert!(!seen.contains(&client.transcript));
        seen.push(client.transcript);
    }
}

#[test]
fn a_hello_sent_back_to_its_sender_is_refused() {
    let (mut ours, theirs) = memory::pipes(Duration::from_secs(5));
    let terms = terms();
    let (outcome, ()) = both(
        move || Session::connect(Box::new(theirs), &terms, b"", &Limits::default()),
        move || {
            let mut frame = vec![0; 16];
            ours.receive(&mut frame).unwrap();
            let length = u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize;
            frame.extend(ours.receive_vec(length).unwrap());
            ours.send(&frame).unwrap();
        },
    );
    assert!(matches!(outcome, Err(Error::Disagreement { field: "role", .. })));
}

#[test]
fn parties_with_other_terms_name_the_field_at_both_ends() {
    let other = |name: &str| -> Terms {
        let mut t = terms();
        match name {
            "parameter table" => t.parameter_table[31] ^= 1,
            "p" => t.p = 65537,
            "ring degree" => t.ring_degree = 4096,
            "primes" => t.primes.truncate(2),
            "flood bits" => t.flood_bits = 39,
            "base transfers" => t.base = BaseKind::MlKem768,
            "transfer kind" => t.transfers = TransferKind::Silent,
            "fraction bits" => t.fraction_bits = 13,
            "model" => t.model = [0; 32],
            other => panic!("{other}"),
        }
        t
    };
    for name in [
        "parameter table",
        "p",
        "ring degree",
        "primes",
        "flood bits",
        "base transfers",
        "transfer kind",
        "fraction bits",
        "model",
    ] {
        let (a, b) = memory::pipes(Duration::from_secs(5));
        let (ours, theirs) = (terms(), other(name));
        let limits = Limits::default();
        let (client, server) = both(
            || Session::connect(Box::new(a), &ours, b"", &limits),
            || Session::accept(Box::new(b), &theirs, b"", &limits),
        );
        for outcome in [client, server] {
            assert!(matches!(outcome, Err(Error::Disagreement { field, .. }) if field == name), "{name}");
        }
    }
}

#[test]
fn both_parties_go_by_the_worse_link_and_the_cores_of_both() {
    let (a, b) = memory::pipes(Duration::from_secs(5));
    let (mut ours, mut theirs, limits) = (terms(), terms(), Limits::default());
    ours.network = Network { bytes_per_second: 1000, round_microseconds: 7, cores: 3 };
    theirs.network = Network { bytes_per_second: 900, round_microseconds: 5, cores: 2 };
    let (client, server) = both(
        || Session::connect(Box::new(a), &ours, b"", &limits),
        || Session::accept(Box::new(b), &theirs, b"", &limits),
    );
    let agreed = Network { bytes_per_second: 900, round_microseconds: 7, cores: 5 };
    assert_eq!((client.unwrap().network, server.unwrap().network), (agreed, agreed));
    for wrong in [
        Network { bytes_per_second: 0, ..agreed },
        Network { cores: 0, ..agreed },
        Network { round_microseconds: u32::MAX, ..agreed },
    ] {
        let (a, _b) = memory::pipes(Duration::from_secs(5));
        let terms = Terms { network: wrong, ..terms() };
        let outcome = Session::connect(Box::new(a), &terms, b"", &limits);
        assert!(matches!(outcome, Err(Error::BadArgument(_))));
        let hello = Hello::new(Role::Server, &terms, [5; 32], b"").encode();
        assert!(matches!(Hello::decode(&hello), Err(Error::Disagreement { field: "network", .. })));
    }
}

#[test]
fn a_hello_over_tls_is_tied_to_its_connection() {
    let limits = short();
    let (client, server) = sessions(tls_pair(&limits), &limits);
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.transcript, server.transcript);
    assert!(client.channel.binding().is_some());
    assert_eq!(client.channel.binding(), server.channel.binding());
    let (a, b) = both(
        || client.channel.exchange(Kind::Opening, &[1; 5], 5).map(|_| client.finish()),
        || server.channel.exchange(Kind::Opening, &[2; 5], 5).map(|_| server.finish()),
    );
    a.unwrap().unwrap();
    b.unwrap().unwrap();

    // The same two hellos relayed over two TLS connections: the bindings differ, so the confirmation fails.
    let ((a, relay_a), (relay_b, b)) = (tls_pair(&limits), tls_pair(&limits));
    let (outer, ()) = both(
        || sessions((a, b), &limits),
        || {
            let (mut left, mut right) = (relay_a, relay_b);
            let _ = in_the_middle(&mut left, &mut right, Role::Client, |hello| hello.to_vec());
        },
    );
    for outcome in [outer.0, outer.1] {
        assert!(matches!(outcome, Err(Error::Disagreement { field: "transcript", .. })));
    }
}

#[test]
fn marks_are_bounded_and_a_hello_has_one_encoding() {
    let (a, _b) = memory::pipes(Duration::from_secs(1));
    let outcome = Session::connect(Box::new(a), &terms(), &vec![0; MAX_MARKS + 1], &Limits::default());
    assert!(matches!(outcome, Err(Error::BadArgument(_))));
    let hello = Hello::new(Role::Server, &terms(), [5; 32], &vec![7; MAX_MARKS]);
    assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
}
