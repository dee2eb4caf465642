//! Gathers of blocks over many ranks: a communicator that counts what GPUs would exchange in place of moving it.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::common::{CountingComm, Counts};
use lowp_comm::even;
use lowp_format::{
    AnyRecipe, FormatError, GatherPlan, Phase, PhasePlans, Recipe, RecipeOptions,
    ReshardAfterForward, RowCuts, Shape, Usage, block_cuts,
};
use lowp_kernels::{Backend, Cpu};
use lowp_shard::{
    Exchange, GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor, piece_ranges,
};

type Done = Result<(), Box<dyn std::error::Error>>;

/// What one rank exchanges for forward and for backward of a block.
fn counted(
    recipe: AnyRecipe,
    shapes: &[Shape],
    (rank, world): (usize, usize),
) -> Result<[Counts; 2], ShardError> {
    let comm = CountingComm::new(rank, world);
    let tensor = |&shape| {
        let spec = ShardSpec::new(&recipe, shape, world, rank)?;
        ShardedTensor::new(&Cpu, recipe, spec)
    };
    let tensors = shapes.iter().map(tensor).collect::<Result<_, _>>()?;
    let pool = GatherPool::new(&Cpu);
    let mut group = GatherGroup::new(&Cpu, comm.clone(), &pool, tensors, true)?;
    let mut counts = [Counts::default(); 2];
    for (counts, phase) in counts.iter_mut().zip(Phase::ALL) {
        group.unshard(phase)?;
        group.reshard();
        *counts = comm.take();
    }
    let sent: usize = counts.iter().map(|counts| counts.sent).sum();
    assert_eq!(sent, group.account().sent_bytes());
    Ok(counts)
}

/// Whatever the recipe.
#[test]
fn a_block_is_at_most_two_exchanges_in_a_phase() -> Done {
    let one = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
    let recipes = AnyRecipe::all().into_iter().map(|recipe| (recipe, 16));
    for (recipe, world) in recipes.chain([(one, 256), (one, 1024)]) {
        let quantum = recipe.row_quantum(Usage::BOTH);
        let shape = |times| Shape::new(times * quantum * world, 64);
        let shapes = [1, 2, 1].map(shape);
        for rank in [0, world - 1] {
            for counts in counted(recipe, &shapes, (rank, world))? {
                let what = format!("{}, {world} ranks: {counts:?}", recipe.name());
                assert!(counts.exchanges <= 2, "{what}");
                assert!(counts.operations <= 2, "{what}");
            }
        }
    }
    Ok(())
}

/// A group of one weight on rank 0 of two.
fn group_of_one(
    comm: &Arc<CountingComm>,
    pool: &Arc<GatherPool<Cpu>>,
) -> Result<GatherGroup<Cpu>, ShardError> {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
    let spec = ShardSpec::new(&recipe, Shape::new(128, 64), 2, 0)?;
    let tensors = vec![ShardedTensor::new(&Cpu, recipe, spec)?];
    GatherGroup::new(&Cpu, comm.clone(), pool, tensors, true)
}

/// A capture may gather into memory that is new to the group, though not to the pool.
#[test]
fn a_capture_gathers_into_a_set_of_another_group() -> Done {
    let (comm, pool) = (CountingComm::new(0, 2), GatherPool::new(&Cpu));
    let group = || group_of_one(&comm, &pool);
    let [mut first, mut second] = [group()?, group()?];
    first.unshard(Phase::Forward)?;
    second.unshard(Phase::Forward)?;
    let counts = comm.take();
    assert_eq!((pool.sets(), counts.operations), (2, 2));
    // The set that was given back last is the next that is lent: that of the second group.
    first.reshard();
    second.reshard();
    Cpu.capture(|| first.unshard(Phase::Forward))?;
    assert_eq!(pool.sets(), 2);
    assert_eq!(2 * comm.take().sent, counts.sent);
    Ok(())
}

