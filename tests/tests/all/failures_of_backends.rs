//! A backend that fails on one rank, at any call of a collective operation: an error with the cause
//! on every rank, at once, never a wait.

use std::sync::Arc;

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Phase, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Source};
use lowp_optim::{
    Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, PendingStep, StepOptions,
};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, ScaleBook, ScaleBookBuilder, ShardError,
    ShardSpec, ShardedTensor,
};
use lowp_tests::queued::{Comm, Queued, at_every_call};

const SHAPE: Shape = Shape::new(64, 32);

/// An optimizer of one parameter of every recipe.
struct Model {
    optimizer: Optimizer<Queued>,
    ids: Vec<(ParamId, usize)>,
    backend: Queued,
}

fn model(backend: &Queued, comm: &Comm) -> Result<Model, OptimError> {
    let mut builder = OptimizerBuilder::new(comm.clone()).on(backend);
    builder.group(Group::default());
    let mut ids = Vec::new();
    for (index, recipe) in AnyRecipe::all().into_iter().enumerate() {
        let spec = ShardSpec::new(&recipe, SHAPE, comm.world_size(), comm.rank())?;
        let len = spec.elements().len();
        let tensor = ShardedTensor::new(backend, recipe, spec)?;
        let param = ParamSpec::new(format!("param {index}"), 0, vec![1.0; len]);
        ids.push((builder.param(tensor.local(), param)?, len));
    }
    Ok(Model {
        optimizer: builder.build_uncast()?,
        ids,
        backend: backend.clone(),
    })
}

#[test]
fn a_step_fails_on_every_rank() {
    let calls = at_every_call(
        |backend, comm| {
            let mut model = model(backend, comm)?;
            model.optimizer.calibrate()?;
            for &(id, len) in &model.ids {
                model.optimizer.set_grad(id, &vec![1.0; len])?;
            }
            Ok(model)
        },
        |model, _| {
            // The gradients of the first step stay where they are.
            model
                .ids
                .iter()
                .for_each(|&(id, _)| model.optimizer.mark_ready(id));
            let options = StepOptions::default();
            model.optimizer.step(&options)?.wait().map(drop)
        },
    );
    assert!(calls >= 8, "{calls} calls");
}

#[test]
fn a_first_cast_fails_on_every_rank() {
    let calls = at_every_call(model, |model, comm| {
        model.optimizer.calibrate()?;
        // A rank whose part was done hears of it in the next collective call.
        Ok(comm.control().barrier()?)
    });
    assert!(calls >= 6, "{calls} calls");
}

#[test]
fn a_cast_fails_on_every_rank() {
    type Cast = (CastPlan<Queued>, ScaleBook<Queued>);
    let build = |backend: &Queued, _: &Comm| -> Result<Cast, OptimError> {
        let mut book = ScaleBookBuilder::default();
        let mut items = Vec::new();
        for recipe in AnyRecipe::all() {
            let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, bytes| {
                Ok::<_, ShardError>(backend.alloc::<u8>(bytes)?)
            })?;
            let source = Source::F32(backend.upload(&vec![1.0; SHAPE.elements()])?);
            items.push(CastItem::rows(&tensor, source, &mut book));
        }
        let book = book.build(backend)?;
        Ok((CastPlan::new(backend, &book, &items)?, book))
    };
    let calls = at_every_call(build, |(cast, book), comm| Ok(cast.run(book, &**comm)?));
    assert!(calls >= 6, "{calls} calls");
}

#[test]
fn a_gather_fails_on_every_rank() {
    let build = |backend: &Queued, comm: &Comm| -> Result<GatherGroup<Queued>, OptimError> {
        let shards = AnyRecipe::all().into_iter().map(|recipe| {
            let spec = ShardSpec::new(&recipe, SHAPE, comm.world_size(), comm.rank())?;
            ShardedTensor::new(backend, recipe, spec)
        });
        let shards = shards.collect::<Result<_, ShardError>>()?;
        let pool = GatherPool::new(backend);
        Ok(GatherGroup::new(
            backend,
            comm.clone(),
            &pool,
            shards,
            true,
        )?)
    };
    let calls = at_every_call(build, |group, _| {
        for phase in Phase::ALL {
            group.unshard(phase)?;
            group.reshard();
        }
        Ok(())
    });
    assert!(calls >= 10, "{calls} calls");
}

/// Whoever fails alone mends it and goes on.
#[test]
fn a_world_of_one_may_try_again() {
    let backend = Queued::default();
    let comm: Comm = Arc::new(LocalComm::solo(&backend));
    let mut model = model(&backend, &comm).expect("a model");
    model.backend.fail_at(2);
    let failed = model.optimizer.calibrate();
    assert!(failed.expect_err("planted").to_string().contains("planted"));
    model.optimizer.calibrate().expect("a cast");
    for &(id, len) in &model.ids {
        model
            .optimizer
            .set_grad(id, &vec![1.0; len])
            .expect("a gradient");
    }
    let options = StepOptions::default();
    model.backend.fail_at(1);
    let failed = model.optimizer.step(&options);
    assert!(failed.expect_err("planted").to_string().contains("planted"));
    let report = model.optimizer.step(&options).and_then(PendingStep::wait);
    assert!(report.expect("a step").applied);
}
