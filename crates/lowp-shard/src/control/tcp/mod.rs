//! Ranks as processes: rank 0 listens, the others connect to it, and all calls meet in its hub.

use std::sync::Arc;

use super::{Control, Launch, local};
use crate::ShardError;

mod client;
mod frame;
mod server;

/// Joins the world that `launch` describes, as its rank: returns when all ranks are there. Rank 0 listens on
/// the port of `launch`; at the address alone if that is one of this machine only (`localhost`, `127.0.0.1`, `::1`), on all
/// interfaces else. What travels is neither encrypted nor signed: the network must be trusted, as for NCCL.
///
/// The last handle of rank 0 waits for the other ranks to go, at most the time limit.
///
/// # Errors
/// A port that is taken, a rank that is missing when the time is over, two processes of one rank, or ranks of another
/// world, protocol or build: on every rank that is there, naming it.
pub fn join(launch: &Launch) -> Result<Arc<dyn Control>, ShardError> {
    if launch.world == 1 {
        return Ok(local::threads(1, launch.limit).swap_remove(0));
    }
    if launch.rank == 0 {
        return server::listen(launch);
    }
    client::connect(launch)
}
