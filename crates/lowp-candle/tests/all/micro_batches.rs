//! Micro-batches: contributions add up exactly, and one that fails counts whole or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor, Var};
use lowp_candle::{CandleError, CandleVars, layers};
use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Recipe, RecipeOptions, ReshardAfterForward};
use lowp_fsdp::{
    Gradients, LinearSpec, ModelError, ModelOptions, ShardedModel, Sharding, VarPlace, VarSpec,
    VarUse,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_optim::{Group, StepOptions};
use lowp_shard::{GradBucketOptions, GradParam, Init};

const TIMEOUT: Duration = Duration::from_secs(5);
const TOKENS: usize = 64;
const DIM: usize = 64;

/// Hands values on; its backward pass fails while `broken`.
#[derive(Clone, Debug)]
struct Fragile {
    broken: Arc<AtomicBool>,
}

impl CustomOp1 for Fragile {
    fn name(&self) -> &'static str {
        "fragile"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let values = storage.as_slice::<f32>()?.to_vec();
        Ok((CpuStorage::F32(values), layout.shape().clone()))
    }

    fn bwd(
        &self,
        _arg: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        if self.broken.load(Ordering::Relaxed) {
            candle_core::bail!("a backward pass that fails")
        }
        Ok(Some(grad.clone()))
    }
}

/// Histories and scales, by entry of the scale book.
type Scales = (Vec<Option<Vec<f32>>>, Vec<f32>);

/// Two layers with a [`Fragile`] between them: the second reduces its gradient before it fails.
struct Model {
    mesh: MeshComm<Cpu>,
    sharded: ShardedModel<Cpu, AnyRecipe>,
    vars: CandleVars,
    broken: Arc<AtomicBool>,
    /// The gradients of this rank's rows, by layer.
    gradients: Vec<CpuBuffer<f32>>,
    rank: usize,
    world: usize,
}

