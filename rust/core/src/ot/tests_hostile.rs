//! Attacks on transfers, each winning with its guard off and losing with it on, and peers that send nonsense.

use super::aes::Domain;
use super::softspoken::{Chooser, Holder, STEP};
use super::tests::*;
use super::*;
use crate::error::Error;
use crate::net::faults::Trial;
use crate::net::{Channel, Kind, memory};
use crate::party::Role;
use crate::random::SecretRng;
use std::time::Duration;

/// What a receiver that has seen one pad it should not have (a message it knew anyway) can say about all others.
fn others_predicted(sent: &SentPads, got: &ReceivedPads) -> usize {
    let leak = sent[0][1 - got.choices[0] as usize];
    let offset = leak ^ got.pads[0];
    let all = sent.iter().zip(&got.choices).zip(&got.pads).skip(1);
    all.filter(|((pair, c), pad)| pair[1 - **c as usize] == **pad ^ offset).count()
}

#[test]
fn without_the_hash_one_known_message_gives_away_the_offset_and_all_other_pads() {
    for kind in [soft(1), soft(4), OtKind::Silent] {
        for guard in [true, false] {
            let (mut a, mut b) = ends(config(kind));
            if !guard {
                a.supply.insecure_hash_off();
                b.supply.insecure_hash_off();
            }
            let n = 5000;
            let (sent, got) = both(
                &mut a,
                &mut b,
                |a| a.supply.send(&mut a.channel, n).unwrap(),
                |b| b.supply.receive(&mut b.channel, n).unwrap(),
            );
            check(&sent, &got);
            assert_eq!(others_predicted(&sent, &got), if guard { 0 } else { n - 1 });
        }
    }
}

#[test]
fn the_holders_view_does_not_give_the_choices() {
    // The correction hides the choices behind streams of which the holder lacks one per group. Without that (here:
    // the difference of two groups' corrections as a guess at the choices) a guess is right half of the time.
    let (mut a, mut b) = memory::channels();
    let bits = GroupBits::new(4).unwrap();
    let session = [5; 32];
    let (mut holder, mut chooser) = both(
        &mut a,
        &mut b,
        |a| Holder::set_up(a, BaseKind::Ristretto, bits, &session, "client", &mut SecretRng::from_os()).unwrap(),
        |b| Chooser::set_up(b, BaseKind::Ristretto, bits, &session, "client", &mut SecretRng::from_os()).unwrap(),
    );
    let n = 8 * STEP;
    let (mut choices, mut pads) = (Vec::new(), Vec::new());
    chooser.extend(&mut b, n, &mut choices, &mut pads).unwrap();
    let correction = a.receive(Kind::OtExtension, 31 * n / 8).unwrap();
    for group in 0..31 {
        let guess = |i: usize| {
            let byte = correction[i / STEP * 31 * STEP / 8 + group * STEP / 8 + i % STEP / 8];
            byte >> (i % 8) & 1
        };
        let right = (0..n).filter(|&i| guess(i) == choices[i]).count();
        assert!(plausible(right, n, 2), "{right} of {n} guesses are right");
    }
    // The same message, given to the holder, makes the pads match: it is the real one.
    both(
        &mut a,
        &mut b,
        |a| {
            let (mut fake, mut end) = memory::channels();
            fake.send(Kind::OtExtension, &correction).unwrap();
            let mut out = Vec::new();
            holder.extend(&mut end, n, &mut out).unwrap();
            check(&out, &ReceivedPads { choices, pads });
            let _ = a;
        },
        |_| (),
    );
}

/// What the honest party makes of the given bodies, all sent before it begins.
fn against<T>(bodies: &[(Kind, Vec<u8>)], body: impl FnOnce(&mut Channel) -> crate::Result<T>) -> Error {
    let (a, b) = memory::pipes(Duration::from_millis(50));
    let mut peer = Channel::new(Box::new(a));
    for (kind, bytes) in bodies {
        peer.send(*kind, bytes).unwrap();
    }
    peer.flush().unwrap();
    let mut channel = Channel::new(Box::new(b));
    body(&mut channel).err().expect("the honest party refuses")
}

const GOOD_POINT: [u8; 32] = curve25519_dalek::constants::RISTRETTO_BASEPOINT_COMPRESSED.0;

