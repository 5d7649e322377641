//! Two processes, a client and a server, compute together on additive shares; neither sees the other's input.
//!
//! Semi-honest security, 128 bits, no dealer. The page `docs/crypto-engine.md` explains the design; the modules follow
//! it from the bottom up: [`field`] and [`random`], [`net`] (the one place that touches a socket), [`rlwe`]
//! (encryption), [`matmul`] (products), [`ot`] (oblivious transfer and its store), [`protocol`] (everything that is
//! not linear). Nothing here knows Python.

pub mod engine;
pub mod error;
pub mod field;
pub mod matmul;
pub mod measure;
pub mod net;
pub mod ot;
pub mod pages;
pub mod party;
pub mod preprocess;
pub mod protocol;
pub mod random;
pub mod rlwe;
pub mod session;
#[cfg(any(test, feature = "insecure-test-dealer"))]
pub mod testing;

pub use error::{Error, Result};
pub use party::{Party, Role};

/// The version of the core, compared in the hello.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Whether this build has the dealer of the tests, who knows every correlation. The Python module refuses to be built with it.
pub const HAS_INSECURE_TEST_DEALER: bool = cfg!(feature = "insecure-test-dealer");
