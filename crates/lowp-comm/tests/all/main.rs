//! The integration tests of lowp-comm, in one program.

mod common;

mod collectives;
mod crossed_waits;
mod failures;
mod faults;
mod many_rounds;
mod meshes;
mod messages;
mod owned;
mod relays;
mod rendezvous;
mod rounds;
mod uneven;
