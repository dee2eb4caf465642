//! [`Post`]: what a rank brings to a round.

use std::fmt::Debug;

use super::call::Call;

/// What ranks bring to rounds: bytes of the host, and what else threads can hand to each other.
pub(crate) trait Payload: Clone + Debug + Send + Sync + 'static {
    fn of_bytes(bytes: Vec<u8>) -> Self;

    /// The bytes that [`Payload::of_bytes`] was given.
    fn bytes(&self) -> &[u8];
}

/// A rank's part in a round.
#[derive(Clone, Debug)]
pub(crate) struct Post<P> {
    pub(crate) call: Call,
    pub(crate) payload: P,
}
