//! Which product made ahead is which: a product is prepared once and used once, by both parties, on the same weights.
//!
//! Both parties count the products that a session prepares, so a number names one; it travels with the hidden input, and
//! a server that is about to use another one says so instead of computing garbage. The session's own number keeps
//! products of different sessions apart.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of one prepared product. Public; it cannot be copied, as little as what it names.
#[derive(PartialEq, Eq)]
pub(super) struct Ticket {
    session: u64,
    number: u64,
}

/// Where a session's tickets come from.
#[derive(Default)]
pub(super) struct Tickets {
    session: u64,
    next: AtomicU64,
}

impl Tickets {
    pub fn new(transcript: &[u8; 32]) -> Self {
        let digest = Sha256::new().chain_update(b"cloister prepared products").chain_update(transcript).finalize();
        let session = u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes"));
        Self { session, next: AtomicU64::new(0) }
    }

    /// The next one; the other party takes the same.
    pub fn next(&self) -> Ticket {
        Ticket { session: self.session, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// The ticket of a product that was stored, in an earlier session or in this one, good in this one. Its number tells it
    /// from every other product of any session.
    pub fn restored(&self, stored: &[u8; Ticket::STORED_LEN]) -> Ticket {
        let digest = Sha256::new().chain_update(b"cloister stored product").chain_update(stored).finalize();
        Ticket { session: self.session, number: u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes")) }
    }

    /// Refuses a product that another session prepared.
    pub fn check(&self, ticket: &Ticket) -> Result<()> {
        if ticket.session == self.session {
            Ok(())
        } else {
            Err(Error::BadArgument("this product was prepared in another session".into()))
        }
    }
}

impl Ticket {
    /// Bytes of a ticket before a hidden input.
    pub const WIRE_LEN: usize = 8;

    /// Bytes of a ticket in a store.
    pub const STORED_LEN: usize = 16;

    /// What a store keeps of it: which product of which session.
    pub fn to_stored(&self) -> [u8; Self::STORED_LEN] {
        let mut out = [0; Self::STORED_LEN];
        out[..8].copy_from_slice(&self.session.to_le_bytes());
        out[8..].copy_from_slice(&self.number.to_le_bytes());
        out
    }

    /// What travels.
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        self.number.to_le_bytes()
    }

    /// Splits a message into the ticket, which must be this one, and the rest.
    pub fn strip<'a>(&self, message: &'a [u8]) -> Result<&'a [u8]> {
        let (ticket, rest) = message.split_at(Self::WIRE_LEN.min(message.len()));
        if ticket == self.to_bytes() {
            return Ok(rest);
        }
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
        Err(Error::Disagreement {
            field: "prepared product",
            reason: format!("the client uses number {}, the server number {}", number(ticket), self.number),
        })
    }
}
