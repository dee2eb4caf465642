//! A run that stops and goes on over other numbers of ranks sees the tokens that it would have seen, and trains the same bits.
//!
//! The gradients of this network are counts of tokens, whose sums are exact: any order of them has the same bits, so all that could differ
//! is which tokens a step saw, and what became of its state.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lowp_checkpoint::{Block, Checkpoint, Dtype};
use lowp_comm::{Mesh, run_ranks};
use lowp_fsdp::{LinearSpec, Sharding};
use lowp_kernels::Cpu;
use lowp_shard::Init;
use lowp_train::network::{NetworkResult, Sharded};
use lowp_train::result::RunResult;
use lowp_train::tokens::{Packing, TokenIds, TokenWriter};
use lowp_train::training::Event;
use lowp_train::{
    Batch, Checkpoints, Config, Mixture, Model, Network, Optimizer, Run, Tokens, Training,
};

const VOCAB: usize = 64;
const COLS: usize = 32;
const STEPS: usize = 12;

const PACKING: Packing = Packing {
    seq: 8,
    batch: 6,
    held_out: 0.2,
    mask_documents: true,
};

/// A row of weights for each token.
#[derive(Clone, serde::Serialize)]
struct Table {
    vocab: usize,
}

impl Model for Table {
    fn linears(&self) -> Vec<LinearSpec> {
        vec![LinearSpec::new(
            "table",
            self.vocab,
            COLS,
            Init::Normal(1.0),
        )]
    }
}

struct Counts;

/// Multiples of 2^-10 far below 2^14.
fn part(count: u32) -> f32 {
    count as f32 / 1024.0
}

impl Network<Cpu> for Counts {
    type Batch = Batch;

    fn train(&mut self, model: &mut Sharded<Cpu>, batch: &Batch, _: usize) -> NetworkResult<f64> {
        let mut gradient = vec![0.0; VOCAB * COLS];
        let mut add = |token: u32, col: u32| {
            gradient[token as usize * COLS + col as usize % COLS] += part(1 + col);
        };
        let targets = batch.inputs.iter().zip(batch.targets.iter());
        targets
            .filter(|(_, target)| **target != Batch::IGNORED)
            .for_each(|(&input, &target)| add(input, target));
        model
            .weight(0)
            .ok_or("no weight")?
            .add_gradient(&gradient)?;
        model.finish_micro_batch()?;
        self.evaluate(model, batch, 1)
    }

    fn evaluate(&mut self, _: &mut Sharded<Cpu>, batch: &Batch, _: usize) -> NetworkResult<f64> {
        let counted = batch
            .targets
            .iter()
            .filter(|&&target| target != Batch::IGNORED);
        Ok(counted.map(|&target| f64::from(part(target))).sum())
    }
}

/// Documents of some lengths, of which some tokens count.
fn tokens(folder: &Path, documents: u32) -> Result<(), Box<dyn Error>> {
    let ids = TokenIds {
        vocab: VOCAB,
        end: Some(3),
    };
    let mut writer = TokenWriter::new(folder, ids, true, String::new())?.shards_of(200);
    for document in 0..documents {
        let ids: Vec<u32> = (0..document % 17 + 1)
            .map(|at| (document * document / 5 + at * 7) % VOCAB as u32)
            .collect();
        let counted: Vec<bool> = ids.iter().map(|id| id % 3 != 1).collect();
        writer.document(&ids, &counted)?;
    }
    writer.finish()?;
    Ok(())
}

/// A recipe, and what is sharded, updates and is stored of states.
type Kind<'a> = (&'a str, Sharding, Optimizer, &'a str);

/// A run in `folder` of `world` ranks, up to step `last`.
fn train(
    on: (&Path, &Mixture),
    kind: Kind<'_>,
    ranks: (usize, usize),
) -> Result<RunResult, Box<dyn Error>> {
    watched(on, kind, ranks, &|_| ())
}

