//! The store of one-time correlations against crashes, failing disks, copies, backups and damage.
//!
//! Everything here uses public functions only. The checker ([`world::check`]) knows nothing of the store: it looks at
//! the values that the two parties were given.

mod crashes;
mod damage;
mod disk;
mod engine;
mod preprocessing;
mod processes;
mod world;
