//! Every fast protocol step, base and extended transfers among them, against a peer that says what it
//! said in an honest run, with the input laid over the bodies of its messages: a value or a typed error.
#![no_main]
use cloister_core::Role;
use cloister_core::testing::replay::{Damage, Recording, STEPS};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static RECORDINGS: LazyLock<Vec<Recording>> = LazyLock::new(|| STEPS.into_iter().map(Recording::of).collect());

fuzz_target!(|input: (u8, bool, Vec<(u8, u32, &[u8])>)| {
    let (which, client, changes) = input;
    let recording = &RECORDINGS[usize::from(which) % RECORDINGS.len()];
    let role = if client { Role::Client } else { Role::Server };
    let damage: Vec<Damage> = changes.iter().map(|&(m, at, bytes)| (m.into(), at as usize, bytes)).collect();
    let _ = recording.damaged(role, &damage);
});
