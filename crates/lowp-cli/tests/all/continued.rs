//! Models of others: tokenized, continued, and exported with the codes that were trained.

use crate::support::Bench;
use anyhow::{Context, Result, anyhow};
use lowp_candle::transformer::Transformer;
use lowp_checkpoint::Checkpoint;
use lowp_comm::{LocalComm, Mesh, MeshComm, run_ranks};
use lowp_file::{Hub, Values};
use lowp_format::Phase;
use lowp_format::spelling::Variant;
use lowp_fsdp::{FirstValues, ModelError, ModelOptions, SavedModel, ShardedModel};
use lowp_kernels::Cpu;
use lowp_train::{HubValues, Model};
use lowp_transformer::GptConfig;
use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MODELS: [&str; 4] = ["llama2", "llama3", "mistral", "qwen3"];
const SEQ: usize = 16;
pub(crate) const TRAIN: &str =
    "--data ids.npy --recipe fp8-current --seq 16 --batch 4 --steps 6 --lr 1e-2 --eval-batches 2";

/// A small model of one architecture.
fn model(name: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lowp-candle/tests/models");
    models.join(name)
}

/// The folder `MODEL`, with a tokenizer of 32 words, and `ids.npy`.
pub(crate) fn begin(name: &str) -> Result<Bench> {
    let bench = Bench::new();
    let folder = bench.path("MODEL");
    std::fs::create_dir(&folder)?;
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(model(name).join(file), folder.join(file))?;
    }
    let words: Vec<String> = (0..32).map(|id| format!("\"w{id}\": {id}")).collect();
    let tokenizer = format!(
        "{{\"version\": \"1.0\", \"added_tokens\": [], \"pre_tokenizer\": {{\"type\": \"Whitespace\"}}, \
         \"model\": {{\"type\": \"WordLevel\", \"unk_token\": \"w0\", \"vocab\": {{{}}}}}}}",
        words.join(", ")
    );
    std::fs::write(folder.join("tokenizer.json"), tokenizer)?;
    std::fs::write(
        folder.join("generation_config.json"),
        "{\"do_sample\": true}",
    )?;
    let ids: Vec<u32> = (0..2000u32).map(|at| (at * at / 7 + at) % 32).collect();
    let header = format!(
        "{:<117}\n",
        format!(
            "{{'descr': '<u4', 'fortran_order': False, 'shape': ({},), }}",
            ids.len()
        )
    );
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(header.len())?.to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    std::fs::write(bench.path("ids.npy"), bytes)?;
    Ok(bench)
}

fn config(folder: &Path) -> Result<(GptConfig, Value)> {
    let json: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
    Ok((GptConfig::of_hub("config.json", &json, Some(SEQ))?, json))
}

/// Values by name.
struct Known(BTreeMap<String, Vec<f32>>);

impl FirstValues for Known {
    fn read(
        &self,
        name: &str,
        _: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
        let values = self.0.get(name).ok_or("no such values")?;
        Ok(values[elements].to_vec())
    }
}

/// The values that products read of the checkpoint in `folder`.
fn trained(folder: &Path, model: GptConfig) -> Result<Known> {
    let checkpoint = Checkpoint::latest(folder)?;
    let about = checkpoint.about();
    let recipe: Variant = about["recipe"].as_str().context("a recipe")?.parse()?;
    let comm = LocalComm::world_on(&[Cpu], Duration::from_secs(60)).pop();
    let mesh = MeshComm::new(Mesh::sharded(1), Arc::new(comm.context("a rank")?))?;
    let (linears, vars) = (model.linears(), model.vars());
    let saved = SavedModel {
        checkpoint: &checkpoint,
        weights: &about["weights"],
        scales: &about["scales"],
    };
    let options = ModelOptions::default();
    let mut sharded = ShardedModel::load(&Cpu, &mesh, |_| recipe, &linears, &vars, options, saved)?;
    let mut known = BTreeMap::new();
    for (weight, linear) in sharded.weights().zip(&linears) {
        weight.with_values(Phase::Forward, |values| {
            known.insert(linear.name.clone(), values.to_vec());
            Ok::<_, ModelError>(())
        })?;
    }
    sharded.read_vars(|index, values| {
        known.insert(vars[index].name.clone(), values);
        Ok::<_, ModelError>(())
    })?;
    for (index, var) in vars.iter().enumerate() {
        if let Some(weight) = sharded.transient_var(index) {
            weight.with_values(Phase::Forward, |values| {
                known.insert(var.name.clone(), values.to_vec());
                Ok::<_, ModelError>(())
            })?;
        }
    }
    Ok(Known(known))
}

