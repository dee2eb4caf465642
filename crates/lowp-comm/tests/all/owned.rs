//! Vectors that ranks bring together on their owners, and get back.

use std::sync::Arc;

use crate::common::{
    Comm, Engine, PATIENCE, failing_on, joined, ranks_everywhere as ranks, tiling, values,
};
use half::bf16;
use lowp_comm::{Collective, Communicator, Direction, HostComm, OwnedItem, Traffic, run_comms};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use proptest::prelude::*;

/// Distinct values of item `item`.
fn halves(item: usize, len: usize) -> Vec<bf16> {
    let values = values(item as u64, len).into_iter();
    values.map(bf16::from_f32).collect()
}

/// One item as a rank has it.
struct Vector {
    owner: usize,
    ranges: Vec<std::ops::Range<usize>>,
    piece: CpuBuffer<bf16>,
    whole: CpuBuffer<bf16>,
}

impl Vector {
    /// With the piece of this rank filled in; that of the owner lies in its place where `in_place`.
    fn new(
        rank: usize,
        item: usize,
        (owner, in_place): (usize, bool),
        lens: &[usize],
    ) -> Result<Self, lowp_kernels::KernelError> {
        let ranges = tiling(lens);
        let all = lens.iter().sum();
        let whole = Cpu.alloc(if rank == owner { all } else { 0 })?;
        let piece = match rank == owner && in_place {
            true => Cpu.view(&whole, ranges[rank].clone())?,
            false => Cpu.alloc(ranges[rank].len())?,
        };
        Cpu.write(&piece, 0, &halves(item, all)[ranges[rank].clone()])?;
        Ok(Self {
            owner,
            ranges,
            piece,
            whole,
        })
    }

    fn item(&self) -> OwnedItem<'_, Cpu> {
        OwnedItem {
            owner: self.owner,
            piece: &self.piece,
            whole: &self.whole,
            ranges: &self.ranges,
        }
    }
}

type Case = Vec<(usize, bool, Vec<usize>)>;

/// Brings vectors to their owners, who negate them, and back: what each rank has then of each, and what was counted.
#[allow(clippy::result_large_err, reason = "what the library returns")]
fn there_and_back(
    case: &Case,
    world: usize,
    comm: &dyn Communicator<Cpu>,
) -> Result<(Vec<Vec<bf16>>, Traffic), lowp_comm::CommError> {
    let rank = comm.rank();
    let mut vectors = Vec::new();
    for (number, (owner, in_place, lens)) in case.iter().enumerate() {
        let owner = (owner % world, *in_place);
        vectors.push(Vector::new(rank, number, owner, &lens[..world])?);
    }
    let items: Vec<OwnedItem<'_, Cpu>> = vectors.iter().map(Vector::item).collect();
    comm.enqueue("", Collective::Owned(&items, Direction::ToOwners))?;
    for (number, vector) in vectors.iter().enumerate() {
        if vector.owner == rank {
            let whole = Cpu.download(&vector.whole)?;
            assert_eq!(whole, halves(number, whole.len()));
            let negated: Vec<bf16> = whole.iter().map(|x| -*x).collect();
            Cpu.write(&vector.whole, 0, &negated)?;
        }
    }
    comm.enqueue("", Collective::Owned(&items, Direction::FromOwners))?;
    let pieces = vectors.iter().map(|vector| Cpu.download(&vector.piece));
    Ok((pieces.collect::<Result<_, _>>()?, comm.traffic()))
}

fn check(case: &Case, world: usize, found: &[(Vec<Vec<bf16>>, Traffic)]) {
    for (rank, (pieces, traffic)) in found.iter().enumerate() {
        let mut owned_bytes = 0;
        for (number, (owner, _, lens)) in case.iter().enumerate() {
            let range = tiling(&lens[..world])[rank].clone();
            let all = halves(number, lens[..world].iter().sum());
            let negated: Vec<bf16> = all[range.clone()].iter().map(|x| -*x).collect();
            assert_eq!(pieces[number], negated);
            if owner % world != rank {
                owned_bytes += 2 * 2 * range.len() as u64;
            }
        }
        let calls = 2;
        let expected = Traffic {
            owned_bytes,
            calls,
            ..Traffic::default()
        };
        assert_eq!(*traffic, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn owners_get_the_whole_and_ranks_their_pieces_back(
        world in 1usize..=6,
        case in prop::collection::vec(
            (0usize..6, any::<bool>(), prop::collection::vec(0usize..40, 6)), 0..5,
        ),
        most in 20usize..200,
    ) {
        let found = ranks(world, |_, comm| there_and_back(&case, world, &*comm));
        check(&case, world, &found);
        // However little travels at once.
        let comms = joined(world, PATIENCE).into_iter();
        let comms = comms.map(|control| -> Comm { Arc::new(HostComm::with_most(control, &Cpu, most)) }).collect();
        let turns = run_comms(comms, |_, comm| there_and_back(&case, world, &*comm));
        check(&case, world, &turns.expect("every rank succeeds"));
    }
}

#[test]
fn ranks_agree_on_owners_and_lengths() {
    for engine in Engine::ALL {
        for (what, owners, lens) in [
            ("another owner", [0, 1], [[3, 4], [3, 4]]),
            ("other lengths", [0, 0], [[3, 4], [3, 5]]),
        ] {
            let failed = failing_on(engine, 2, |rank, comm| {
                let vector = Vector::new(rank, 0, (owners[rank], false), &lens[rank])?;
                let items = [vector.item()];
                comm.enqueue("", Collective::Owned(&items, Direction::ToOwners))?;
                Ok(())
            });
            assert!(failed.to_string().contains("to_owners"), "{what}: {failed}");
        }
        // Rank 0 has too little room, or names no rank.
        for (owner, says) in [(0, "the whole holds 6"), (2, "the owner of item 0")] {
            let failed = failing_on(engine, 2, |rank, comm| {
                let vector = Vector::new(rank, 0, (0, false), &[3, 4])?;
                let short = Cpu.alloc(6)?;
                let mut item = vector.item();
                if rank == 0 {
                    (item.whole, item.owner) = (&short, owner);
                }
                comm.enqueue("", Collective::Owned(&[item], Direction::FromOwners))?;
                Ok(())
            });
            let said = failed.to_string();
            assert!(said.contains(says), "{said}");
        }
    }
}