/// Encodings that are no point: the identity, values over the field's prime, negative, not square.
fn bad_points() -> Vec<[u8; 32]> {
    let mut above = [0xff; 32];
    above[31] = 0x7f;
    let mut prime = above;
    prime[0] = 0xed;
    let mut negative = GOOD_POINT;
    negative[0] ^= 1;
    let mut high_bit = GOOD_POINT;
    high_bit[31] |= 0x80;
    let mut two = [0; 32];
    two[0] = 2;
    let mut one = [0; 32];
    one[0] = 1;
    vec![[0; 32], [0xff; 32], above, prime, negative, high_bit, one, two]
        .into_iter()
        .filter(|p| *p != GOOD_POINT)
        .collect()
}

#[test]
fn bad_points_and_wrong_lengths_of_base_transfers_are_refused() {
    let domain = Domain::new(&[0; 32], "client", "base");
    let rng = &mut SecretRng::from_os();
    let kind = BaseKind::Ristretto;
    for bad in bad_points() {
        let error = against(&[(Kind::BaseOt, bad.to_vec())], |c| base::receive(c, kind, &domain, &[0; 4], rng));
        assert_eq!(error.code(), "engine.bad_message", "{bad:?}");
        for place in 0..4 {
            let mut points = [GOOD_POINT; 4];
            points[place] = bad;
            let error = against(&[(Kind::BaseOt, points.concat())], |c| base::send(c, kind, &domain, 4, rng));
            assert_eq!(error.code(), "engine.bad_message");
        }
    }
    for length in [0, 1, 31, 33, 64, 127, 129] {
        let body = [(Kind::BaseOt, vec![1; length])];
        assert_eq!(against(&body, |c| base::receive(c, kind, &domain, &[0; 4], rng)).code(), "engine.bad_message");
        assert_eq!(against(&body, |c| base::send(c, kind, &domain, 4, rng)).code(), "engine.bad_message");
        let kind = BaseKind::MlKem768;
        assert_eq!(against(&body, |c| base::receive(c, kind, &domain, &[0; 4], rng)).code(), "engine.bad_message");
        assert_eq!(against(&body, |c| base::send(c, kind, &domain, 4, rng)).code(), "engine.bad_message");
    }
    // A key whose numbers are not reduced.
    let body = [(Kind::BaseOt, vec![0xff; 4 * 2336])];
    assert_eq!(against(&body, |c| base::send(c, BaseKind::MlKem768, &domain, 4, rng)).code(), "engine.bad_message");
}

#[test]
fn random_bytes_of_the_right_length_never_panic() {
    let domain = Domain::new(&[0; 32], "client", "base");
    let mut rng = SecretRng::from_os();
    for _ in 0..200 {
        let mut bytes = vec![0; 2 * 1088];
        rng.fill(&mut bytes);
        let point = bytes[..32].to_vec();
        let (a, b) = memory::pipes(Duration::from_millis(50));
        let (mut peer, mut channel) = (Channel::new(Box::new(a)), Channel::new(Box::new(b)));
        peer.send(Kind::BaseOt, &point).unwrap();
        let outcome = base::receive(&mut channel, BaseKind::Ristretto, &domain, &[1; 3], &mut rng);
        assert!(outcome.is_ok() || outcome.err().is_some_and(|e| e.code() == "engine.bad_message"));
        peer.send(Kind::BaseOt, &bytes).unwrap();
        let (a, b) = memory::pipes(Duration::from_millis(50));
        let (mut peer, mut channel) = (Channel::new(Box::new(a)), Channel::new(Box::new(b)));
        peer.send(Kind::BaseOt, &bytes).unwrap();
        // A wrong ciphertext of the right length gives a pad that matches nothing (implicit rejection).
        assert!(base::receive(&mut channel, BaseKind::MlKem768, &domain, &[1], &mut rng).is_ok());
    }
}

