//! The header of a frame: accepted only if it is exactly the one that is due.
#![no_main]
use cloister_core::net::Kind;
use cloister_core::net::frame::{self, Due};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: ([u8; 16], u64, u16)| {
    let (header, sequence, most) = input;
    let due = Due { kind: Kind::Answer, sequence, least: 0, most: most.into() };
    if let Ok(length) = frame::decode(&header, &due) {
        assert_eq!(frame::encode(due.kind, length as u32, sequence), header);
    }
});