/// The same, watched.
fn watched(
    (folder, data): (&Path, &Mixture),
    (recipe, sharding, optimizer, state): Kind<'_>,
    (world, last): (usize, usize),
    watch: &(dyn Fn(Event<'_>) + Sync),
) -> Result<RunResult, Box<dyn Error>> {
    let run = Run::parse(recipe)?;
    let config = Config {
        steps: STEPS,
        warmup: 2,
        batch: 6,
        mesh: Mesh::sharded(world),
        sharding,
        optimizer,
        optimizer_state: state.parse()?,
        lr: optimizer.defaults().lr,
        eval_every: Some(4),
        ..Config::new(Table { vocab: VOCAB })
    };
    let mut training = Training::new(&run, &config, data);
    training.checkpoints = Checkpoints::in_folder(folder).stop_after(last);
    training.watch = watch;
    let mut ranks = run_ranks(&Cpu, world, Duration::from_secs(60), |_, comm| {
        training.rank(&Cpu, comm, |_, _| Ok(Counts))
    })?;
    Ok(ranks.swap_remove(0))
}

/// All tensors of the last checkpoint: masters, moments, codes, scales, losses.
fn saved(folder: &Path, recipe: &str) -> Result<BTreeMap<String, Vec<u8>>, Box<dyn Error>> {
    let checkpoint = Checkpoint::latest(&folder.join(format!("{recipe}-seed0")))?;
    assert_eq!(checkpoint.step(), STEPS as u64);
    let mut tensors = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let block = Block::whole(tensor.shape);
        let bytes = checkpoint.read(tensor.name, tensor.dtype, tensor.shape, block)?;
        tensors.insert(tensor.name.to_owned(), bytes);
    }
    Ok(tensors)
}

#[test]
fn ranks_that_come_and_go_change_no_bit() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    for (name, documents) in [("a", 60), ("b", 12)] {
        tokens(&path(name), documents)?;
    }
    let open = |name| Tokens::open(&path(name), PACKING);
    let data = Mixture::new(vec![(open("a")?, 0.7), (open("b")?, 0.3)])?;
    // Several epochs of the smaller source.
    let small = data.sources().nth(1).ok_or("a source")?.0.split()[0];
    assert!(2 * small < (STEPS * 6 * 3 / 10) as u64, "{small}");
    for kind in [
        ("mxfp8", Sharding::Fsdp, Optimizer::AdamW, "f32"),
        (
            "fp8-current",
            Sharding::Zero1,
            Optimizer::Lion,
            "exp_avg=bf16",
        ),
        (
            "nvfp4-2d",
            Sharding::Fsdp,
            Optimizer::AdamW,
            "exp_avg=bf16,exp_avg_sq=bf16",
        ),
        (
            "fp32",
            Sharding::Fsdp,
            Optimizer::Sgd,
            "momentum_buffer=bf16",
        ),
        (
            "mxfp8-2d",
            Sharding::Fsdp,
            Optimizer::AdamW,
            "master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
        ),
        (
            "fp8-block",
            Sharding::Zero1,
            Optimizer::AdamW,
            "exp_avg=fp8",
        ),
        ("mxfp8-2d", Sharding::Fsdp, Optimizer::Muon, "master=bf16"),
        ("fp8-block", Sharding::Zero1, Optimizer::Moonlight, "f32"),
    ] {
        let (recipe, optimizer) = (kind.0, kind.2.name());
        let whole = path(&format!("{recipe}-{optimizer}-whole"));
        let expected = train((&whole, &data), kind, (4, STEPS))?;
        let stopped = path(&format!("{recipe}-{optimizer}-stopped"));
        for (world, last) in [(2, 3), (3, 4), (1, 9)] {
            train((&stopped, &data), kind, (world, last))?;
        }
        let found = train((&stopped, &data), kind, (6, STEPS))?;
        assert_eq!(found.train_loss, expected.train_loss, "{recipe}");
        assert_eq!(found.evaluations, expected.evaluations, "{recipe}");
        assert_eq!(found.evaluations.len(), 3);
        assert_eq!(found.val_loss.to_bits(), expected.val_loss.to_bits());
        let [whole, stopped] = [saved(&whole, recipe)?, saved(&stopped, recipe)?];
        assert!(whole == stopped, "{recipe}: other state");
    }
    Ok(())
}

/// Trains, and cannot be evaluated.
struct OnlyTrains;

impl Network<Cpu> for OnlyTrains {
    type Batch = Batch;

    fn train(
        &mut self,
        model: &mut Sharded<Cpu>,
        batch: &Batch,
        threads: usize,
    ) -> NetworkResult<f64> {
        Counts.train(model, batch, threads)
    }

    fn evaluate(&mut self, _: &mut Sharded<Cpu>, _: &Batch, _: usize) -> NetworkResult<f64> {
        Err("planned".into())
    }
}

/// What fails after the last step loses no weights.
#[test]
fn the_last_checkpoint_is_there_before_the_last_evaluation() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("tokens");
    tokens(&data, 60)?;
    let data = Mixture::from(Tokens::open(&data, PACKING)?);
    let run = Run::parse("mxfp8")?;
    let config = Config {
        steps: STEPS,
        warmup: 2,
        batch: 6,
        mesh: Mesh::sharded(2),
        ..Config::new(Table { vocab: VOCAB })
    };
    let mut training = Training::new(&run, &config, &data);
    training.checkpoints = Checkpoints::in_folder(folder.path());
    let ranks = run_ranks(&Cpu, 2, Duration::from_secs(60), |_, comm| {
        training.rank(&Cpu, comm, |_, _| Ok(OnlyTrains))
    });
    let error = ranks.expect_err("an evaluation that fails").to_string();
    assert!(error.contains("planned"), "{error}");
    assert!(!saved(folder.path(), "mxfp8")?.is_empty());
    Ok(())
}

