//! A sharded model against its definition: products of decoded operands, summed gradients, and
//! bits that depend on neither policy nor accumulation order.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Tensor};
use lowp_candle::{CandleError, Linear, MatRef, MemoryWeight, QuantLinear, layers, product};
use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{
    AnyRecipe, Orientation, Recipe, RecipeOptions, ReshardAfterForward, Role, Shape, Usage,
};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, Sharding, VarPlace};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::Group;
use lowp_shard::{GradBucketOptions, Init, dequantize, quantize};

const TIMEOUT: Duration = Duration::from_secs(60);

fn options() -> ModelOptions {
    ModelOptions {
        sharding: Sharding::Fsdp,
        reshard_after_forward: ReshardAfterForward::Yes,
        grads: GradBucketOptions::default(),
        seed: 7,
        group: Group {
            lr: 0.01,
            ..Group::default()
        },
        vars: VarPlace::Host,
        ..ModelOptions::default()
    }
}

fn layer(rows: usize, cols: usize) -> Vec<LinearSpec> {
    vec![LinearSpec {
        name: "layer".to_owned(),
        block: 0,
        rows,
        cols,
        init: Init::Normal(0.1),
        amax_group: None,
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
    dequantize(&cpu, &tensor, Orientation::Rowwise).expect("values")
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
        run_ranks(&Cpu, world, TIMEOUT, |_, comm| -> Result<(), CandleError> {
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
            assert_eq!(
                layers(&model, 1)[0].forward(&x)?.to_vec2::<f32>()?,
                expected
            );
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
        let rowwise = recipe.operand(Role::Activation).quantizers.rowwise.kernel;
        if rowwise.scale.is_delayed() {
            continue; // activations start with scale 1: `delayed_operands_learn_their_scale`
        }
        let wq = round_trip(recipe, Shape::new(rows, cols), &w);
        // Operands of a recipe with 2-D weight blocks have 1-D blocks: the recipe that shares them.
        let same = |r: &AnyRecipe| r.kernel(Orientation::Rowwise) == rowwise;
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
        run_ranks(&Cpu, 2, TIMEOUT, |_, comm| -> Result<(), CandleError> {
            let cpu = Cpu;
            let specs = layer(rows, cols);
            let model = ShardedModel::new(&cpu, &mesh(&comm)?, |_| recipe, &specs, &[], options())?;
            model.begin(0, 0, true)?;
            let x = Tensor::from_slice(&x, (tokens, cols), &Device::Cpu)?;
            let y = layers(&model, 1)[0]
                .forward(&x)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            assert_eq!(y, expected, "{}", recipe.name());
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
    }
}

#[test]
fn a_layer_that_does_not_fit_is_named() {
    let cpu = Cpu;
    let comm: Arc<dyn Communicator<Cpu>> = Arc::new(lowp_comm::LocalComm::solo(&cpu));
    let mesh = mesh(&comm).expect("one rank");
    let narrow = AnyRecipe::low_precision()
        .into_iter()
        .find(|r| r.check(Shape::new(8, 24)).is_err());
    let recipe = narrow.expect("a recipe with blocks");
    let error = ShardedModel::new(&cpu, &mesh, |_| recipe, &layer(8, 24), &[], options());
    let text = error.expect_err("24 columns").to_string();
    assert!(text.contains("layer") && text.contains("8x24"), "{text}");
}
