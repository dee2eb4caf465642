//! A step on a GPU beside the same step on the CPU. Without a GPU the tests pass, unless `LOWP_REQUIRE_GPU` is set.

mod families;
mod held;
mod late;
mod logits;
mod offload;

use families::{QWEN3, TIED, WINDOW, described};

use crate::train::config::Setup;
use crate::train::{Args, BUNDLED};
use crate::{Cli, Command};
use clap::Parser;
use lowp_candle::transformer::Transformer as OnCpu;
use lowp_checkpoint::{Late, Piece};
use lowp_comm::{Communicator, LocalComm, Mesh, MeshComm};
use lowp_format::spelling::Variant;
use lowp_format::{Orientation, Part, Phase};
use lowp_fsdp::{LinearSpec, ModelOptions, Multiplies, ShardedModel};
use lowp_kernels::{Backend, Cpu, Cuda};
use lowp_nccl::{NcclComm, NcclOptions};
use lowp_optim::StepOptions;
use lowp_shard::GradBucketOptions;
use lowp_train::network::{RankPlace, Sharded};
use lowp_train::{Batch, Data, Network, Text};
use lowp_transformer::Transformer;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

fn gpu() -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(_) => None,
    }
}

/// The arguments, and what they ask for.
struct Asked {
    args: Args,
    setup: Setup,
}

fn asked(words: &str) -> Asked {
    let words = format!("lowp train --world-size 1 --no-baseline --lr 3e-4 {words}");
    let cli = Cli::try_parse_from(words.split(' ')).expect("a command line");
    let Command::Train(args) = cli.command else {
        panic!("another command")
    };
    let setup = Setup::new(&args, None).expect("a setup");
    Asked { args: *args, setup }
}

/// Losses of some steps, and by parameter the first moments after the first one: a tenth of the clipped gradients.
struct Trained {
    losses: Vec<f64>,
    gradients: BTreeMap<String, Vec<f32>>,
    /// What checkpoints of all steps would hold.
    saved: Vec<BTreeMap<String, Vec<u8>>>,
}

/// A device as the only rank of a world trains on it.
trait Alone: Multiplies {
    type Network: Network<Self, Batch = Batch>;

    fn alone(&self) -> Arc<dyn Communicator<Self>>;

    fn network(&self, sharded: &mut ShardedModel<Self, Variant>, asked: &Asked) -> Self::Network;
}

impl Alone for Cpu {
    type Network = OnCpu;

    fn alone(&self) -> Arc<dyn Communicator<Self>> {
        LocalComm::solo(self).into()
    }

    fn network(&self, sharded: &mut ShardedModel<Self, Variant>, asked: &Asked) -> OnCpu {
        let config = &asked.setup.config;
        let network = OnCpu::new(config.model, sharded, 2, config.recompute);
        network.expect("a network").with_z_loss(config.z_loss)
    }
}

impl Alone for Cuda {
    type Network = Transformer<Variant>;

    fn alone(&self) -> Arc<dyn Communicator<Self>> {
        let devices = std::slice::from_ref(self);
        let comms = NcclComm::world_on(
            devices,
            NcclOptions {
                limit: Duration::from_secs(60),
                ..NcclOptions::default()
            },
        );
        comms.expect("a world").remove(0).into()
    }

    fn network(&self, sharded: &mut ShardedModel<Self, Variant>, asked: &Asked) -> Self::Network {
        let place = RankPlace {
            rank: 0,
            threads: 2,
        };
        let (args, config) = (&asked.args, &asked.setup.config);
        super::network(self, sharded, args, config, place).expect("a network")
    }
}

fn model<B: Alone>(backend: &B, asked: &Asked) -> (ShardedModel<B, Variant>, B::Network) {
    let mesh = MeshComm::new(Mesh::sharded(1), backend.alone()).expect("a mesh");
    let (run, config) = (&asked.setup.runs[0], &asked.setup.config);
    let options = ModelOptions {
        sharding: config.sharding,
        reshard_after_forward: config.reshard_after_forward,
        grads: GradBucketOptions::default(),
        seed: config.seed,
        group: config.group(),
        var_group: config.var_group(),
        vars: B::Network::VARS,
        state: config.optimizer_state,
        offload: config.offload_optimizer,
    };
    let (linears, vars) = (config.linears(), config.vars());
    let layers = config.model.layers;
    let of = |linear: &LinearSpec| config.recipe_of(run, linear, layers, false);
    let sharded = ShardedModel::new(backend, &mesh, of, &linears, &vars, options);
    let mut sharded = sharded.expect("a model");
    let network = backend.network(&mut sharded, asked);
    (sharded, network)
}