/// A checkpoint has the moments in the dtypes of its run. A run with others goes on from it, on other ranks as well, and says what it rounds.
#[test]
fn moments_of_a_checkpoint_become_those_of_the_run() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("tokens");
    tokens(&data, 60)?;
    let data = Mixture::from(Tokens::open(&data, PACKING)?);
    let [f32, bf16] = [Dtype::F32, Dtype::Bf16];
    for sharding in [Sharding::Fsdp, Sharding::Zero1] {
        let runs = folder.path().join(format!("{sharding:?}"));
        for (step, (state, world, dtypes, rounds)) in (1..).zip([
            ("exp_avg=f32", 2, [f32, f32], 0),
            ("exp_avg=bf16", 3, [bf16, f32], 1),
            ("exp_avg=f32", 1, [f32, f32], 0),
            ("exp_avg=bf16,exp_avg_sq=bf16", 4, [bf16, bf16], 2),
            ("exp_avg=bf16,exp_avg_sq=bf16", 2, [bf16, bf16], 0),
            ("exp_avg_sq=f32", 2, [f32, f32], 0),
            // Values of fp8 are saved as bf16, which has all of them.
            ("exp_avg=fp8,exp_avg_sq=fp8", 3, [bf16, bf16], 2),
            ("exp_avg=fp8,exp_avg_sq=fp8", 2, [bf16, bf16], 0),
            ("exp_avg=bf16,exp_avg_sq=bf16", 1, [bf16, bf16], 0),
            ("exp_avg=fp8", 1, [bf16, f32], 1),
            ("master=bf16,exp_avg=fp8", 3, [bf16, f32], 1),
            ("exp_avg=fp8", 2, [bf16, f32], 0),
        ]) {
            let rounded = AtomicUsize::new(0);
            let watch = |event: Event<'_>| {
                if let Event::Rounded { states } = event {
                    rounded.fetch_add(states, Ordering::Relaxed);
                }
            };
            let kind = ("mxfp8", sharding, Optimizer::AdamW, state);
            watched((&runs, &data), kind, (world, step), &watch)?;
            assert_eq!(rounded.into_inner(), rounds, "{state}");
            let checkpoint = Checkpoint::latest(&runs.join("mxfp8-seed0"))?;
            let saved = |what| checkpoint.info(&format!("table.{what}")).map(|t| t.dtype);
            let master = if state.starts_with("master") {
                bf16
            } else {
                f32
            };
            assert_eq!(saved("master"), Some(master));
            assert_eq!(["exp_avg", "exp_avg_sq"].map(saved), dtypes.map(Some));
        }
    }
    Ok(())
}

/// A run goes on with the optimizer that it began with, in any recipe.
#[test]
fn a_checkpoint_of_another_optimizer_is_an_error() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("tokens");
    tokens(&data, 60)?;
    let data = Mixture::from(Tokens::open(&data, PACKING)?);
    for (before, after) in [
        (Optimizer::AdamW, Optimizer::Lion),
        (Optimizer::Lion, Optimizer::Sgd),
        (Optimizer::Sgd, Optimizer::Muon),
        (Optimizer::Muon, Optimizer::AdamW),
    ] {
        let runs = folder.path().join(before.name());
        let kind = |recipe, optimizer| (recipe, Sharding::Fsdp, optimizer, "f32");
        train((&runs, &data), kind("mxfp8", before), (2, 3))?;
        let error = train((&runs, &data), kind("mxfp8", after), (2, 6));
        let error = error.err().ok_or("a run of another optimizer went on")?;
        let error = error.to_string();
        let named = |optimizer: Optimizer| error.contains(&format!("\"{}\"", optimizer.name()));
        assert!(named(before) && named(after), "{error}");
    }
    Ok(())
}

/// A network that has no z-loss trains no run that says it has.
#[test]
fn a_z_loss_that_the_network_leaves_out_is_an_error() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    tokens(folder.path(), 60)?;
    let packing = Packing {
        seq: 8,
        batch: 6,
        held_out: 0.2,
        mask_documents: false,
    };
    let data = Mixture::from(Tokens::open(folder.path(), packing)?);
    let run = Run::parse("fp32")?;
    let config = Config {
        batch: 6,
        z_loss: 1e-4,
        ..Config::new(Table { vocab: VOCAB })
    };
    let training = Training::new(&run, &config, &data);
    let result = run_ranks(&Cpu, 1, Duration::from_secs(60), |_, comm| {
        training.rank(&Cpu, comm, |_, _| Ok(Counts))
    });
    let error = result.expect_err("a z-loss").to_string();
    assert!(error.contains("the network trains with 0"), "{error}");
    Ok(())
}

/// Without a folder nothing is resumed, and no run starts at step 0 instead.
#[test]
fn the_newest_checkpoint_of_no_folder_is_an_error() -> Result<(), Box<dyn Error>> {
    let checkpoints = Checkpoints::default().resume_newest();
    let error = checkpoints
        .source(&Run::parse("fp32")?, 0)
        .expect_err("no folder");
    assert!(error.to_string().contains("without a folder"), "{error}");
    Ok(())
}