impl Model {
    fn new(
        recipe: AnyRecipe,
        rank: usize,
        comm: Arc<dyn Communicator<Cpu>>,
    ) -> Result<Self, CandleError> {
        let world = comm.world_size();
        let mesh = MeshComm::new(Mesh::sharded(world), comm)?;
        let linears = ["first", "second"].map(|name| LinearSpec {
            name: name.to_owned(),
            block: 0,
            rows: DIM,
            cols: DIM,
            init: Init::Normal(0.1),
            amax_group: None,
        });
        let vars = [VarSpec {
            name: "gain".to_owned(),
            shape: vec![TOKENS, DIM],
            init: Init::Constant(1.0),
            decay: false,
            used: VarUse::Throughout,
        }];
        let options = ModelOptions {
            sharding: Sharding::Fsdp,
            reshard_after_forward: ReshardAfterForward::Yes,
            grads: GradBucketOptions::default(),
            seed: 7,
            group: Group::default(),
            vars: VarPlace::Host,
            ..ModelOptions::default()
        };
        let mut sharded = ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &vars, options)?;
        Ok(Self {
            mesh,
            vars: CandleVars::new(&mut sharded)?,
            sharded,
            broken: Arc::default(),
            gradients: Vec::new(),
            rank,
            world,
        })
    }

    /// Reads gradients where the reduction leaves them, instead of in the optimizer.
    fn watch(&mut self) -> Result<(), CandleError> {
        for layer in 0..2 {
            let weight = self.sharded.weight(layer).expect("a layer");
            let rows = Cpu.alloc::<f32>(weight.element_ranges()[self.rank].len())?;
            let param = GradParam {
                block: None,
                name: layer.to_string(),
                ranges: weight.element_ranges().to_vec(),
                out: rows.clone(),
            };
            let options = GradBucketOptions::default();
            let gradients = Gradients::new(&Cpu, &self.mesh, vec![param], options)?;
            weight.connect(&Arc::new(gradients), 0)?;
            self.gradients.push(rows);
        }
        Ok(())
    }

    fn begin(&self, number: u64) -> Result<(), ModelError> {
        let first = (number as usize * self.world + self.rank) * TOKENS;
        self.sharded.begin(0, first as u64, true)
    }

    /// The backward pass of micro-batch `number`; the last value says whether it may finish.
    fn micro_batch(&mut self, number: u64, finish: bool) -> Result<(), CandleError> {
        self.begin(number)?;
        let values = |stream: u64| {
            let stream = stream + 10 * number + 1000 * self.rank as u64;
            let values = Init::Normal(1.0).rows(3, stream, 0..TOKENS, DIM);
            Tensor::from_vec(values, (TOKENS, DIM), &Device::Cpu)
        };
        let layers = layers(&self.sharded, 1);
        let x = Var::from_tensor(&values(0)?)?;
        let fragile = Fragile {
            broken: self.broken.clone(),
        };
        let gain = self.vars.vars()[0].as_tensor().clone();
        let y = layers[0].forward(&x)?.apply_op1(fragile)?;
        let y = layers[1].forward(&(y * gain)?)?;
        let store = (y * values(1)?)?.sum_all()?.backward()?;
        if finish {
            self.vars.add_gradients(&mut self.sharded, &store)?;
        }
        Ok(())
    }

    /// A micro-batch with infinite values that is not finished.
    fn overflow(&mut self) -> Result<(), CandleError> {
        self.begin(0)?;
        let x = Tensor::full(f32::INFINITY, (TOKENS, DIM), &Device::Cpu)?;
        let x = Var::from_tensor(&x)?;
        for layer in layers(&self.sharded, 1) {
            layer
                .forward(&x)?
                .affine(1e30, 0.0)?
                .sum_all()?
                .backward()?;
        }
        Ok(())
    }

    fn scales(&self) -> Result<Scales, CandleError> {
        let book = self.sharded.scale_book();
        let histories = book.slots().map(|slot| book.history(slot));
        Ok((histories.collect::<Result<_, _>>()?, book.scales()?))
    }

    fn found(&self) -> Result<Vec<Vec<f32>>, CandleError> {
        let found = self.gradients.iter().map(|rows| Cpu.download(rows));
        Ok(found.collect::<Result<_, _>>()?)
    }

    /// The masters after a step.
    fn finish(&mut self) -> Result<Vec<f32>, CandleError> {
        let step = StepOptions::default();
        assert!(self.vars.finish_step(&mut self.sharded, &step)?.applied);
        let mut values = Vec::new();
        self.sharded.begin(1, 0, false)?;
        for layer in layers(&self.sharded, 1) {
            let unit = Tensor::eye(DIM, candle_core::DType::F32, &Device::Cpu)?;
            values.extend(layer.forward(&unit)?.flatten_all()?.to_vec1::<f32>()?);
        }
        values.extend(self.vars.vars()[0].flatten_all()?.to_vec1::<f32>()?);
        Ok(values)
    }
}

fn ranks<T: Send>(
    world: usize,
    work: impl Fn(usize, Arc<dyn Communicator<Cpu>>) -> Result<T, CandleError> + Sync,
) -> Vec<T> {
    let done = run_ranks(&Cpu, world, TIMEOUT, work);
    done.unwrap_or_else(|e| panic!("{world} ranks: {e}"))
}

#[test]
fn contributions_add_up_exactly() {
    for recipe in AnyRecipe::all() {
        for world in [1, 2] {
            let of = |numbers: &[u64]| {
                ranks(world, |rank, comm| {
                    let mut model = Model::new(recipe, rank, comm)?;
                    model.watch()?;
                    for &number in numbers {
                        model.micro_batch(number, true)?;
                    }
                    model.found()
                })
            };
            let (one, other, both) = (of(&[0]), of(&[1]), of(&[0, 1]));
            for rank in 0..world {
                for layer in 0..2 {
                    let pairs = other[rank][layer].iter().zip(&one[rank][layer]);
                    let sums: Vec<f32> = pairs.map(|(b, a)| b + a).collect();
                    let what = format!("{}, rank {rank} of {world}", recipe.name());
                    assert_eq!(both[rank][layer], sums, "{what}, layer {layer}");
                }
            }
        }
    }
}