/// What a gather does once cannot be captured, and the error says what to do before.
#[test]
fn a_first_gather_in_a_capture_is_an_error() -> Done {
    let (comm, pool) = (CountingComm::new(0, 2), GatherPool::new(&Cpu));
    let group = || group_of_one(&comm, &pool);
    let (mut group, mut other) = (group()?, group()?);
    let fails = |group: &mut GatherGroup<Cpu>| match Cpu.capture(|| group.unshard(Phase::Forward)) {
        Err(error @ ShardError::FirstInCapture { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let text = fails(&mut group);
    assert!(text.contains("before the capture, unshard"), "{text}");
    group.unshard(Phase::Forward)?;
    group.reshard();
    // There is memory for it, but its message is not planned.
    fails(&mut other);
    group.unshard(Phase::Forward)?;
    other.unshard(Phase::Forward)?;
    group.reshard();
    other.reshard();
    Cpu.capture(|| {
        group.unshard(Phase::Forward)?;
        other.unshard(Phase::Forward)
    })?;
    Ok(())
}

fn plans(recipe: &AnyRecipe, shape: Shape, ranks: usize) -> PhasePlans {
    let cuts = RowCuts::new(shape.rows, ranks, recipe.row_quantum(Usage::BOTH)).expect("cuts");
    PhasePlans::new(recipe, shape, &cuts, ReshardAfterForward::Yes).expect("plans")
}

/// Exchanges, operations, and bytes of the message of a rank that has the longest.
fn row(plans: &[&GatherPlan], ranks: usize) -> (usize, usize, usize) {
    let exchange = Exchange::new(plans, ranks);
    let fetched = exchange
        .fetched()
        .map(|pieces| piece_ranges(pieces).collect());
    let pieces = fetched.chain([exchange.messages.clone()]);
    let operations = pieces.map(|pieces: Vec<_>| {
        let sent = pieces.iter().filter(|piece| !piece.is_empty()).count();
        even(&pieces).map_or(sent, |_| sent.min(1))
    });
    let longest = exchange.messages.iter().map(ExactSizeIterator::len).max();
    (exchange.batches(), operations.sum(), longest.unwrap_or(0))
}

/// Of the weights of a block as `lowp train` cuts them.
fn plans_of_block(
    recipe: &AnyRecipe,
    weights: &[(usize, usize)],
    ranks: usize,
) -> Result<Vec<PhasePlans>, FormatError> {
    let weights = weights
        .iter()
        .map(|&(rows, cols)| (*recipe, Shape::new(rows, cols)));
    let cuts = block_cuts(&weights.collect::<Vec<_>>(), ranks, 1)?;
    let plans = cuts.iter().map(|of| {
        PhasePlans::with_plans(ranks, ReshardAfterForward::Yes, |fetch, need, held| {
            GatherPlan::with_tiles(recipe, &of.tiles, &of.cuts, fetch, need, held)
        })
    });
    plans.collect()
}

/// A block of Llama 3, for backward: its weights together, and each by itself.
#[test]
fn exchanges_of_llama() -> Done {
    let models = [("8b", 4096, 1024, 14336), ("70b", 8192, 1024, 28672)];
    let mut table = "block of  recipe     ranks  together: exchanges, operations, message  one by one: exchanges, operations\n".to_owned();
    for (model, dim, kv, hidden) in models {
        let weights = [
            (dim, dim),
            (kv, dim),
            (kv, dim),
            (dim, dim),
            (hidden, dim),
            (hidden, dim),
            (dim, hidden),
        ];
        for name in ["mxfp8", "nvfp4-1d"] {
            let recipe = AnyRecipe::from_name(name, &RecipeOptions::default())?;
            for ranks in [2, 8, 64, 256, 1024, 16384] {
                let plans = plans_of_block(&recipe, &weights, ranks)?;
                let backward: Vec<_> = plans.iter().map(|plans| &plans.backward).collect();
                let (exchanges, operations, message) = row(&backward, ranks);
                let each = backward.iter().map(|plan| row(&[*plan], ranks));
                let [mut single, mut alone] = [0; 2];
                for (exchanges, operations, _) in each {
                    single += exchanges;
                    alone += operations;
                }
                writeln!(
                    table,
                    "{model:<9} {name:<9} {ranks:>6}  {exchanges:>19}  {operations:>10}  {message:>7}  {single:>21}  {alone:>10}"
                )?;
            }
        }
    }
    insta::assert_snapshot!(table);
    Ok(())
}

/// Each byte of a piece has one place in one message. Pieces begin at multiples of 16 bytes, and what is added to make messages equally long
/// is at most an eighth.
#[test]
fn messages_hold_the_small_pieces() {
    use lowp_shard::MemoryStep;
    use proptest::prelude::*;
    proptest!(|(
        rows in prop::collection::vec(1usize..300, 1..6), ranks in 1usize..9, recipe in 0..AnyRecipe::all().len(),
    )| {
        let recipe = AnyRecipe::all()[recipe];
        let plans: Vec<_> = rows.iter().map(|&rows| plans(&recipe, Shape::new(rows * 16, 128), ranks)).collect();
        for phase in Phase::ALL {
            let plans: Vec<_> = plans.iter().map(|plans| plans.phase(phase)).collect();
            let exchange = Exchange::new(&plans, ranks);
            let mut places: Vec<Vec<std::ops::Range<usize>>> = vec![Vec::new(); ranks];
            let [mut bytes, mut added] = [0; 2];
            let mut starts = exchange.starts();
            for step in exchange.steps.iter().flatten() {
                match step {
                    MemoryStep::Unpack { pieces, .. } => {
                        let starts = starts.next().expect("those of each step");
                        for (rank, (piece, start)) in pieces.iter().zip(starts).enumerate() {
                            places[rank].push(start..start + piece);
                            bytes += piece;
                        }
                    }
                    MemoryStep::Fetch { pieces, .. } => bytes += pieces.iter().sum::<usize>(),
                    _ => {}
                }
            }
            prop_assert!(starts.next().is_none());
            prop_assert_eq!(bytes, plans.iter().map(|plan| plan.wire_bytes()).sum::<usize>());
            for (message, (places, padding)) in exchange.messages.iter().zip(places.iter().zip(&exchange.padding)) {
                let [mut end, mut pieces] = [message.start, 0];
                for place in places {
                    prop_assert_eq!(place.start, end);
                    end = place.end.next_multiple_of(16);
                    pieces += place.len();
                }
                prop_assert_eq!(pieces + padding, message.len());
                prop_assert!(end <= message.end && message.start % 16 == 0);
                added += message.end - end;
            }
            prop_assert!(8 * added <= exchange.message_bytes());
        }
    });
}
