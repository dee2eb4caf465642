//! Parts of gathered weights that a smaller group of ranks keeps between forward and backward.

use crate::common::{Comm, failing, ranks, values, variants};
use lowp_format::{
    AnyRecipe, FormatError, Phase, PhasePlans, QuantizedTensor, Recipe, ReshardAfterForward,
    RowCuts, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    CastItem, CastPlan, Exchange, GatherGroup, GatherPool, Reshard, ScaleBookBuilder, ShardError,
    ShardSpec, ShardedTensor, quantize,
};

const SHAPE: Shape = Shape::new(200, 64);

type Full = QuantizedTensor<CpuBuffer<u8>>;

fn whole(recipe: AnyRecipe, seed: u64) -> Result<Full, ShardError> {
    let source = Source::F32(Cpu.upload(&values(seed, SHAPE.elements()))?);
    quantize(&Cpu, recipe, SHAPE, Usage::BOTH, source, None)
}

/// This rank's rows of a weight, cast by [`cast`].
fn shard(recipe: AnyRecipe, comm: &Comm) -> Result<ShardedTensor<Cpu>, ShardError> {
    let spec = ShardSpec::new(&recipe, SHAPE, comm.world_size(), comm.rank())?;
    ShardedTensor::new(&Cpu, recipe, spec)
}

fn cast(tensor: &ShardedTensor<Cpu>, seed: u64, comm: &Comm) -> Result<(), ShardError> {
    let mut book = ScaleBookBuilder::default();
    let all = values(seed, SHAPE.elements());
    let own = Source::F32(Cpu.upload(&all[tensor.spec().elements()])?);
    let item = CastItem::rows(tensor.local(), own, &mut book);
    let book = book.build(&Cpu)?;
    CastPlan::new(&Cpu, &book, &[item])?.calibrate(&book, &**comm)
}

fn group_of(
    ranks: usize,
    tensor: &ShardedTensor<Cpu>,
    comm: &Comm,
) -> Result<GatherGroup<Cpu>, ShardError> {
    let reshard = Reshard::new(ReshardAfterForward::Group(ranks), comm)?;
    let pool = GatherPool::new(&Cpu);
    GatherGroup::new(&Cpu, comm.clone(), &pool, vec![tensor.clone()], reshard)
}

/// The gathered bytes of `phase`.
fn gather(group: &mut GatherGroup<Cpu>, phase: Phase, whole: &Full) -> Result<u64, ShardError> {
    let before = group.account().counted_sent_bytes;
    group.unshard(phase)?;
    for buffer in group.tensor(0)?.buffers() {
        let expected = Cpu.download(&whole.buffer(buffer.spec.key)?.storage)?;
        assert_eq!(
            Cpu.download(&buffer.storage)?,
            expected,
            "{}",
            buffer.spec.key
        );
    }
    group.reshard();
    Ok(group.account().counted_sent_bytes - before)
}

/// Sent bytes of the whole world, by gather.
fn totals(sent: &[Vec<u64>]) -> Vec<u64> {
    let gathers = 0..sent[0].len();
    gathers
        .map(|at| sent.iter().map(|rank| rank[at]).sum())
        .collect()
}

#[test]
fn backward_comes_from_parts_only_after_a_forward_of_the_same_weights() {
    for recipe in variants() {
        let [old, new] = [1, 2].map(|seed| whole(recipe, seed).expect("quantized"));
        let sent = ranks(4, |_, comm| {
            let tensor = shard(recipe, &comm)?;
            cast(&tensor, 1, &comm)?;
            let mut group = group_of(2, &tensor, &comm)?;
            let mut sent = vec![
                // No forward yet.
                gather(&mut group, Phase::Backward, &old)?,
                gather(&mut group, Phase::Forward, &old)?,
                gather(&mut group, Phase::Backward, &old)?,
                // The parts went with the backward that used them.
                gather(&mut group, Phase::Backward, &old)?,
            ];
            gather(&mut group, Phase::Forward, &old)?;
            group.release();
            sent.push(gather(&mut group, Phase::Backward, &old)?);
            // Parts of weights that were cast again since.
            gather(&mut group, Phase::Forward, &old)?;
            cast(&tensor, 2, &comm)?;
            sent.push(gather(&mut group, Phase::Backward, &new)?);
            sent.push(gather(&mut group, Phase::Forward, &new)?);
            group.prefetch(Phase::Backward)?;
            sent.push(gather(&mut group, Phase::Backward, &new)?);
            Ok(sent)
        });
        let sent = totals(&sent);
        let (from_shards, forward, from_parts) = (sent[0], sent[1], sent[2]);
        let cuts = RowCuts::new(SHAPE.rows, 4, recipe.row_quantum(Usage::BOTH)).expect("cuts");
        let plans = PhasePlans::new(&recipe, SHAPE, &cuts, ReshardAfterForward::Group(2));
        let plans = plans.expect("plans");
        let parts = plans.parts.as_ref().expect("parts");
        let padding = |plan, ranks| Exchange::new(&[plan], ranks).padding.iter().sum::<usize>();
        let [of_shards, of_parts] = [padding(&plans.backward, 4), padding(parts, 2)];
        // Each of the two groups gathers all of it.
        let bytes = plans.backward.wire_bytes();
        let expected = [bytes + of_shards, 2 * (bytes + of_parts)].map(|bytes| bytes as u64);
        assert_eq!([from_shards, from_parts], expected, "{}", recipe.name());
        assert_eq!(sent[3..6], [from_shards; 3], "{}", recipe.name());
        assert_eq!(sent[6], forward, "{}", recipe.name());
    }
}

