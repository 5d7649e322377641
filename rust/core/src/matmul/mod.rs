//! Products of shared matrices with weights that only the server knows, and of two shared matrices.
pub mod shared;
pub mod single;
pub mod triples;
