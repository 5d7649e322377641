//! The messages of oblivious transfers, base and extension: a party against a peer that sends the input as frames of
//! the right kind and number, so that the bodies are reached. No TLS: the pipe is the mock.
#![no_main]
use cloister_core::net::{Channel, Pipe};
use cloister_core::ot::{BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind, OtSupply};
use cloister_core::random::SecretRng;
use cloister_core::{Error, Result, Role};
use libfuzzer_sys::fuzz_target;
use std::io::ErrorKind;

/// Everything that arrives is the input, over and over.
struct Loop(Vec<u8>, usize);

impl Pipe for Loop {
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

fuzz_target!(|input: (bool, bool, Vec<u8>)| {
    let (client, post_quantum, bytes) = input;
    let mut channel = Channel::new(Box::new(Loop(bytes, 0)));
    let role = if client { Role::Client } else { Role::Server };
    let base = if post_quantum { BaseKind::MlKem768 } else { BaseKind::Ristretto };
    let Ok(bits) = GroupBits::new(2) else { return };
    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    let config = OtConfig { base, kind: OtKind::SoftSpoken(bits) };
    if let Ok(mut ot) = ExtendedOt::set_up(&mut channel, role, &[1; 32], config, &mut rng) {
        let _ = ot.send(&mut channel, 10);
        let _ = ot.receive(&mut channel, 10);
    }
});
