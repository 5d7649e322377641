//! The start of a session against a peer that sends anything: an error, never a session.
#![no_main]
use cloister_core::net::{Limits, Pipe};
use cloister_core::session::{Session, Terms};
use cloister_core::{Error, Result};
use libfuzzer_sys::fuzz_target;
use std::io::ErrorKind;

struct Script(Vec<u8>, usize);

impl Pipe for Script {
    fn send(&mut self, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        let end = self.1 + into.len();
        let Some(bytes) = self.0.get(self.1..end) else { return Err(Error::Link(ErrorKind::UnexpectedEof.into())) };
        into.copy_from_slice(bytes);
        self.1 = end;
        Ok(())
    }
}

fuzz_target!(|bytes: Vec<u8>| {
    let terms = Terms::new([3; 32], vec![33538049], 40, [9; 32]);
    // The confirmation hangs on our fresh nonce, so no script can have it.
    assert!(Session::connect(Box::new(Script(bytes, 0)), &terms, b"", &Limits::default()).is_err());
});