/// The logits of a model that begins with these values, in f32.
fn logits(model: GptConfig, first: &(dyn FirstValues + Sync)) -> Result<Vec<f32>> {
    let found = run_ranks(&Cpu, 1, Duration::from_secs(60), |_, comm| {
        let mesh = MeshComm::new(Mesh::sharded(1), comm)?;
        let recipe: Variant = "fp32".parse()?;
        let (linears, vars) = (model.linears(), model.vars());
        let options = ModelOptions::default();
        let mut sharded =
            ShardedModel::with_values(&Cpu, &mesh, |_| recipe, &linears, &vars, options, first)?;
        let ids: Vec<u32> = (0..2 * SEQ as u32).map(|at| at * 5 % 32).collect();
        Ok::<_, anyhow::Error>(Transformer::new(model, &mut sharded, 1, false)?.logits(&ids)?)
    });
    let mut found = found.map_err(|error| anyhow!("{error}"))?;
    found.pop().context("a rank")
}

/// A served folder gives the logits of the codes that were trained, to the bit, and has what lay next to the weights.
#[test]
fn what_is_served_is_what_was_trained() -> Result<()> {
    for name in MODELS {
        let bench = begin(name)?;
        bench.done(&format!(
            "train --model MODEL {TRAIN} --world-size 2 --save runs"
        ));
        let (model, begun) = config(&bench.path("MODEL"))?;
        let codes = trained(&bench.path("runs/fp8-current-seed0"), model)?;
        let expected = logits(model, &codes)?;
        for target in ["compressed-tensors", "modelopt", "deepseek"] {
            let served = format!("served-{target}");
            bench.done(&format!("export runs --to {target} -o {served}"));
            let folder = bench.path(&served);
            let (again, mut json) = config(&folder)?;
            assert_eq!(again, model);
            if let Some(json) = json.as_object_mut() {
                assert!(json.remove("quantization_config").is_some() || target == "modelopt");
            }
            assert_eq!(json, begun, "{name}, {target}");
            for file in ["tokenizer.json", "generation_config.json"] {
                let [of_served, of_model] = [&folder, &bench.path("MODEL")]
                    .map(|folder| std::fs::read(folder.join(file)).expect(file));
                assert_eq!(of_served, of_model);
            }
            let hub = Hub::open(&folder)?;
            let found = logits(model, &HubValues(Values::new(&hub)?))?;
            assert_eq!(found, expected, "{name}, {target}");
        }
        // A served folder is a model to continue.
        bench.done(&format!(
            "train --model served-deepseek {TRAIN} --world-size 1"
        ));
    }
    Ok(())
}

fn losses(bench: &Bench, file: &str) -> Result<Value> {
    let json: Value = serde_json::from_slice(&std::fs::read(bench.path(file))?)?;
    let run = &json["runs"][0];
    Ok(serde_json::json!([run["train_loss"], run["val_loss"]]))
}

/// A run that stops and goes on equals one that does not; weights that are read are no random ones.
#[test]
fn a_run_goes_on_to_the_token() -> Result<()> {
    let bench = begin("llama3")?;
    let train = format!("train --model MODEL {TRAIN} --world-size 2 --schedule wsd");
    bench.done(&format!("{train} --json whole.json"));
    bench.done(&format!("{train} --save runs --stop-after 3"));
    bench.done(&format!(
        "{train} --save runs --resume runs --json resumed.json"
    ));
    assert_eq!(
        losses(&bench, "whole.json")?,
        losses(&bench, "resumed.json")?
    );
    bench.done(&format!("{train} --from-scratch --json random.json"));
    assert_ne!(
        losses(&bench, "whole.json")?,
        losses(&bench, "random.json")?
    );
    Ok(())
}