#[test]
fn wrong_messages_of_every_extension_are_refused_and_end_the_session() {
    for kind in [soft(1), soft(8), OtKind::Silent] {
        for sixteen in [false, true] {
            for length in [0, 1, 100, 511, 513, 1 << 20] {
                // The client sends transfers: it waits for the server's corrections.
                let (mut a, mut b) = ends(config(kind));
                b.channel.send(Kind::OtExtension, &vec![0x55; length]).unwrap();
                b.channel.flush().unwrap();
                let outcome = if sixteen {
                    a.supply.send16(&mut a.channel, 10).map(drop)
                } else {
                    a.supply.send(&mut a.channel, 10).map(drop)
                };
                assert_eq!(outcome.unwrap_err().code(), "engine.bad_message");
                assert!(a.supply.send(&mut a.channel, 10).is_err(), "the session is over");
            }
        }
    }
    // The receiver of silent transfers waits for the trees.
    let (mut a, mut b) = ends(config(OtKind::Silent));
    b.channel.send(Kind::OtExtension, &[0; 512]).unwrap();
    b.channel.flush().unwrap();
    assert_eq!(a.supply.receive(&mut a.channel, 10).err().map(|e| e.code()), Some("engine.bad_message"));
    // A correction of noise values that has five bits.
    let (mut a, mut b) = ends(config(OtKind::Silent));
    b.channel.send(Kind::OtExtension, &vec![0; 512 * 12 / 8 * 31]).unwrap();
    let mut flips = [15; 512];
    flips[77] = 16;
    b.channel.send(Kind::OtExtension, &flips).unwrap();
    b.channel.flush().unwrap();
    assert_eq!(a.supply.send16(&mut a.channel, 10).err().map(|e| e.code()), Some("engine.bad_message"));
}

#[test]
fn a_peer_that_lies_about_a_correction_gets_pads_that_do_not_match_and_nothing_else_breaks() {
    for kind in [soft(4), OtKind::Silent] {
        let (mut a, mut b) = ends(config(kind));
        let bytes = if kind == OtKind::Silent { 512 * 8 / 8 * 31 } else { (1 << 14) / 8 * 31 };
        b.channel.send(Kind::OtExtension, &vec![0xa5; bytes]).unwrap();
        b.channel.flush().unwrap();
        let pads = a.supply.send(&mut a.channel, 100).unwrap();
        assert!(pads.iter().all(|pair| pair[0] != pair[1]));
    }
}

#[test]
fn a_silent_or_departed_peer_ends_every_step_within_the_time_out() {
    for gone in [false, true] {
        let (a, b) = memory::pipes(Duration::from_millis(50));
        let kept = (!gone).then_some(a);
        let mut channel = Channel::new(Box::new(b));
        let begun = std::time::Instant::now();
        let rng = &mut SecretRng::from_os();
        let error = ExtendedOt::set_up(&mut channel, Role::Client, &[0; 32], config(soft(4)), rng).err().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5));
        let expected: &[&str] =
            if gone { &["engine.peer_gone", "engine.link"] } else { &["engine.timed_out", "engine.link"] };
        assert!(expected.contains(&error.code()), "{error}");
        drop(kept);
    }
}

#[test]
fn parties_with_other_kinds_or_transcripts_find_out_at_once() {
    let cases = [
        (config(soft(4)), [0; 32], config(soft(2)), [0; 32]),
        (config(soft(4)), [0; 32], config(OtKind::Silent), [0; 32]),
        (config(soft(4)), [0; 32], config(soft(4)), [1; 32]),
        (config(soft(4)), [0; 32], OtConfig { base: BaseKind::MlKem768, kind: soft(4) }, [0; 32]),
    ];
    for (ours, session, theirs, other) in cases {
        let (mut a, mut b) = memory::channels();
        let (x, y) = both(
            &mut a,
            &mut b,
            |c| ExtendedOt::set_up(c, Role::Client, &session, ours, &mut SecretRng::from_os()).err(),
            |c| ExtendedOt::set_up(c, Role::Server, &other, theirs, &mut SecretRng::from_os()).err(),
        );
        assert_eq!(x.map(|e| e.code()), Some("engine.disagreement"));
        assert_eq!(y.map(|e| e.code()), Some("engine.disagreement"));
    }
}

#[test]
fn every_kind_of_transfer_survives_every_fault_of_the_link() {
    for (kind, base) in
        [(soft(4), BaseKind::Ristretto), (soft(1), BaseKind::MlKem768), (OtKind::Silent, BaseKind::Ristretto)]
    {
        let trial = Trial { most_cases: 40, ..Trial::default() };
        trial.channel(move |role, mut channel| {
            let rng = &mut SecretRng::from_os();
            let mut supply = ExtendedOt::set_up(&mut channel, role, &[3; 32], OtConfig { base, kind }, rng)?;
            if role.is_client() {
                supply.send(&mut channel, 100)?;
                supply.receive16(&mut channel, 100)?;
            } else {
                supply.receive(&mut channel, 100)?;
                supply.send16(&mut channel, 100)?;
            }
            Ok(())
        });
    }
}
