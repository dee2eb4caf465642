//! Vectors that GPUs bring together on their owners, and get back. Only with the feature `cuda`.

use std::time::Duration;

use crate::common::{alone_and_together, tiling, values};
use half::bf16;
use lowp_comm::{Collective, Direction, OwnedItem, ordered};
use lowp_kernels::Backend;
use lowp_nccl::Sums;

#[test]
fn cuda_nccl_moves_vectors_to_owners_and_back() {
    let lens: [[usize; 8]; 4] = [
        [64; 8],
        [100, 7, 0, 3, 1, 50, 2, 9],
        [0; 8],
        [1 << 20, 5, 1 << 20, 5, 1 << 20, 5, 1 << 20, 5],
    ];
    alone_and_together(Duration::from_secs(60), Sums::Nccl, |rank| {
        let (cuda, comm) = (&rank.cuda, &*rank.comm);
        let (me, world) = (comm.rank(), comm.world_size());
        let full = |item: usize| -> Vec<bf16> {
            let values = values(item as u64, lens[item][..world].iter().sum());
            values.into_iter().map(bf16::from_f32).collect()
        };
        let mut vectors = Vec::new();
        for (item, lens) in lens.iter().enumerate() {
            let (owner, ranges) = (item % world, tiling(&lens[..world]));
            let all = full(item);
            let whole = cuda.alloc::<bf16>(if owner == me { all.len() } else { 0 })?;
            // Every other owner has its piece in its place.
            let piece = match owner == me && item % 2 == 0 {
                true => cuda.view(&whole, ranges[me].clone())?,
                false => cuda.alloc::<bf16>(ranges[me].len())?,
            };
            cuda.write(&piece, 0, &all[ranges[me].clone()])?;
            vectors.push((owner, ranges, piece, whole));
        }
        let items: Vec<_> = vectors
            .iter()
            .map(|(owner, ranges, piece, whole)| OwnedItem {
                owner: *owner,
                piece,
                whole,
                ranges,
            })
            .collect();
        let give = |direction| {
            ordered(cuda, comm, || {
                comm.enqueue("", Collective::Owned(&items, direction))
            })
        };
        give(Direction::ToOwners)?;
        for (item, (owner, _, _, whole)) in vectors.iter().enumerate() {
            if *owner == me {
                assert!(cuda.download(whole)? == full(item), "item {item}");
                let negated: Vec<bf16> = full(item).iter().map(|x| -*x).collect();
                cuda.write(whole, 0, &negated)?;
            }
        }
        give(Direction::FromOwners)?;
        let mut owned = 0;
        for (item, (owner, ranges, piece, _)) in vectors.iter().enumerate() {
            let range = ranges[me].clone();
            let negated: Vec<bf16> = full(item)[range.clone()].iter().map(|x| -*x).collect();
            assert!(cuda.download(piece)? == negated, "item {item}");
            owned += if *owner == me { 0 } else { 4 * range.len() };
        }
        assert_eq!(comm.traffic().owned_bytes, owned as u64);
        Ok(())
    });
}
