//! Meshes of replicas and shards: coordinates, groups, and a gradient reduced over both.

use std::sync::Arc;

use crate::common::{Comm, failing, ranks, values};
use lowp_comm::{CommError, GradWire, Mesh, MeshComm, ReduceItem};
use lowp_kernels::{Backend, Cpu, Source};

#[test]
fn text_and_coordinates() {
    let mesh: Mesh = "2x3".parse().expect("a mesh");
    assert_eq!(
        (mesh, mesh.world()),
        (
            Mesh {
                replicate: 2,
                shard: 3
            },
            6
        )
    );
    assert_eq!(mesh.to_string(), "2x3");
    assert_eq!(mesh.coordinates(4), Ok((1, 1)));
    assert_eq!(
        mesh.coordinates(6),
        Err(CommError::NoSuchRank { rank: 6, world: 6 })
    );
    assert_eq!("1X4".parse(), Ok(Mesh::sharded(4)));
    for text in [
        "",
        "4",
        "0x4",
        "2x0",
        "2x-1",
        "2x3x4",
        "axb",
        "99999999999x99999999999",
    ] {
        assert_eq!(
            text.parse::<Mesh>(),
            Err(CommError::BadMesh { text: text.into() })
        );
    }
}

#[test]
fn a_gradient_is_summed_over_shards_and_replicas() {
    for (replicate, shard) in [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2)] {
        let mesh = Mesh { replicate, shard };
        let n = 10 * shard + 1;
        let ranges: Vec<_> = (0..shard)
            .map(|s| 10 * s..if s + 1 == shard { n } else { 10 * s + 10 })
            .collect();
        let grad = |rank: usize| values(rank as u64, n);
        let results = ranks(mesh.world(), |rank, comm| {
            let mesh_comm = MeshComm::new(mesh, comm)?;
            let (r, s) = mesh.coordinates(rank)?;
            assert_eq!(
                (mesh_comm.shard.rank(), mesh_comm.shard.world_size()),
                (s, shard)
            );
            assert_eq!(
                (mesh_comm.replicate.rank(), mesh_comm.replicate.world_size()),
                (r, replicate)
            );
            // Nobody splits off a group of all.
            let same = |group: &Comm| Arc::ptr_eq(group, &mesh_comm.world);
            assert_eq!(
                [same(&mesh_comm.shard), same(&mesh_comm.replicate)],
                [replicate == 1, shard == 1]
            );
            let full = Source::F32(Cpu.upload(&grad(rank))?);
            let out = Cpu.alloc(ranges[s].len())?;
            let item = ReduceItem {
                grad: &full,
                memory: 0,
                ranges: &ranges,
                out: &out,
                accumulate: false,
            };
            mesh_comm.shard.reduce_scatter(&[item], GradWire::F32)?;
            mesh_comm.replicate.all_reduce_sum(&out)?;
            Ok(Cpu.download(&out)?)
        });
        for (rank, got) in results.iter().enumerate() {
            for (x, i) in got.iter().zip(ranges[rank % shard].clone()) {
                let sum = |r: usize| {
                    let first = grad(r * shard)[i];
                    (1..shard).fold(first, |sum, s| sum + grad(r * shard + s)[i])
                };
                let expected = (1..replicate).fold(sum(0), |total, r| total + sum(r));
                assert_eq!(x.to_bits(), expected.to_bits(), "{mesh}");
            }
        }
    }
}

#[test]
fn a_mesh_of_another_size_or_shape_is_rejected() {
    let failed = failing(4, |_, comm| MeshComm::new(Mesh::sharded(3), comm).map(drop));
    assert_eq!(
        failed.cause,
        CommError::MeshWorld {
            replicate: 1,
            shard: 3,
            world: 4
        }
    );
    let failed = failing(4, |rank, comm| {
        let mesh = if rank == 3 {
            Mesh {
                replicate: 2,
                shard: 2,
            }
        } else {
            Mesh::sharded(4)
        };
        MeshComm::new(mesh, comm).map(drop)
    });
    let text = failed.cause.to_string();
    assert!(
        text.contains("ranks [0, 1, 2]: 1x4; ranks [3]: 2x2"),
        "{text}"
    );
}

#[test]
fn a_mesh_of_another_size_on_one_rank_is_an_error_on_all() {
    let failed = failing(3, |rank, comm| {
        let mesh = Mesh {
            replicate: 1 + usize::from(rank == 1),
            shard: 3,
        };
        let made = MeshComm::new(mesh, comm.clone());
        // Whoever keeps its communicator hears of it too.
        comm.control().barrier().expect_err("the world has failed");
        made.map(drop)
    });
    assert_eq!(failed.others.len(), 2);
    for error in [Err(failed.cause)]
        .into_iter()
        .chain(failed.others.into_iter().map(|o| o.1))
    {
        let text = error.expect_err("every rank fails").to_string();
        assert!(text.contains("a 2x3 mesh needs 6 ranks"), "{text}");
    }
}
