//! Both parties of every kind of transfer over memory channels, and attacks on them.

use super::*;
use crate::net::{Channel, memory};
use crate::party::Role;
use crate::random::SecretRng;

fn soft(bits: usize) -> OtKind {
    OtKind::SoftSpoken(GroupBits::new(bits).unwrap())
}

fn config(kind: OtKind) -> OtConfig {
    OtConfig { base: BaseKind::Ristretto, kind }
}

/// Runs two parties, each on a thread.
fn pair<T: Send, U: Send>(
    client: impl FnOnce(&mut Channel) -> T + Send,
    server: impl FnOnce(&mut Channel) -> U + Send,
) -> (T, U) {
    let (mut a, mut b) = memory::channels();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || server(&mut b));
        let mine = client(&mut a);
        drop(a);
        (mine, other.join().expect("the server's thread ends"))
    })
}

/// Both ends of a supply, and channels that stay connected.
fn supplies(config: OtConfig) -> ((Channel, ExtendedOt), (Channel, ExtendedOt)) {
    let (a, b) = memory::channels();
    let session = [7; 32];
    let start = move |mut channel: Channel, role| {
        let supply = ExtendedOt::set_up(&mut channel, role, &session, config, &mut SecretRng::from_os()).unwrap();
        (channel, supply)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || start(b, Role::Server));
        (start(a, Role::Client), other.join().unwrap())
    })
}

fn both<A: Send, B: Send, T: Send, U: Send>(
    client: &mut A,
    server: &mut B,
    f: impl FnOnce(&mut A) -> T + Send,
    g: impl FnOnce(&mut B) -> U + Send,
) -> (T, U) {
    std::thread::scope(|scope| {
        let other = scope.spawn(move || g(server));
        (f(client), other.join().unwrap())
    })
}

fn check(sent: &SentPads, got: &ReceivedPads) {
    assert_eq!(sent.len(), got.pads.len());
    assert_eq!(sent.len(), got.choices.len());
    for ((pair, &choice), &pad) in sent.iter().zip(&got.choices).zip(&got.pads) {
        assert!(choice < 2);
        assert_eq!(pair[choice as usize], pad);
        assert_ne!(pair[1 - choice as usize], pad);
    }
}

fn check16(sent: &[[u8; 16]], got: &ReceivedPads16) {
    assert_eq!(sent.len(), got.pads.len());
    for ((all, &choice), &pad) in sent.iter().zip(&got.choices).zip(&got.pads) {
        assert!(choice < 16);
        assert_eq!(all[choice as usize], pad);
    }
}

/// Within six standard deviations of `n` draws with probability 1 / `sides`.
fn plausible(count: usize, n: usize, sides: usize) -> bool {
    let (mean, p) = (n as f64 / sides as f64, 1.0 / sides as f64);
    (count as f64 - mean).abs() < 6.0 * (n as f64 * p * (1.0 - p)).sqrt() + 1.0
}

fn every_kind() -> Vec<OtKind> {
    vec![soft(1), soft(2), soft(4), soft(8)]
}

#[test]
fn every_kind_gives_matching_pads_in_both_directions() {
    for kind in every_kind() {
        let ((mut ca, mut a), (mut cb, mut b)) = supplies(config(kind));
        for n in [1, 0, 5, 1000, 40_000] {
            let ((sent, got), (peer_got, peer_sent)) = std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    let got = (b.receive(&mut cb, n).unwrap(), b.receive16(&mut cb, n).unwrap());
                    (got, (b.send(&mut cb, n).unwrap(), b.send16(&mut cb, n).unwrap()))
                });
                let sent = (a.send(&mut ca, n).unwrap(), a.send16(&mut ca, n).unwrap());
                let got = (a.receive(&mut ca, n).unwrap(), a.receive16(&mut ca, n).unwrap());
                ((sent, got), other.join().unwrap())
            });
            check(&sent.0, &peer_got.0);
            check16(&sent.1, &peer_got.1);
            check(&peer_sent.0, &got.0);
            check16(&peer_sent.1, &got.1);
            assert_eq!(a.stock(), b.stock().for_peer());
            if n == 40_000 {
                let ones = got.0.choices.iter().filter(|&&c| c == 1).count();
                assert!(plausible(ones, n, 2), "{ones} of {n} choices are 1");
                for value in 0..16 {
                    let count = got.1.choices.iter().filter(|&&c| c == value).count();
                    assert!(plausible(count, n, 16), "choice {value} came {count} times in {n}");
                }
                let all: std::collections::HashSet<_> = sent.0.iter().flatten().collect();
                assert_eq!(all.len(), 2 * n, "a pad came twice");
                let other = peer_sent.1.iter().zip(&got.1.choices).zip(&got.1.pads);
                let equal = other.filter(|((all, c), pad)| all[(**c ^ 1) as usize] == **pad).count();
                assert!(plausible(equal, n, 256), "{equal} of {n} unchosen 8-bit pads equal the chosen one");
            }
        }
    }
}

#[test]
fn ml_kem_base_transfers_give_a_working_supply() {
    let ((mut ca, mut a), (mut cb, mut b)) = supplies(OtConfig { base: BaseKind::MlKem768, kind: soft(4) });
    let (sent, got) = std::thread::scope(|scope| {
        let other = scope.spawn(|| b.receive(&mut cb, 100).unwrap());
        (a.send(&mut ca, 100).unwrap(), other.join().unwrap())
    });
    check(&sent, &got);
}
