//! Flat slices of masters (ZeRO-1) with every option of every recipe: what each rank has after every step is what one
//! rank has that updates whole matrices. Four over six, which compares whole blocks, is an error.

use lowp_comm::{LocalComm, run_ranks};
use lowp_format::{AnyRecipe, QuantizedTensor, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError};
use lowp_optim::{Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StepOptions};
use lowp_shard::ShardError;
use lowp_tests::model::{casts_flat, recipe_variants};
use lowp_tests::toy::Toy;
use lowp_tests::values::Family;
use lowp_tests::world::TIMEOUT;

const SHAPE: Shape = Shape::new(150, 64);
const ALL: usize = SHAPE.elements();
/// Through a row, a block and a byte; one element; nothing.
const ENDS: [usize; 5] = [0, 1, 2_503, 8_200, ALL];
const STEPS: u64 = 4;

type Tensor<R> = QuantizedTensor<CpuBuffer<u8>, R>;

fn tensor<R: Recipe>(recipe: R) -> Result<Tensor<R>, ShardError> {
    QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| Ok(Cpu.alloc::<u8>(n)?))
}

/// A tensor with outliers in few rows and columns, so that lines differ.
fn values(param: u64, step: u64) -> Vec<f32> {
    Family::Outliers.values(100 * step + param, ALL)
}

/// Steps `optimizer` and returns the bytes of all tensors after each step.
fn train<R: Recipe>(
    optimizer: &mut Optimizer<Cpu>,
    ids: &[ParamId],
    tensors: &[Tensor<R>],
    own: std::ops::Range<usize>,
) -> Result<Vec<Vec<Vec<u8>>>, OptimError> {
    let mut seen = Vec::new();
    for step in 0..=STEPS {
        if step > 0 {
            for (param, &id) in (0..).zip(ids) {
                optimizer.set_grad(id, &values(param, step)[own.clone()])?;
            }
            assert!(optimizer.step(&StepOptions::default())?.wait()?.applied);
        }
        let buffers = tensors.iter().flat_map(|tensor| tensor.buffers());
        let bytes = buffers.map(|buffer| Cpu.download(&buffer.storage));
        seen.push(bytes.collect::<Result<_, _>>()?);
    }
    Ok(seen)
}

#[test]
fn slices_of_every_option_step_as_whole_matrices_do() {
    let recipes: Vec<AnyRecipe> = recipe_variants().into_iter().filter(casts_flat).collect();
    assert!(recipes.len() > 40, "{} variants", recipes.len());
    slices_step_as_whole_matrices_do(&recipes);
    slices_step_as_whole_matrices_do(&Toy::ALL);
}

fn slices_step_as_whole_matrices_do<R: Recipe>(recipes: &[R]) {
    let group = Group {
        lr: 0.05,
        ..Group::default()
    };
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let index = builder.group(group);
    let (mut ids, mut tensors) = (Vec::new(), Vec::new());
    for (param, &recipe) in (0..).zip(recipes) {
        let tensor = tensor(recipe).expect("a tensor");
        let spec = ParamSpec::new(format!("{param}"), index, values(param, 0));
        ids.push(builder.param(&tensor, spec).expect("a parameter"));
        tensors.push(tensor);
    }
    let mut alone = builder.build().expect("an optimizer");
    let expected = train(&mut alone, &ids, &tensors, 0..ALL).expect("steps");
    let names = recipes.iter().zip(&tensors);
    let names = names.flat_map(|(recipe, t)| t.buffers().iter().map(move |b| (recipe, b.spec.key)));
    let names: Vec<_> = names.collect();

    let run = run_ranks(&Cpu, ENDS.len(), TIMEOUT, |rank, comm| {
        let own = rank.checked_sub(1).map_or(0, |before| ENDS[before])..ENDS[rank];
        let mut builder = OptimizerBuilder::new(comm);
        let index = builder.group(group);
        let (mut ids, mut tensors) = (Vec::new(), Vec::new());
        for (param, &recipe) in (0..).zip(recipes) {
            let tensor = tensor(recipe)?;
            let master = values(param, 0)[own.clone()].to_vec();
            let spec = ParamSpec::new(format!("{param}"), index, master);
            ids.push(builder.flat_param(&tensor, own.start, spec)?);
            tensors.push(tensor);
        }
        let found = train(&mut builder.build()?, &ids, &tensors, own)?;
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for ((found, expected), name) in found.iter().zip(expected).zip(&names) {
                assert!(found == expected, "step {step} on rank {rank}: {name:?}");
            }
        }
        Ok::<_, OptimError>(())
    });
    run.unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn four_over_six_of_a_slice_is_an_error_at_registration() {
    let mut rejected = 0;
    for recipe in recipe_variants().into_iter().filter(|r| !casts_flat(r)) {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = builder.group(Group::default());
        let spec = || ParamSpec::new("weight", group, values(0, 0));
        let tensor = tensor(recipe).expect("a tensor");
        let error = builder
            .flat_param(&tensor, 0, spec())
            .expect_err("a choice of blocks");
        let choice = ShardError::from(KernelError::FlatChoice);
        assert!(
            matches!(&error, OptimError::Shard(found) if *found == choice),
            "{error}"
        );
        assert!(error.to_string().contains("four_over_six"), "{error}");
        // Whole rows take it, with the same name.
        builder
            .param(&tensor, spec())
            .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
        rejected += 1;
    }
    assert!(rejected >= 12, "{rejected} recipes choose");
}
