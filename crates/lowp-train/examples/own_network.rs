//! A network of your own: an MLP with its weights in MXFP8 over two ranks, trained, saved, and resumed to the bit.
use candle_core::{Device, Result as Candle, Tensor, Var};
use lowp_candle::{Linear, layers};
use lowp_comm::{Mesh, run_ranks};
use lowp_fsdp::LinearSpec;
use lowp_kernels::Cpu;
use lowp_shard::Init;
use lowp_train::network::{NetworkResult, Sharded};
use lowp_train::{Checkpoints, Config, Model, Network, Run, Sampler, Training};
use std::{error::Error, fs, ops::Range, path::Path, time::Duration};
#[derive(Clone, serde::Serialize)]
struct Mlp {
    hidden: usize,
}
impl Model for Mlp {
    fn linears(&self) -> Vec<LinearSpec> {
        let layer = |name, rows, cols| LinearSpec::new(name, rows, cols, Init::Normal(0.1));
        vec![layer("up", self.hidden, 32), layer("down", 32, self.hidden)]
    }
}
struct Passes(Vec<Box<dyn Linear>>);
/// The distance of the outputs from the squares of the inputs.
fn loss(Passes(layers): &Passes, x: &[f32], divisor: usize) -> Candle<Tensor> {
    let x = Var::from_slice(x, (x.len() / 32, 32), &Device::Cpu)?;
    let y = layers[1].forward(&layers[0].forward(&x)?.relu()?)?;
    (y - x.sqr()?)?.sqr()?.sum_all()? / divisor as f64
}
impl Network<Cpu> for Passes {
    type Batch = Vec<f32>;
    fn train(&mut self, model: &mut Sharded<Cpu>, x: &Vec<f32>, n: usize) -> NetworkResult<f64> {
        let loss = loss(self, x, n)?;
        loss.backward()?;
        model.finish_micro_batch()?;
        Ok(loss.to_scalar::<f32>()?.into())
    }
    fn evaluate(&mut self, _: &mut Sharded<Cpu>, x: &Vec<f32>, n: usize) -> NetworkResult<f64> {
        Ok(loss(self, x, n)?.to_scalar::<f32>()?.into())
    }
}
/// The losses of all steps up to `last`; those in `folder` are not done again.
pub(crate) fn train(folder: &Path, last: usize) -> Result<Vec<f32>, Box<dyn Error>> {
    let (run, mut config) = (Run::parse("mxfp8")?, Config::new(Mlp { hidden: 64 }));
    (config.steps, config.mesh) = (24, Mesh::sharded(2));
    let waves = Sampler::new("waves", |seed, step, batch: Range<usize>| {
        let numbers = (batch.start * 32..batch.end * 32).map(|i| i * i + step);
        Vec::from_iter(numbers.map(|i| (i as f32 + seed as f32).sin()))
    });
    let mut training = Training::new(&run, &config, &waves);
    training.checkpoints = Checkpoints::in_folder(folder).stop_after(last);
    let ranks = run_ranks(&Cpu, 2, Duration::from_secs(60), |_, comm| {
        training.rank(&Cpu, comm, |model, _| Ok(Passes(layers(model, 1))))
    })?;
    Ok(ranks[0].train_loss.clone())
}
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("own-network-{}", std::process::id()));
    let broken = folder.join("broken");
    train(&broken, 16)?;
    assert_eq!(train(&broken, 24)?, train(&folder.join("unbroken"), 24)?);
    Ok(fs::remove_dir_all(folder)?)
}
