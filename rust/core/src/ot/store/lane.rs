//! Lanes: what the store holds, one endless sequence of one-time items for each kind and direction.

use crate::field;
use crate::party::Role;

/// One sequence of one-time items. Both parties hold matching halves under the same index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Lane {
    /// Random 1-of-2 transfers in which the client sends.
    PadsFromClient,
    /// Random 1-of-2 transfers in which the server sends.
    PadsFromServer,
    /// Random 1-of-16 transfers in which the client sends.
    Pads16FromClient,
    /// Random 1-of-16 transfers in which the server sends.
    Pads16FromServer,
    /// Multiplication triples.
    Triples,
    /// Opaque records, for example a prepared linear layer's R and share of R W. A session may have several streams.
    Records(u16),
}

/// Most lanes in one store; with more the marks would not fit the hello.
pub const MAX_LANES: usize = 64;

/// Items in one block of every lane but the records: the unit that is sealed, reserved and wiped.
pub const BLOCK_ITEMS: u64 = 1024;

impl Lane {
    /// The 1-of-2 transfers of this sender.
    pub fn pads(sender: Role) -> Lane {
        if sender.is_client() { Lane::PadsFromClient } else { Lane::PadsFromServer }
    }

    /// The 1-of-16 transfers of this sender.
    pub fn pads16(sender: Role) -> Lane {
        if sender.is_client() { Lane::Pads16FromClient } else { Lane::Pads16FromServer }
    }

    /// Items in one block.
    pub fn block_items(self) -> u64 {
        if matches!(self, Lane::Records(_)) { 1 } else { BLOCK_ITEMS }
    }

    /// Bytes of one block as this party stores it; `None` for records, whose length is their own.
    pub fn block_bytes(self, role: Role) -> Option<usize> {
        let n = BLOCK_ITEMS as usize;
        let sends = match self {
            Lane::PadsFromClient | Lane::Pads16FromClient => role == Role::Client,
            _ => role == Role::Server,
        };
        match self {
            Lane::PadsFromClient | Lane::PadsFromServer if sends => Some(32 * n),
            Lane::PadsFromClient | Lane::PadsFromServer => Some(n / 8 + 16 * n),
            Lane::Pads16FromClient | Lane::Pads16FromServer if sends => Some(16 * n),
            Lane::Pads16FromClient | Lane::Pads16FromServer => Some(n / 2 + n),
            Lane::Triples => Some(3 * field::packed_len(n, field::P_BITS)),
            Lane::Records(_) => None,
        }
    }

    /// A name for file names, costs and messages.
    pub fn name(self) -> String {
        match self {
            Lane::PadsFromClient => "pads-from-client".into(),
            Lane::PadsFromServer => "pads-from-server".into(),
            Lane::Pads16FromClient => "pads16-from-client".into(),
            Lane::Pads16FromServer => "pads16-from-server".into(),
            Lane::Triples => "triples".into(),
            Lane::Records(stream) => format!("records-{stream}"),
        }
    }

    pub(super) fn encode(self) -> [u8; 3] {
        let (kind, stream) = match self {
            Lane::PadsFromClient => (1, 0),
            Lane::PadsFromServer => (2, 0),
            Lane::Pads16FromClient => (3, 0),
            Lane::Pads16FromServer => (4, 0),
            Lane::Triples => (5, 0),
            Lane::Records(stream) => (6u8, stream),
        };
        let [low, high] = stream.to_le_bytes();
        [kind, low, high]
    }

    pub(super) fn decode(bytes: [u8; 3]) -> Option<Lane> {
        let lane = match bytes[0] {
            1 => Lane::PadsFromClient,
            2 => Lane::PadsFromServer,
            3 => Lane::Pads16FromClient,
            4 => Lane::Pads16FromServer,
            5 => Lane::Triples,
            6 => Lane::Records(u16::from_le_bytes([bytes[1], bytes[2]])),
            _ => return None,
        };
        (lane.encode() == bytes).then_some(lane)
    }
}
