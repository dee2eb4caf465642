//! Ranks as processes: rank 0 listens, the others connect to it, and all calls meet in its hub.
//!
//! One thread of rank 0 serves all connections. Ranks of other machines have one connection for all of them, that of the first: its
//! thread is their [`relay`].

use std::sync::Arc;

use super::{Control, Launch, local};
use crate::CommError;

mod answers;
mod client;
mod conn;
mod connection;
mod connections;
mod frame;
mod host;
mod nodes;
mod relay;
mod server;
mod welcome;

/// Joins the world that `launch` describes, as its rank: returns when all ranks are there. Rank 0 listens on
/// the port of `launch`; at the address alone if that is one of this machine only (`localhost`, `127.0.0.1`, `::1`), on all
/// interfaces else. What travels is neither encrypted nor signed: the network must be trusted, as for NCCL.
///
/// Where the first rank of another machine, by its local rank, has others beside it, it becomes their relay: their calls go by it
/// to rank 0, and what rank 0 answers comes by it. They hear of it when all ranks have come to rank 0. A rank that does not reach the relay stays with rank 0.
///
/// The last handle of rank 0 waits for the other ranks to go, and that of a relay for those of its machine, at most the time limit.
///
/// # Errors
/// A port that is taken, a rank that is missing when the time is over, two processes of one rank, or ranks of another
/// world, protocol or build: on every rank that is there, naming it.
pub fn join(launch: &Launch) -> Result<Arc<dyn Control>, CommError> {
    if launch.world == 1 {
        return Ok(local::threads(1, launch.limit).swap_remove(0));
    }
    if launch.rank == 0 {
        return Ok(Arc::new(host::listen(launch)?));
    }
    client::connect(launch)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn launch(rank: usize, port: u16) -> Launch {
        Launch {
            rank,
            world: 3,
            local_rank: rank,
            local_world: 3,
            host: "127.0.0.1".to_owned(),
            port,
            limit: LIMIT,
            build: "tests".to_owned(),
            run: String::new(),
            restart: 0,
        }
    }

    /// Splits again and again, and uses what comes of it.
    fn split(control: &dyn Control) -> Result<(), CommError> {
        for round in 0..20 {
            let group = control.split(usize::from(control.rank() == round % 3), 0)?;
            let within = group.split(0, 0)?;
            drop(group);
            within.barrier()?;
        }
        Ok(())
    }

    /// What processes split ends with its last handle, too.
    #[test]
    fn rank_0_forgets_groups_that_nobody_holds() {
        let free = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = free.local_addr().expect("its number").port();
        drop(free);
        thread::scope(|scope| {
            for rank in 1..3 {
                scope.spawn(move || {
                    let control = join(&launch(rank, port)).expect("a world");
                    split(&*control).expect("groups");
                    // Until rank 0 has counted.
                    control.barrier().expect("a round");
                });
            }
            let host = host::listen(&launch(0, port)).expect("a world");
            split(&host).expect("groups");
            let begun = Instant::now();
            while host.groups() > 1 && begun.elapsed() < LIMIT {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(host.groups(), 1);
            (&host as &dyn Control).barrier().expect("a round");
        });
    }
}