fn train<B: Alone>(backend: &B, asked: &Asked, steps: usize) -> Trained {
    let (mut sharded, mut network) = model(backend, asked);
    run(&mut sharded, &mut network, asked, (steps, 0))
}

/// `steps` steps, where the bytes of a checkpoint are waited for `lag` steps later.
fn run<B: Backend, N: Network<B, Batch = Batch>>(
    sharded: &mut ShardedModel<B, Variant>,
    network: &mut N,
    asked: &Asked,
    (steps, lag): (usize, usize),
) -> Trained {
    let config = &asked.setup.config;
    let text = Text::new(BUNDLED.to_vec(), config.model.seq).expect("the text");
    let mut trained = Trained {
        losses: Vec::new(),
        gradients: BTreeMap::new(),
        saved: Vec::new(),
    };
    let mut pending = VecDeque::new();
    for step in 0..steps {
        let tokens = config.batch * config.model.seq;
        let part = config.batch / config.accumulate;
        let mut loss = 0.0;
        for micro in 0..config.accumulate {
            let sequences = micro * part..(micro + 1) * part;
            let first = (sequences.start * config.model.seq) as u64;
            let random = N::random_step(step, micro, config.accumulate);
            sharded.reduce(config.reduction(micro)).expect("a pass");
            sharded.begin(random, first, true).expect("a pass");
            let batch = text.train(config.seed, step, sequences).expect("a batch");
            let batch = match asked.args.mask_documents {
                true => by_words(batch, config.model.seq),
                false => batch,
            };
            loss += network
                .train(sharded, &batch, tokens)
                .expect("a micro-batch");
        }
        let options = StepOptions {
            max_norm: Some(config.clip),
            ..StepOptions::default()
        };
        let report = network.start_step(sharded, &options).expect("a step");
        report.wait().expect("a step");
        loss += network.take_loss().expect("a loss");
        trained.losses.push(loss);
        pending.push_back(sharded.pieces().expect("a state"));
        if pending.len() > lag {
            trained.saved.extend(pending.pop_front().map(arrived));
        }
    }
    trained.saved.extend(pending.into_iter().map(arrived));
    for (name, bytes) in &trained.saved[0] {
        if let Some(name) = name.strip_suffix(".exp_avg") {
            let (words, _) = bytes.as_chunks::<4>();
            let values = words.iter().map(|&word| f32::from_le_bytes(word));
            trained.gradients.insert(name.to_owned(), values.collect());
        }
    }
    trained
}

/// The batch with each word as a document, whose first token is not predicted. The third sequence is one document.
fn by_words(batch: Batch, seq: usize) -> Batch {
    let (mut targets, mut seen) = (batch.targets.to_vec(), vec![0; batch.inputs.len()]);
    for (at, &id) in (0u32..).zip(&*batch.inputs) {
        let (at, own) = (at as usize, at % seq as u32);
        if own > 0 && at / seq != 2 {
            seen[at] = seen[at - 1];
            if id == u32::from(b' ') {
                (targets[at - 1], seen[at]) = (Batch::IGNORED, own);
            }
        }
    }
    assert!(targets.contains(&Batch::IGNORED));
    Batch {
        targets: targets.into(),
        first_seen: Some(seen.into()),
        ..batch
    }
}

fn arrived(pieces: Vec<Piece<Late>>) -> BTreeMap<String, Vec<u8>> {
    let pieces = pieces.into_iter();
    pieces
        .map(|piece| (piece.name, piece.bytes.wait().expect("bytes")))
        .collect()
}

