//! [`Mesh`]: ranks as replicas x shards (HSDP), and the communicators of its rows and columns.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use lowp_kernels::Backend;

use crate::{CommError, Communicator, or_abort};

/// `replicate * shard` ranks. Rank `r * shard + s` holds shard `s` of replica `r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Number of replicas, which hold the same.
    pub replicate: usize,
    /// Number of shards of each replica.
    pub shard: usize,
}

impl Mesh {
    /// All ranks in one shard group.
    pub const fn sharded(world: usize) -> Self {
        Self {
            replicate: 1,
            shard: world,
        }
    }

    /// Number of ranks: replicas times shards.
    pub const fn world(self) -> usize {
        self.replicate * self.shard
    }

    /// The replica and the shard of `rank`.
    ///
    /// # Errors
    /// A rank outside the mesh.
    pub const fn coordinates(self, rank: usize) -> Result<(usize, usize), CommError> {
        if rank >= self.world() {
            return Err(CommError::NoSuchRank {
                rank,
                world: self.world(),
            });
        }
        Ok((rank / self.shard, rank % self.shard))
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.replicate, self.shard))
    }
}

impl FromStr for Mesh {
    type Err = CommError;

    /// Parses `RxS`, for example `2x4`.
    fn from_str(text: &str) -> Result<Self, CommError> {
        let dim = |t: &str| t.trim().parse().ok().filter(|&n: &usize| n > 0);
        text.split_once(['x', 'X'])
            .and_then(|(r, s)| {
                Some(Self {
                    replicate: dim(r)?,
                    shard: dim(s)?,
                })
            })
            .filter(|mesh| mesh.replicate.checked_mul(mesh.shard).is_some())
            .ok_or_else(|| CommError::BadMesh {
                text: text.to_owned(),
            })
    }
}

/// The communicators of one rank of a [`Mesh`]. Shards or replicas that are all ranks have the communicator of the world.
#[derive(Clone, Debug)]
pub struct MeshComm<B: Backend> {
    /// How many replicas and shards there are.
    pub mesh: Mesh,
    /// All ranks of all replicas.
    pub world: Arc<dyn Communicator<B>>,
    /// The ranks that hold the other shards of this rank's replica.
    pub shard: Arc<dyn Communicator<B>>,
    /// The ranks that hold this rank's shard in other replicas.
    pub replicate: Arc<dyn Communicator<B>>,
}

impl<B: Backend> MeshComm<B> {
    /// [`Communicator::forget_reductions`] of those that gradients are reduced over.
    pub fn forget_reductions(&self) {
        for comm in [&self.shard, &self.replicate] {
            comm.forget_reductions();
        }
    }

    /// Splits `world`. Collective.
    ///
    /// # Errors
    /// A mesh of another size than the world, or a failure of the split.
    pub fn new(mesh: Mesh, world: Arc<dyn Communicator<B>>) -> Result<Self, CommError> {
        let made = Self::split(mesh, &world);
        or_abort(&*world, made)
    }

    fn split(mesh: Mesh, world: &Arc<dyn Communicator<B>>) -> Result<Self, CommError> {
        let Mesh { replicate, shard } = mesh;
        if mesh.world() != world.world_size() {
            let world = world.world_size();
            return Err(CommError::MeshWorld {
                replicate,
                shard,
                world,
            });
        }
        world.control().all_equal("the mesh", &mesh.to_string())?;
        let (replica, part) = mesh.coordinates(world.rank())?;
        let split = |all: bool, color, key| match all {
            true => Ok(Arc::clone(world)),
            false => world.split(color, key),
        };
        Ok(Self {
            mesh,
            world: Arc::clone(world),
            shard: split(replicate == 1, replica, part)?,
            replicate: split(shard == 1, part, replica)?,
        })
    }
}