/// The positions of a model are a limit only where they were trained, and are not scaled from there.
#[test]
fn sequences_may_be_longer_where_positions_are_scaled() -> Result<()> {
    let bench = begin("llama2")?;
    let train = "--data ids.npy --recipe fp8-current --batch 2 --steps 1 --eval-batches 1 --world-size 1 --seq 65";
    bench.done(&format!("train --model MODEL {train} --from-scratch"));
    let config = bench.path("MODEL/config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    json["rope_scaling"] = serde_json::json!({"rope_type": "linear", "factor": 2.0});
    std::fs::write(&config, json.to_string())?;
    bench.done(&format!("train --model MODEL {train}"));
    Ok(())
}

/// Keys of a file are options, and an option that is given goes first.
#[test]
fn options_come_from_a_file() -> Result<()> {
    let bench = begin("qwen3")?;
    let mut text = String::new();
    let words: Vec<&str> = TRAIN.split_whitespace().collect();
    for pair in words.chunks_exact(2) {
        let key = pair[0].trim_start_matches("--").replace('-', "_");
        let value = match pair[1].parse::<f64>() {
            Ok(_) => pair[1].to_owned(),
            Err(_) => format!("'{}'", pair[1]),
        };
        writeln!(text, "{key} = {value}")?;
    }
    text += "model = 'MODEL'\nworld_size = 2\nrecompute = true\nno_decay = ['*embed*']\n";
    std::fs::write(bench.path("run.toml"), text)?;
    bench.done("train --config run.toml --steps 3 --json of_file.json");
    bench.done(&format!(
        "train --model MODEL {} --world-size 2 --recompute --no-decay *embed* --json given.json",
        TRAIN.replace("--steps 6", "--steps 3")
    ));
    assert_eq!(
        losses(&bench, "of_file.json")?,
        losses(&bench, "given.json")?
    );
    Ok(())
}

#[test]
fn what_cannot_be_continued_is_named() -> Result<()> {
    let bench = begin("llama2")?;
    for (args, why) in [
        ("--model MODEL --recipe fp8-current", "add --data"),
        (
            "--model MODEL --recipe fp8-current --data MODEL/config.json",
            "holds no tokens",
        ),
        (
            "--model MODEL --recipe fp8-current --data ids.npy --no-decay x",
            "--no-decay",
        ),
        (
            "--model MODEL --recipe fp8-current --data ids.npy --from-scratch --seq 4000",
            "too few for --seq 4000",
        ),
        (
            "--model MODEL --recipe fp8-current --data ids.npy --seq 65",
            "--seq 65 is more than max_position_embeddings of --model MODEL, which is 64",
        ),
        (
            "--model MODEL --recipe fp8-current --data ids.npy --decay-steps 3",
            "--schedule wsd",
        ),
        (
            "--model MODEL --data ids.npy --recipe mxfp8 --seq 16",
            "--keep-bf16",
        ),
        (
            "--mask-documents --data MODEL/config.json",
            "--mask-documents",
        ),
        (
            "--mask-documents",
            "--mask-documents only applies to tokens",
        ),
        (
            "--held-out 0.1 --steps 1 --no-baseline",
            "--held-out only applies to tokens",
        ),
        (
            "--held-out 0.2 --steps 1 --no-baseline --data MODEL/config.json",
            "--held-out only applies to tokens",
        ),
        (
            "--model MODEL --recipe fp8-current --data ids.npy --mask-documents",
            "so they cannot be masked; use `lowp tokenize`, or leave --mask-documents out",
        ),
        ("--config none.toml", "none.toml"),
    ] {
        let message = bench.rejected(2, &format!("train {args}"));
        assert!(message.contains(why), "{args}: {message}");
    }
    Ok(())
}

/// Each file that shows losses says whether they are per token or per byte.
#[test]
fn reports_name_the_unit_of_losses() -> Result<()> {
    let bench = begin("llama2")?;
    let train = |of: &str| {
        let files = format!("--json {of}.json --report {of}.html");
        let train = TRAIN.replace(
            "--data ids.npy",
            if of == "byte" { "" } else { "--data ids.npy" },
        );
        let sizes = "--dim 32 --layers 1 --heads 2 --world-size 1 --no-baseline";
        bench.done(&format!("train {train} {sizes} {files}"));
        bench.done(&format!(
            "losses {of}.json --baseline fp8-current --svg {of}.svg"
        ));
    };
    for (of, other) in [("token", "byte"), ("byte", "token")] {
        train(of);
        let [page, picture] = ["html", "svg"].map(|ending| bench.path(&format!("{of}.{ending}")));
        let (page, picture) = (
            std::fs::read_to_string(page)?,
            std::fs::read_to_string(picture)?,
        );
        assert!(page.contains(&format!("sequences of 16 {of}s")), "{page}");
        for file in [page, picture] {
            assert!(file.contains(&format!("nats per {of}<")), "{file}");
            assert!(!file.contains(&format!("per {other}")), "{file}");
        }
    }
    let message = bench.rejected(2, "losses byte.json token.json --baseline fp8-current");
    assert!(
        message.contains("token.json has unit \"token\", and byte.json has \"byte\""),
        "{message}"
    );
    Ok(())
}

#[cfg(not(feature = "tokenize"))]
#[test]
fn a_program_without_tokenizers_says_so() -> Result<()> {
    let message = begin("llama2")?.rejected(2, "tokenize a.jsonl --tokenizer MODEL -o data");
    assert!(message.contains("--features tokenize"), "{message}");
    Ok(())
}

/// A token of the tokenizer that the model does not have is an error only where texts have it.
#[cfg(feature = "tokenize")]
#[test]
fn tokens_beyond_the_vocabulary_are_errors_where_they_are_used() -> Result<()> {
    let bench = begin("llama3")?;
    let path = bench.path("MODEL/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    json["added_tokens"] = serde_json::json!([{
        "id": 32, "content": "<added>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
    }]);
    std::fs::write(&path, json.to_string())?;
    for (words, data) in [("w1 w2 w3 ", "without"), ("w1 <added> w3 ", "with")] {
        std::fs::write(bench.path("text.txt"), words.repeat(60))?;
        bench.done(&format!("tokenize text.txt --tokenizer MODEL -o {data}"));
    }
    let train = TRAIN
        .replace("ids.npy", "without")
        .replace("--steps 6", "--steps 1");
    bench.done(&format!("train --model MODEL {train} --world-size 1"));
    let message = bench.rejected(
        2,
        &format!("train --model MODEL {}", train.replace("without", "with")),
    );
    let why = "has the id 32, and the vocabulary of the model has 32";
    assert!(message.contains(why), "{message}");
    Ok(())
}

/// From a text to a folder that is served.
#[cfg(feature = "tokenize")]
#[test]
fn texts_become_tokens() -> Result<()> {
    let bench = begin("mistral")?;
    let line = |at: u32| {
        let words: Vec<String> = (0..20 + at % 7)
            .map(|n| format!("w{}", (at + n * n) % 32))
            .collect();
        format!(
            "{{\"prompt\": \"{}\", \"completion\": \" w5 w6\", \"text\": \"w1 w2 w3\"}}\n",
            words.join(" ")
        )
    };
    std::fs::write(
        bench.path("texts.jsonl"),
        (0..60).map(line).collect::<String>(),
    )?;
    bench.done("tokenize texts.jsonl --tokenizer MODEL --completions -o data");
    bench.done("train --model MODEL --data data --recipe fp8-rowwise --seq 16 --batch 4 --steps 3 --world-size 2 --save runs");
    bench.done("export runs --to compressed-tensors -o SERVED");
    let message = bench.rejected(2, "tokenize texts.jsonl --tokenizer MODEL --end w4 -o data");
    assert!(message.contains("it has tokens already"), "{message}");
    Ok(())
}
