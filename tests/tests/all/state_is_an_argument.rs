//! State is an argument: scales and histories live in the `ScaleBook` that the caller passes.
//! Recipes, tensors, plans and other parameters hold none, so nothing leaks between them.

use std::sync::Arc;

use lowp_comm::{Communicator, LocalComm, run_ranks};
use lowp_format::{AnyRecipe, Extent, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_optim::{Group, OptimError, StepOptions};
use lowp_shard::{
    CastItem, CastPlan, ScaleBook, ScaleBookBuilder, ScaleSlot, ShardError, ShardSpec,
    ShardedTensor, targets,
};
use lowp_tests::model::{
    Case, ParamState, Rank, State, is_delayed, kernels, recipe_variants, tensor_slots,
};
use lowp_tests::values::Family;
use lowp_tests::world::TIMEOUT;
use proptest::prelude::*;

const SHAPE: Shape = Shape::new(40, 64);

fn case(recipe: AnyRecipe, seed: u64) -> Case {
    Case::new(
        recipe,
        SHAPE,
        Family::Outliers.values(seed, SHAPE.elements()),
    )
}

fn grad(seed: u64, step: u64) -> Vec<f32> {
    Family::Normal.values(seed * 10 + step, SHAPE.elements())
}

fn solo() -> Arc<dyn Communicator<Cpu>> {
    Arc::new(LocalComm::solo(&Cpu))
}

/// Whether weights have an amax of the tensor.
fn has_tensor_entry(recipe: &AnyRecipe) -> bool {
    let outer = kernels(recipe).map(|key| key.scale.outer());
    outer
        .into_iter()
        .flatten()
        .any(|(extent, _)| extent == Extent::Tensor)
}

/// Trains the cases on one rank; gradients follow from the seeds.
fn train(cases: &[Case], seeds: &[u64], steps: u64) -> Result<State, OptimError> {
    let comm = solo();
    let mut rank = Rank::new(cases, &[Group::default()], &comm, &comm)?;
    for step in 0..steps {
        let grads: Vec<_> = seeds.iter().map(|&seed| grad(seed, step)).collect();
        rank.step(&grads, &StepOptions::default())?;
    }
    rank.state()
}

/// What a state says of entry `index` of its book.
fn entry(state: &State, index: usize) -> (u32, &[u32]) {
    (state.scales[index], &state.histories[index])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Other parameters, of the same recipe value or another, in any order, change nothing.
    #[test]
    fn a_parameter_trains_alike_alone_and_in_company(
        picks in prop::collection::vec((any::<prop::sample::Index>(), 0u64..1 << 20), 2..7),
    ) {
        let variants = recipe_variants();
        let seeds: Vec<u64> = picks.iter().map(|p| p.1).collect();
        let cases: Vec<Case> =
            picks.iter().map(|(index, seed)| case(*index.get(&variants), *seed)).collect();
        let together = train(&cases, &seeds, 3).expect("a run");
        let mut entries = 0;
        for (index, one) in cases.iter().enumerate() {
            let alone = train(std::slice::from_ref(one), &seeds[index..=index], 3).expect("a run");
            prop_assert!(alone.params[0] == together.params[index], "{:?}", one);
            if has_tensor_entry(&one.recipe) {
                prop_assert_eq!(entry(&alone, 0), entry(&together, entries));
                entries += 1;
            }
        }
        prop_assert_eq!(together.scales.len(), entries);
    }
}

/// Two models that step alternately give what each gives alone.
#[test]
fn alternating_models_share_no_state() {
    let cases: Vec<Case> = (0..)
        .zip(recipe_variants())
        .map(|(s, r)| case(r, s))
        .collect();
    let group = Group::default();
    let grads = |step| {
        (0..cases.len() as u64)
            .map(|s| grad(s, step))
            .collect::<Vec<_>>()
    };
    let alone: Vec<State> = [0, 50]
        .map(|first| {
            let comm = solo();
            let mut rank = Rank::new(&cases, &[group], &comm, &comm)?;
            for step in first..first + 3 {
                rank.step(&grads(step), &StepOptions::default())?;
            }
            rank.state()
        })
        .into_iter()
        .collect::<Result<_, OptimError>>()
        .expect("two runs");
    let comm = solo();
    let new = || Rank::new(&cases, &[group], &comm, &comm).expect("a model");
    let mut turns = [new(), new()];
    for step in 0..3 {
        for (rank, first) in turns.iter_mut().zip([0, 50]) {
            let report = rank.step(&grads(first + step), &StepOptions::default());
            assert!(report.expect("a step").applied);
        }
    }
    for (rank, alone) in turns.iter().zip(&alone) {
        assert!(rank.state().expect("a state") == *alone);
    }
}

/// A cast of one tensor, and the tensor's bytes after it.
struct Cast {
    book: ScaleBook<Cpu>,
    cast: CastPlan<Cpu>,
    tensor: ShardedTensor<Cpu>,
    source: CpuBuffer<f32>,
    slot: Option<ScaleSlot>,
}

impl Cast {
    fn new(recipe: AnyRecipe) -> Result<Self, ShardError> {
        let spec = ShardSpec::for_usage(&recipe, SHAPE, 1, 0, Usage::BOTH)?;
        let tensor = ShardedTensor::new(&Cpu, recipe, spec)?;
        let source = Cpu.alloc::<f32>(SHAPE.elements())?;
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(tensor.local(), Source::F32(source.clone()), &mut book);
        let slot = item.slots[0];
        let book = book.build(&Cpu)?;
        let cast = CastPlan::new(&Cpu, &book, &[item])?;
        Ok(Self {
            book,
            cast,
            tensor,
            source,
            slot,
        })
    }

    fn run(&self, values: &[f32]) -> Result<Vec<Vec<u8>>, ShardError> {
        Cpu.write(&self.source, 0, values)?;
        self.cast.run(&self.book, &*solo())?;
        let targets = targets::<Cpu, AnyRecipe>(self.tensor.local());
        let bytes = targets.iter().map(|t| Cpu.download(&t.bytes));
        Ok(bytes.collect::<Result<_, _>>()?)
    }
}

/// A cast is a function of the source and of what the book holds, whatever was cast before.
#[test]
fn a_cast_depends_on_source_and_book_only() {
    let [first, second] = [1, 2].map(|s| Family::Normal.values(s, SHAPE.elements()));
    for recipe in recipe_variants() {
        let (fresh, used) = (Cast::new(recipe), Cast::new(recipe));
        let (fresh, used) = (fresh.expect("a cast"), used.expect("a cast"));
        for _ in 0..3 {
            used.run(&first).expect("a cast");
        }
        if let Some(slot) = used.slot.filter(|_| has_tensor_entry(&recipe)) {
            let scale = used.book.scale(slot).expect("a scale");
            let slot = fresh.slot.expect("the same recipe");
            fresh.book.set_scale(slot, scale).expect("an entry");
        }
        let [a, b] = [&fresh, &used].map(|cast| cast.run(&second).expect("a cast"));
        assert!(a == b, "{recipe:?}");
    }
}

/// Replacing one scale changes the next cast of that parameter where its scale is delayed, and no
/// other bytes.
#[test]
fn set_scale_reaches_one_parameter() {
    let cases: Vec<Case> = (0..)
        .zip(AnyRecipe::all())
        .map(|(s, r)| case(r, s))
        .collect();
    let run = |changed: Option<usize>| -> Result<Vec<ParamState>, OptimError> {
        let comm = solo();
        let mut rank = Rank::new(&cases, &[Group::default()], &comm, &comm)?;
        if let Some(index) = changed {
            let slot = tensor_slots(rank.optimizer.scales())?[index];
            rank.optimizer.scales().set_scale(slot, 1.0 / 64.0)?;
        }
        let grads: Vec<_> = (0..cases.len() as u64).map(|s| grad(s, 0)).collect();
        rank.step(&grads, &StepOptions::default())?;
        Ok(rank.state()?.params)
    };
    let plain = run(None).expect("a run");
    let observes = |c: &&Case| has_tensor_entry(&c.recipe);
    for (slot, case) in cases.iter().filter(observes).enumerate() {
        let changed = run(Some(slot)).expect("a run");
        let delayed = is_delayed(&case.recipe);
        let differ: Vec<usize> = (0..cases.len())
            .filter(|&i| changed[i] != plain[i])
            .collect();
        let expected: Vec<usize> = (0..cases.len())
            .filter(|&i| delayed && cases[i].recipe == case.recipe)
            .collect();
        assert_eq!(differ, expected, "{:?}", case.recipe);
    }
}

/// Also ranks without rows: whoever holds the book can save it.
#[test]
fn every_rank_holds_the_same_book() {
    let cases: Vec<Case> = (0..)
        .zip(recipe_variants())
        .map(|(s, r)| case(r, s))
        .collect();
    let grads: Vec<_> = (0..cases.len() as u64).map(|s| grad(s, 0)).collect();
    let run = run_ranks(&Cpu, 5, TIMEOUT, |_, comm| -> Result<_, OptimError> {
        let mut rank = Rank::new(&cases, &[Group::default()], &comm, &comm)?;
        rank.step(&grads, &StepOptions::default())?;
        let state = rank.state()?;
        Ok((state.scales, state.histories))
    });
    let books = run.unwrap_or_else(|e| panic!("{e}"));
    assert!(books.windows(2).all(|pair| pair[0] == pair[1]));
}
