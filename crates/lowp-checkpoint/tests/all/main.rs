//! The integration tests of this crate, one file per subject, linked once.

mod damage;
mod elements;
mod late;
mod laws;
mod mutations;
