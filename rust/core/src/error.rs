//! Everything that can go wrong in the engine, in one list.
//!
//! Each error has a stable [`Error::code`]; the Python layer maps it to one exception class. No message carries a
//! share, a key, a noise level or anything else that depends on a secret: a peer may be shown every one of them.

use thiserror::Error;

/// The engine's one error type.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The link failed: reset, closed, refused.
    #[error("the link to the peer failed: {0}")]
    Link(#[from] std::io::Error),
    /// The peer went away in the middle of a step.
    #[error("the peer closed the link during {step}")]
    PeerGone {
        /// The protocol step that was running.
        step: String,
    },
    /// The peer did not answer within the time allowed.
    #[error("the peer did not answer within {seconds} s during {step}")]
    TimedOut {
        /// The protocol step that was running.
        step: String,
        /// How long was waited.
        seconds: u64,
    },
    /// A message that the protocol does not allow at this point.
    #[error("the peer sent a message that does not belong here during {step}: {reason}")]
    BadMessage {
        /// The protocol step that was running.
        step: String,
        /// What was wrong with it, in terms of public facts (lengths, kinds, ranges).
        reason: String,
    },
    /// The two parties do not agree on something that the hello compares.
    #[error("the parties disagree on {field}: {reason}")]
    Disagreement {
        /// The field of the hello.
        field: &'static str,
        /// Both sides' public values.
        reason: String,
    },
    /// TLS refused the peer, or the peer refused us.
    #[error("the peer could not be authenticated: {0}")]
    NotAuthenticated(String),
    /// A value or a shape that this build cannot compute with.
    #[error("{0}")]
    Unsupported(String),
    /// The caller's own mistake: wrong length, value outside the fixed-point range.
    #[error("{0}")]
    BadArgument(String),
    /// The store of one-time correlations is damaged, copied or restored.
    #[error("the store of one-time correlations cannot be used: {0}")]
    Store(String),
    /// Another process uses the store.
    #[error("the store of one-time correlations is in use: {0}")]
    StoreBusy(String),
    /// The disk under the store has no room.
    #[error("the store of one-time correlations cannot be written: {0}")]
    DiskFull(String),
    /// The folder of the store is not one to write secrets into, or the disk under it fails. The store is as it was.
    #[error("the folder of the store of one-time correlations cannot be used: {0}")]
    StoreFolder(String),
    /// A sound store that belongs to another role, peer, model or kind of transfers.
    #[error("this is another computation's store of one-time correlations: {0}")]
    StoreMismatch(String),
    /// A stored correlation would have been used twice.
    #[error("one-time correlations are used up: {0}")]
    Exhausted(String),
    /// The answers of this session have used up what flooding hides: more would tell the client of the weights.
    #[error(
        "this session cannot give {answers} more answers: they would show more of the weights' noise than is allowed in \
         one session; open a new session"
    )]
    HidingUsedUp {
        /// How many answers were wanted.
        answers: usize,
    },
    /// An earlier error ended this session.
    #[error("this session ended with an earlier error and cannot be used again")]
    SessionOver,
}

impl Error {
    /// A stable name for logs, the wire and the Python exception map.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Link(_) => "engine.link",
            Error::PeerGone { .. } => "engine.peer_gone",
            Error::TimedOut { .. } => "engine.timed_out",
            Error::BadMessage { .. } => "engine.bad_message",
            Error::Disagreement { .. } => "engine.disagreement",
            Error::NotAuthenticated(_) => "engine.not_authenticated",
            Error::Unsupported(_) => "engine.unsupported",
            Error::BadArgument(_) => "engine.bad_argument",
            Error::Store(_) => "engine.store",
            Error::StoreBusy(_) => "engine.store_busy",
            Error::DiskFull(_) => "engine.disk_full",
            Error::StoreFolder(_) => "engine.store_folder",
            Error::StoreMismatch(_) => "engine.store_mismatch",
            Error::Exhausted(_) => "engine.exhausted",
            Error::HidingUsedUp { .. } => "engine.hiding_used_up",
            Error::SessionOver => "engine.session_over",
        }
    }
}

/// The engine's result type.
pub type Result<T> = std::result::Result<T, Error>;
