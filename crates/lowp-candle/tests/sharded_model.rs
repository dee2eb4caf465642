//! A sharded model against its definition: products of decoded operands, summed gradients, and
//! bits that depend on neither policy nor accumulation order.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Tensor};
use lowp_candle::{
    Batch, Gpt, GptConfig, Linear, LinearSpec, MatRef, MemoryWeight, ModelError, ModelOptions,
    QuantLinear, ShardedModel, product,
};
use lowp_format::{AnyRecipe, Recipe, RecipeOptions, Role, ScaleSource, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{Group, StepOptions};
use lowp_shard::{Communicator, GradWire, Init, Mesh, MeshComm, dequantize, quantize, run_ranks};

const TIMEOUT: Duration = Duration::from_secs(60);

fn options() -> ModelOptions {
    ModelOptions {
        reshard_after_forward: true,
        grad_wire: GradWire::F32,
        seed: 7,
        group: Group {
            lr: 0.01,
            ..Group::default()
        },
        threads: 1,
    }
}

fn layer(rows: usize, cols: usize) -> Vec<LinearSpec> {
    vec![LinearSpec {
        name: "layer".to_owned(),
        block: 0,
        rows,
        cols,
        init: Init::Normal(0.1),
    }]
}

fn recipe(name: &str) -> AnyRecipe {
    AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a known recipe")
}

fn mesh(comm: &Arc<dyn Communicator<Cpu>>) -> Result<MeshComm<Cpu>, ModelError> {
    Ok(MeshComm::new(
        Mesh::sharded(comm.world_size()),
        comm.clone(),
    )?)
}

/// The values that a GEMM over `values` reads: quantized and decoded by `recipe`.
fn round_trip(recipe: AnyRecipe, shape: Shape, values: &[f32]) -> Vec<f32> {
    let cpu = Cpu;
    let source = Source::F32(cpu.upload(values).expect("room"));
    let tensor = quantize(&cpu, recipe, shape, Usage::ROWWISE, source, None).expect("a tensor");
    dequantize(&cpu, &tensor, lowp_format::Orientation::Rowwise).expect("values")
}

#[test]
fn the_plain_recipe_is_the_plain_layer() {
    let (rows, cols, tokens) = (24, 16, 6);
    let x = Tensor::arange(0f32, (tokens * cols) as f32, &Device::Cpu).expect("x");
    let x = x
        .affine(0.01, -0.4)
        .and_then(|x| x.reshape((tokens, cols)))
        .expect("x");
    let init = Init::Normal(0.1).rows(7, 0, 0..rows, cols);
    let memory = Arc::new(MemoryWeight::new(rows, cols, init).expect("a weight"));
    let expected = QuantLinear::new(memory, 1)
        .forward(&x)
        .expect("y")
        .to_vec2::<f32>();
    let expected = expected.expect("values");
    for world in 1..=5 {
        run_ranks(&Cpu, world, TIMEOUT, |_, comm| -> Result<(), ModelError> {
            let specs = layer(rows, cols);
            let cpu = Cpu;
            let model = ShardedModel::new(
                &cpu,
                &mesh(&comm)?,
                |_| recipe("fp32"),
                &specs,
                &[],
                options(),
            )?;
            assert_eq!(model.layers()[0].forward(&x)?.to_vec2::<f32>()?, expected);
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{world} ranks: {e}"));
    }
}

#[test]
fn forward_multiplies_decoded_operands() {
    let (rows, cols, tokens) = (64, 96, 32);
    let x: Vec<f32> = Init::Normal(1.0).rows(3, 9, 0..tokens, cols);
    let w: Vec<f32> = Init::Normal(0.1).rows(7, 0, 0..rows, cols);
    for recipe in AnyRecipe::low_precision() {
        if matches!(recipe.scale_source(), ScaleSource::History { .. }) {
            continue; // activations start with scale 1: `delayed_operands_learn_their_scale`
        }
        let wq = round_trip(recipe, Shape::new(rows, cols), &w);
        // Operands of a recipe with 2-D weight blocks have 1-D blocks: the recipe that shares them.
        let operand = recipe.operand(Role::Activation).kernel;
        let same = |r: &AnyRecipe| r.kernel() == operand;
        let activation = AnyRecipe::low_precision()
            .into_iter()
            .find(same)
            .expect("its 1-D form");
        let xq = round_trip(activation, Shape::new(tokens, cols), &x);
        let expected = product(
            MatRef::new(&xq, tokens, cols),
            MatRef::new(&wq, rows, cols).t(),
            1,
        );
        run_ranks(&Cpu, 2, TIMEOUT, |_, comm| -> Result<(), ModelError> {
            let cpu = Cpu;
            let specs = layer(rows, cols);
            let model = ShardedModel::new(&cpu, &mesh(&comm)?, |_| recipe, &specs, &[], options())?;
            model.begin(0, 0, true)?;
            let x = Tensor::from_slice(&x, (tokens, cols), &Device::Cpu)?;
            let y = model.layers()[0]
                .forward(&x)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            assert_eq!(y, expected, "{}", recipe.name());
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
    }
}

/// A model small enough for every recipe, one pass of `steps` steps; returns losses and masters.
fn train(
    recipe: AnyRecipe,
    world: usize,
    reshard: bool,
    micro_batches: usize,
    steps: u64,
) -> Vec<f32> {
    let config = GptConfig {
        dim: 64,
        layers: 1,
        heads: 2,
        seq: 32,
    };
    let text: Vec<u8> = (0..4 * 33u32).map(|i| (i * i % 251) as u8).collect();
    let mut losses = run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
        let cpu = Cpu;
        let options = ModelOptions {
            reshard_after_forward: reshard,
            ..options()
        };
        let (linears, vars) = (config.linears(), config.vars());
        let mut sharded =
            ShardedModel::new(&cpu, &mesh(&comm)?, |_| recipe, &linears, &vars, options)?;
        let gpt = Gpt::new(config, sharded.layers(), sharded.vars().to_vec(), 1)?;
        let mut losses = Vec::new();
        for step in 0..steps {
            // Four sequences, dealt to ranks and micro-batches in order.
            let parts = world * micro_batches;
            let mut total = [0.0];
            for micro in 0..micro_batches {
                let part = rank * micro_batches + micro;
                let (first, last) = (4 * part / parts, 4 * (part + 1) / parts);
                let slice = |shift: usize| -> Arc<[u8]> {
                    let sequence = |s: usize| &text[33 * s + shift..33 * s + shift + 32];
                    (first..last).flat_map(sequence).copied().collect()
                };
                let batch = Batch {
                    inputs: slice(0),
                    targets: slice(1),
                };
                sharded.begin(step, (first * 32) as u64, true)?;
                let loss = gpt.loss(&batch, 128)?;
                sharded.add_gradients(&loss.backward()?)?;
                total[0] += f64::from(loss.to_scalar::<f32>()?);
            }
            comm.all_reduce_sum_f64(&mut total)?;
            losses.push(total[0] as f32);
            assert!(sharded.finish_step(&StepOptions::default())?.applied);
        }
        assert_eq!(sharded.audit()?, [], "{}", recipe.name());
        Ok::<_, ModelError>(losses)
    })
    .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
    losses.swap_remove(0)
}

#[test]
fn policy_changes_no_bit() {
    for recipe in AnyRecipe::all() {
        let (yes, no) = (train(recipe, 2, true, 1, 3), train(recipe, 2, false, 1, 3));
        assert_eq!(yes, no, "{}", recipe.name());
        assert!(yes[2] < yes[0], "{}: {yes:?} does not fall", recipe.name());
    }
}

/// The first loss is that of equal logits: its tokens are summed in f64 and rounded once per part.
/// Later ones follow from gradients summed in another order, which may turn a code that lies at the
/// edge of its neighbour: one of the 49,152 weights or its operand moves the loss by 2e-5.
#[test]
fn ranks_and_micro_batches_agree() {
    const TURNED_CODES: f32 = 1e-4;
    let ulps = |a: f32, b: f32| a.to_bits().abs_diff(b.to_bits());
    for recipe in AnyRecipe::all() {
        let one = train(recipe, 1, true, 1, 3);
        let mut splits = vec![(2, 1), (4, 1)];
        // The amax of a tensor is that of its micro-batch, so there codes differ, and only the sum
        // of contributions is defined: `micro_batches.rs` tests its bits.
        let source = recipe.operand(Role::Activation).scale_source;
        if !source.needs_tensor_amax() {
            splits.extend([(1, 2), (2, 2)]);
        }
        for (world, micro_batches) in splits {
            let other = train(recipe, world, true, micro_batches, 3);
            let what = format!(
                "{}, {world} ranks, {micro_batches} micro-batches: {one:?} {other:?}",
                recipe.name()
            );
            assert!(ulps(one[0], other[0]) <= 1, "{what}");
            let pairs = one.iter().zip(&other).skip(1);
            assert!(
                pairs.into_iter().all(|(a, b)| (a - b).abs() < TURNED_CODES),
                "{what}"
            );
        }
    }
}

#[test]
fn delayed_operands_learn_their_scale() {
    let delayed = |r: &AnyRecipe| matches!(r.scale_source(), ScaleSource::History { .. });
    let recipe = AnyRecipe::all()
        .into_iter()
        .find(delayed)
        .expect("a delayed recipe");
    // The first backward pass runs with scale 1, under which small gradients vanish.
    let losses = train(recipe, 2, true, 1, 8);
    assert!(losses[7] < losses[0] - 0.1, "{losses:?}");
}

#[test]
fn a_layer_that_does_not_fit_is_named() {
    let cpu = Cpu;
    let comm: Arc<dyn Communicator<Cpu>> = Arc::new(lowp_shard::LocalComm::solo(&cpu));
    let mesh = mesh(&comm).expect("one rank");
    let narrow = AnyRecipe::low_precision()
        .into_iter()
        .find(|r| r.check(Shape::new(8, 24)).is_err());
    let recipe = narrow.expect("a recipe with blocks");
    let error = ShardedModel::new(&cpu, &mesh, |_| recipe, &layer(8, 24), &[], options());
    let text = error.expect_err("24 columns").to_string();
    assert!(text.contains("layer") && text.contains("8x24"), "{text}");
}
