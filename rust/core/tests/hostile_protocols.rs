//! Every protocol step between two honest parties over a hostile link: a value or a typed error, in time, no panic.
//!
//! `cargo test -p cloister-core --features insecure-test-dealer --test hostile_protocols`
#![cfg(feature = "insecure-test-dealer")]

use cloister_core::error::Result;
use cloister_core::field;
use cloister_core::net::faults::Trial;
use cloister_core::ot::{BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind, OtSupply};
use cloister_core::party::Party;
use cloister_core::protocol as step;
use cloister_core::random::SecretRng;
use cloister_core::session::{Session, Terms};
use std::time::Duration;

type Step = fn(&mut Party, &[u64], &[u8]) -> Result<()>;

const STEPS: [(&str, Step); 11] = [
    ("truncate", |p, x, _| step::truncate(p, x, 12).map(drop)),
    ("to_ring", |p, x, _| step::to_ring(p, x, 0, 13).map(drop)),
    ("and", |p, _, b| step::and(p, b, b).map(drop)),
    ("select", |p, x, b| step::select(p, b, x).map(drop)),
    ("bits_to_field", |p, _, b| step::bits_to_field(p, b).map(drop)),
    ("multiply", |p, x, _| step::multiply(p, x, x).map(drop)),
    ("is_negative", |p, x, _| step::is_negative(p, x, 20, 4).map(drop)),
    ("equal", |p, x, _| step::equal(p, x, x).map(drop)),
    ("one_hot", |p, x, _| step::one_hot(p, x, 9, 5).map(drop)),
    ("maximum", |p, x, _| step::maximum(p, x, step::Rows { length: 3, kappa: 20, drop_bits: 4 }).map(drop)),
    ("reveal_to_both", |p, x, _| step::reveal_to_both(p, &vec![0; x.len()]).map(drop)),
];

fn trial() -> Trial {
    Trial { most_cases: 150, patience: Duration::from_millis(60), ..Trial::default() }
}

#[test]
fn every_step_survives_a_hostile_link() {
    for (name, step) in STEPS {
        let survival = trial().party(move |party| {
            let x = field::random_vector(&mut party.rng, 9);
            let bits: Vec<u8> = x.iter().map(|v| (v & 1) as u8).collect();
            step(party, &x, &bits)
        });
        println!("{name}: {survival:?}");
        assert_eq!(survival.blamed_on_caller, 0, "{name}");
        assert!(survival.refused > 0);
    }
}

#[test]
fn the_supplies_of_transfers_survive_a_hostile_link() {
    for base in [BaseKind::Ristretto, BaseKind::MlKem768] {
        for bits in [1, 2] {
            let trial = Trial { most_cases: 60, patience: Duration::from_millis(1500), ..trial() };
            let survival = trial.channel(move |role, mut channel| {
                let config = OtConfig { base, kind: OtKind::SoftSpoken(GroupBits::new(bits)?) };
                let mut rng = SecretRng::from_os();
                let mut ot = ExtendedOt::set_up(&mut channel, role, &[4; 32], config, &mut rng)?;
                if role.is_client() {
                    ot.send(&mut channel, 100)?;
                    ot.receive16(&mut channel, 100)?;
                } else {
                    ot.receive(&mut channel, 100)?;
                    ot.send16(&mut channel, 100)?;
                }
                channel.flush()
            });
            println!("{base:?}, groups of {bits}: {survival:?}");
            assert_eq!(survival.blamed_on_caller, 0);
        }
    }
}

#[test]
fn the_hello_survives_a_hostile_link_and_refuses_every_change() {
    let survival = trial().pipe(|role, pipe| {
        let terms = Terms::new([3; 32], vec![33538049], 40, [9; 32]);
        let limits = cloister_core::net::Limits { hello: Duration::from_millis(60), ..Default::default() };
        let begin = if role.is_client() { Session::connect } else { Session::accept };
        begin(pipe, &terms, b"marks", &limits)?.finish()
    });
    println!("hello: {survival:?}");
    assert_eq!(survival.blamed_on_caller, 0);
    // What comes after the goodbye is read by nobody: a doubled goodbye goes unnoticed, once for each party.
    assert!(survival.refused + 2 >= survival.cases, "{survival:?}");
}