#[test]
fn a_rank_keeps_its_part_and_no_more() {
    for recipe in AnyRecipe::all() {
        for (world, size) in [(4, 2), (6, 2), (6, 3), (8, 4)] {
            let accounts = ranks(world, |_, comm| {
                let tensor = shard(recipe, &comm)?;
                let group = group_of(size, &tensor, &comm)?;
                let backward = group
                    .plan(0, Phase::Backward)
                    .expect("both usages")
                    .wire_bytes();
                Ok((group.account(), backward))
            });
            for group in accounts.chunks(size) {
                let parts: usize = group.iter().map(|(account, _)| account.part_bytes()).sum();
                assert_eq!(parts, group[0].1, "{}", recipe.name());
                for (account, bytes) in group {
                    // A byte more per buffer where it cannot be divided.
                    assert!(account.part_bytes() <= bytes.div_ceil(size) + 4);
                }
            }
        }
    }
}

#[test]
fn groups_of_one_and_of_all_are_the_policies_without_groups() {
    ranks(4, |_, comm| {
        let of = |ranks| Reshard::new(ReshardAfterForward::Group(ranks), &comm);
        assert_eq!(of(1)?.policy(), ReshardAfterForward::No);
        assert_eq!(of(4)?.policy(), ReshardAfterForward::Yes);
        assert_eq!(of(2)?.policy(), ReshardAfterForward::Group(2));
        Ok(())
    });
}

#[test]
fn groups_that_do_not_divide_the_ranks_are_an_error_on_all() {
    for ranks in [0, 4, 5, 12] {
        let failed = failing(6, |_, comm| {
            Reshard::new(ReshardAfterForward::Group(ranks), &comm).map(|_| ())
        });
        let world = 6;
        let expected = ShardError::Format(FormatError::ReshardGroup { ranks, world });
        assert_eq!(failed.cause, expected);
        assert!(
            failed.cause.to_string().ends_with("give 1, 2, 3 or 6"),
            "{}",
            failed.cause
        );
    }
}

#[test]
fn a_group_with_ranks_that_have_no_shard_is_an_error() {
    let failed = failing(4, |rank, comm| {
        let halves = comm.split(rank / 2, rank)?;
        let recipe = AnyRecipe::all()[0];
        let spec = ShardSpec::new(&recipe, SHAPE, 2, halves.rank())?;
        let tensor = ShardedTensor::new(&Cpu, recipe, spec)?;
        let pool = GatherPool::new(&Cpu);
        GatherGroup::new(&Cpu, halves, &pool, vec![tensor], Reshard::Group(comm)).map(|_| ())
    });
    let elsewhere = matches!(failed.cause, ShardError::ReshardMember { .. });
    assert!(elsewhere, "{}", failed.cause);
}

/// A group that was made by hand may be one rank, or all of them.
#[test]
fn degenerate_groups_gather_as_the_policies_without_groups() {
    for recipe in AnyRecipe::all() {
        let whole = whole(recipe, 1).expect("quantized");
        for (all, policy) in [
            (false, ReshardAfterForward::No),
            (true, ReshardAfterForward::Yes),
        ] {
            ranks(2, |rank, comm| {
                let tensor = shard(recipe, &comm)?;
                cast(&tensor, 1, &comm)?;
                let members = comm.split(if all { 0 } else { rank }, rank)?;
                let pool = GatherPool::new(&Cpu);
                let params = vec![tensor];
                let reshard = Reshard::Group(members);
                let mut group = GatherGroup::new(&Cpu, comm, &pool, params, reshard)?;
                assert_eq!(group.reshard_after_forward(), policy);
                for _ in 0..2 {
                    gather(&mut group, Phase::Forward, &whole)?;
                    gather(&mut group, Phase::Backward, &whole)?;
                }
                Ok(())
            });
        }
    }
}