/// The distance of `y` from `x` in parts of `x`.
fn distance(x: &[f32], y: &[f32]) -> f64 {
    assert_eq!(x.len(), y.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut x.iter().zip(y).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    apart / norm(&mut x.iter().map(|&x| f64::from(x)))
}

/// Every gradient of a step on the GPU is that of the CPU, up to the rounding of activations to bf16 and what it does to codes.
fn check(words: &str, most: f64) {
    let Some(cuda) = gpu() else { return };
    let on_cpu = train(&Cpu, &asked(words), 1);
    let ways = [
        "",
        " --no-cudnn",
        " --no-cudnn=backward",
        " --nondeterministic-attention",
    ];
    for more in ways {
        let asked = asked(&format!("{words}{more} --device cuda"));
        let on_gpu = train(&cuda, &asked, 1);
        let apart = (on_gpu.losses[0] - on_cpu.losses[0]).abs() / on_cpu.losses[0];
        assert!(apart < 2e-3, "{words}{more}: losses {apart:.1e} apart");
        assert_eq!(on_cpu.gradients.len(), on_gpu.gradients.len());
        for (name, gradient) in &on_cpu.gradients {
            let apart = distance(gradient, &on_gpu.gradients[name]);
            assert!(apart < most, "{words}{more}: {name} is {apart:.2e} apart");
        }
    }
}

/// A checkpoint is what its step left, though the next ones run before it is written.
#[test]
fn checkpoints_are_of_their_steps() {
    let Some(cuda) = gpu() else { return };
    for recipe in ["fp8-delayed", "nvfp4-2d"] {
        let asked = asked(&format!("{SMALL} --recipe {recipe} --device cuda"));
        let [now, late] = [0, 3].map(|lag| {
            let (mut sharded, mut network) = model(&cuda, &asked);
            run(&mut sharded, &mut network, &asked, (5, lag))
        });
        assert_eq!(now.losses, late.losses);
        for (step, (now, late)) in now.saved.iter().zip(&late.saved).enumerate() {
            assert!(now == late, "{recipe}: step {step}");
        }
        assert!(now.saved[0] != now.saved[1]);
    }
}

const SMALL: &str = "--dim 256 --heads 4 --layers 2 --seq 128 --batch 4";

#[test]
fn gradients_in_bf16() {
    check(&format!("{SMALL} --recipe bf16"), 0.03);
    check(&format!("{SMALL} --recipe fp32 --accumulate 2"), 0.03);
    let heads_of_128 = SMALL.replace("--heads 4", "--heads 2");
    check(&format!("{heads_of_128} --recipe bf16 --vocab 512"), 0.03);
    let llama = format!("{SMALL} --arch llama --recipe bf16");
    check(&llama, 0.03);
    check(&format!("{llama} --kv-heads 2"), 0.03);
}

#[test]
fn gradients_of_codes() {
    for recipe in lowp_format::AnyRecipe::low_precision() {
        use lowp_format::Recipe as _;
        let narrow =
            recipe.kernel(lowp_format::Orientation::Rowwise).element == lowp_format::Code::E2M1;
        check(
            &format!("{SMALL} --recipe {}", recipe.name()),
            if narrow { 0.7 } else { 0.2 },
        );
    }
}

#[test]
fn layers_kept_in_bf16_and_forward_in_bf16() {
    check(
        &format!("{SMALL} --recipe fp8-current --keep-bf16 *.qkv"),
        0.2,
    );
    check(&format!("{SMALL} --recipe mxfp8+bf16-forward"), 0.2);
    // Layers that share an input, of which some keep it and others its codes.
    for kept in ["*.q_proj*", "*.k_proj*", "*.up_proj*"] {
        let words = format!("{SMALL} --arch llama --recipe fp8-current --keep-bf16 {kept}");
        check(&words, 0.2);
    }
}

/// What products of codes cannot read in memory order, or in one orientation alone, is decoded.
#[test]
fn codes_of_other_orders_and_orientations() {
    for recipe in [
        "mxfp8+operand-tensor-scale",
        "fp8-current+exact-gradients-dgrad+exact-activations-wgrad",
        "fp8-rowwise+hybrid",
        "fp8-block+hybrid",
    ] {
        check(&format!("{SMALL} --recipe {recipe}"), 0.3);
    }
}

#[test]
fn wide_models_and_vocabularies() {
    check(
        "--dim 1024 --heads 8 --layers 1 --seq 128 --batch 2 --vocab 2048 --recipe bf16",
        0.03,
    );
    check(&format!("{SMALL} --recipe fp8-current --accumulate 2"), 0.2);
}

/// Logits of 1,024 tokens in two parts, of a head of its own and of the embedding.
#[test]
fn logits_that_are_cut_over_tokens() {
    let large = "--dim 64 --heads 4 --layers 1 --seq 256 --batch 4 --vocab 262144 --z-loss 1e-3";
    check(&format!("{large} --recipe bf16"), 0.03);
    let folder = tempfile::tempdir().expect("a folder");
    let config = r#"{"model_type": "llama", "tie_word_embeddings": true, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 262144, "rms_norm_eps": 1e-6}"#;
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    let model = format!("--model {} --from-scratch", folder.path().display());
    check(&format!("{model} --seq 256 --batch 4 --recipe bf16"), 0.03);
}

#[test]
fn z_losses() {
    check(&format!("{SMALL} --recipe bf16 --z-loss 1e-2"), 0.03);
}

#[test]
fn steps_are_the_same_bits_again() {
    let Some(cuda) = gpu() else { return };
    let [(_folder, qwen3), (_other, window)] = [QWEN3, WINDOW].map(described);
    for words in [
        &format!("{SMALL} --recipe bf16"),
        &format!("{SMALL} --recipe fp8-delayed"),
        &format!("{SMALL} --recipe nvfp4-1d"),
        &format!("{qwen3} --recipe bf16"),
        &format!("{window} --recipe bf16"),
        &format!("{SMALL} --recipe bf16 --mask-documents"),
    ] {
        let asked = asked(&format!("{words} --device cuda"));
        let [a, b] = [(); 2].map(|()| train(&cuda, &asked, 4).losses);
        assert_eq!(a, b, "{words}");
        assert!(a[3] < a[0], "{words}: {a:?}");
    }
}

/// Gathers are timed where layers gather, and no longer hidden than they take.
#[test]
fn gathers_are_timed_on_their_stream() {
    let Some(cuda) = gpu() else { return };
    for (words, layers_gather) in [
        ("--sharding fsdp", true),
        ("--sharding fsdp --no-prefetch", true),
        ("--sharding zero1", false),
    ] {
        let asked = asked(&format!("{SMALL} --recipe mxfp8 {words} --device cuda"));
        let (mut sharded, mut network) = model(&cuda, &asked);
        for _ in 0..2 {
            Network::start_profile(&network).expect("a profile");
            run(&mut sharded, &mut network, &asked, (1, 0));
            let profile = Network::take_profile(&network).expect("a profile");
            let profile = profile.expect("a GPU measures it");
            assert_eq!(profile.gathered.is_some(), layers_gather, "{words}");
            let label = "gather of embeddings and heads";
            let waits = profile.spent.iter().find(|spent| spent.what == label);
            assert!(waits.is_some(), "{words}: {:?}", profile.spent);
            if let Some([all, hidden]) = profile.gathered {
                assert!(all > 0.0 && all < 1.0, "{words}: {all}");
                assert!((0.0..=all).contains(&hidden), "{words}: {hidden} of {all}");
            }
        }
    }
}

/// A pass gathers its embedding. A head is gathered in the first pass after a step, and its bf16 values are those of the step.
#[test]
fn heads_are_gathered_once_for_each_step() {
    let Some(cuda) = gpu() else { return };
    let (_folder, tied) = described(TIED);
    for (words, is_tied) in [
        (SMALL.to_owned(), false),
        (format!("{SMALL} --no-prefetch"), false),
        (tied.clone(), true),
        (format!("{tied} --recompute"), true),
    ] {
        let words = format!("{words} --recipe bf16 --accumulate 2 --device cuda");
        let asked = asked(&words);
        let (mut sharded, mut network) = model(&cuda, &asked);
        let config = &asked.setup.config;
        let text = Text::new(BUNDLED.to_vec(), config.model.seq).expect("the text");
        // As long as two passes.
        let batch = text.train(config.seed, 0, 0..4).expect("a batch");
        let evaluated = |sharded: &mut Sharded<Cuda>, network: &mut Transformer<Variant>| {
            sharded.begin(0, 0, false).expect("a pass");
            Network::evaluate(network, sharded, &batch, 512).expect("a pass");
            Network::take_loss(network).expect("a loss")
        };
        let gathers = |sharded: &ShardedModel<Cuda, Variant>| {
            let vars = (0..sharded.var_shapes().len()).filter_map(|at| sharded.transient_var(at));
            let accounts = vars.map(|var| var.account().expect("an account"));
            accounts.map(|account| account.gathers).collect::<Vec<_>>()
        };
        let [mut embedding, mut head] = [0, 0];
        let mut losses = Vec::new();
        for step in 0..3 {
            run(&mut sharded, &mut network, &asked, (1, 0));
            losses.push(evaluated(&mut sharded, &mut network));
            // Two passes of the step and two after it. Those of a later step have what was rounded after the one before.
            embedding += 4;
            head += if step == 0 { 2 } else { 1 };
            let expected = match is_tied {
                true => vec![embedding + head],
                false => vec![embedding, head],
            };
            assert_eq!(gathers(&sharded), expected, "{words}: step {step}");
            let mut other = cuda.network(&mut sharded, &asked);
            assert_eq!(evaluated(&mut sharded, &mut other), losses[step], "{words}");
            // The other one's gathers.
            (embedding, head) = (embedding + 2, head + 1);
        }
        assert!(
            losses[0] != losses[1] && losses[1] != losses[2],
            "{losses:?}"
        );
    }
}

/// Blocks that run forward again have what they had.
#[test]
fn recomputed_blocks_give_the_same_bits() {
    let Some(cuda) = gpu() else { return };
    let [(_folder, qwen3), (_other, tied)] = [QWEN3, TIED].map(described);
    for (model, words) in [
        (SMALL, "--recipe bf16"),
        (SMALL, "--recipe fp8-delayed"),
        (SMALL, "--recipe nvfp4-1d"),
        (SMALL, "--recipe mxfp8 --no-cudnn"),
        (
            SMALL,
            "--recipe mxfp8 --no-cudnn=backward --arch llama --kv-heads 2",
        ),
        (SMALL, "--recipe fp8-current --arch llama --kv-heads 2"),
        (&qwen3, "--recipe fp8-current"),
        (&tied, "--recipe fp8-current --accumulate 2"),
    ] {
        let words = format!("{model} {words} --device cuda");
        let [plain, again] = ["", " --recompute"].map(|more| {
            let trained = train(&cuda, &asked(&format!("{words}{more}")), 3);
            (trained.losses, trained.gradients)
        });
        assert!(plain == again, "{words}: {:?} {:?}", plain.0, again.0);
    }
}

/// The audit of a device finds what it finds on a CPU: a stale columnwise copy, and a scale that is off by a binade.
#[test]
fn planted_defects_are_found() {
    let Some(cuda) = gpu() else { return };
    for recipe in [
        "fp8-delayed",
        "fp8-current",
        "fp8-block",
        "mxfp8",
        "mxfp4",
        "nvfp4-1d",
        "nvfp4-2d",
    ] {
        let asked = asked(&format!(
            "{SMALL} --recipe {recipe} --sharding zero1 --device cuda"
        ));
        let (mut sharded, mut network) = model(&cuda, &asked);
        run(&mut sharded, &mut network, &asked, (2, 0));
        let audited = |what: &str, layer: Option<usize>| {
            let found = sharded.audit().expect("an audit");
            let layers: Vec<usize> = found.iter().map(|found| found.layer).collect();
            assert!(
                layers.iter().all(|at| Some(*at) == layer),
                "{recipe}, {what}: {found:?}"
            );
            assert_eq!(layers.is_empty(), layer.is_none(), "{recipe}, {what}");
        };
        audited("as it was trained", None);
        let weight = sharded.weight(1).expect("a layer");
        for part in [Part::Data, Part::BlockScale, Part::DecodeScale] {
            // Without shards a rank has the weight itself.
            let buffer = weight
                .with_gathered(Phase::Backward, |tensor, _| {
                    let part = tensor.part(Orientation::Columnwise, part);
                    Ok::<_, lowp_shard::ShardError>(part.map(|part| part.storage.clone()))
                })
                .expect("a weight");
            let Some(buffer) = buffer else { continue };
            let bytes = cuda.download(&buffer).expect("bytes");
            // The lowest bit of the exponent of a scale.
            let (at, bit) = match (part, recipe) {
                (Part::Data, _) => (bytes.len() / 2, 1),
                (Part::DecodeScale, _) | (_, "fp8-block") => (2, 0x80),
                (_, "mxfp8" | "mxfp4") => (bytes.len() / 2, 1),
                _ => (bytes.len() / 2, 8),
            };
            cuda.write(&buffer, at, &[bytes[at] ^ bit])
                .expect("a write");
            audited(&format!("{part:?}"), Some(1));
            cuda.write(&buffer, at, &bytes[at..=at]).expect("a write");
            audited("mended", None);
        }
    }
}

#[test]
fn sizes_that_a_gpu_cannot_take_are_errors() {
    let model = |words: &str| asked(words).setup.config.model.sizes();
    assert!(model(SMALL).check().is_ok());
    let error = model("--dim 96 --heads 4").check().unwrap_err();
    assert!(error.contains("heads of 24 values"), "{error}");
    let error = model("--vocab 257").check().unwrap_err();
    assert!(error.contains("take 272"), "{error}");
}