#[test]
fn a_micro_batch_that_fails_counts_whole_or_not_at_all() {
    for recipe in AnyRecipe::all() {
        for world in [1, 2] {
            let clean = ranks(world, |rank, comm| {
                let mut model = Model::new(recipe, rank, comm)?;
                model.micro_batch(0, true)?;
                model.micro_batch(1, true)?;
                model.finish()
            });
            let retried = ranks(world, |rank, comm| {
                let mut model = Model::new(recipe, rank, comm)?;
                model.micro_batch(0, true)?;
                model.broken.store(true, Ordering::Relaxed);
                model.micro_batch(1, true).expect_err("a failure");
                model.broken.store(false, Ordering::Relaxed);
                // Neither going on nor stopping here is right any more.
                for error in [
                    model.begin(1).expect_err("half a micro-batch"),
                    model
                        .sharded
                        .finish_step(&StepOptions::default())
                        .expect_err("half a micro-batch"),
                ] {
                    let found = matches!(
                        error,
                        ModelError::UnfinishedMicroBatch { open: 1, total: 3 }
                    );
                    assert!(found, "{error}");
                    assert!(error.to_string().contains("discard_gradients"), "{error}");
                }
                model.sharded.discard_gradients()?;
                model.micro_batch(0, true)?;
                model.micro_batch(1, true)?;
                model.finish()
            });
            assert_eq!(clean, retried, "{}, {world} ranks", recipe.name());
        }
    }
}

#[test]
fn a_discarded_micro_batch_leaves_no_amax() {
    for recipe in AnyRecipe::all() {
        for world in [1, 2] {
            let run = |overflows: bool| {
                ranks(world, |rank, comm| {
                    let mut model = Model::new(recipe, rank, comm)?;
                    if overflows {
                        model.overflow()?;
                        model.sharded.discard_gradients()?;
                    }
                    model.micro_batch(0, true)?;
                    let values = model.finish()?;
                    Ok((model.scales()?, values))
                })
            };
            let (clean, overflowed) = (run(false), run(true));
            assert_eq!(clean, overflowed, "{}, {world} ranks", recipe.name());
        }
    }
}

#[test]
fn a_micro_batch_that_is_left_out_is_noticed() {
    ranks(2, |rank, comm| {
        let recipe = AnyRecipe::low_precision()[0];
        let mut model = Model::new(recipe, rank, comm)?;
        // For example because its loss was not finite.
        model.micro_batch(0, false)?;
        let error = model.begin(1).expect_err("half a micro-batch");
        assert!(error.to_string().starts_with("2 of 3"), "{error}");
        // Evaluation is no part of the step.
        model.sharded.begin(0, 0, false)?;
        model.sharded.discard_gradients()?;
        model.micro_batch(1, true)?;
        model.finish().map(drop)
    });
}

#[test]
fn ranks_discard_together_or_all_fail() {
    for name in ["mxfp8", "nvfp4-2d"] {
        let recipe = AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe");
        let start = Instant::now();
        let failed = ranks(2, |rank, comm| {
            let mut model = Model::new(recipe, rank, comm)?;
            // Only rank 0 fails; rank 1 goes on to the first layer.
            model.broken.store(rank == 0, Ordering::Relaxed);
            let first = model.micro_batch(0, true);
            let then = match first {
                Err(_) if rank == 0 => model.sharded.discard_gradients().map_err(Into::into),
                other => other,
            };
            let again = model.sharded.discard_gradients();
            Ok(then.is_err() && again.is_err())
        });
        assert_eq!(failed, [true, true], "{name}");
        assert!(start.elapsed() < TIMEOUT, "{name}: a rank waited");
    }
}
