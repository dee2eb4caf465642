//! Models of each architecture, read from small Hugging Face folders, give the logits that transformers gives.

use anyhow::{Context, Result};
use lowp_candle::transformer::Transformer;
use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_file::{Hub, Values};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ModelOptions, ShardedModel};
use lowp_kernels::Cpu;
use lowp_train::{HubValues, Model};
use lowp_transformer::GptConfig;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// The largest difference, relative to the largest logit.
const MOST: f32 = 1e-5;

fn json(path: &Path) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

fn check(name: &str, ranks: usize) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/models")
        .join(name);
    let reference = json(&folder.join("reference.json"))?;
    let ids: Vec<u32> = serde_json::from_value(reference["ids"].clone())?;
    let rows: Vec<Vec<f32>> = serde_json::from_value(reference["logits"].clone())?;
    let seq = serde_json::from_value(reference["seq"].clone())?;
    let config = GptConfig::of_hub(name, &json(&folder.join("config.json"))?, Some(seq))?;
    config.check()?;
    let found = run_ranks(&Cpu, ranks, Duration::from_secs(60), |_, comm| {
        let hub = Hub::open(&folder)?;
        let first = HubValues(Values::new(&hub)?);
        let mesh = MeshComm::new(Mesh::sharded(ranks), comm)?;
        let (linears, vars) = (config.linears(), config.vars());
        let recipe: Variant = "fp32".parse()?;
        let options = ModelOptions::default();
        let mut sharded =
            ShardedModel::with_values(&Cpu, &mesh, |_| recipe, &linears, &vars, options, &first)?;
        Ok::<_, anyhow::Error>(Transformer::new(config, &mut sharded, 1, false)?.logits(&ids)?)
    });
    let mut found = found.map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
    let found = found.pop().context("a rank")?;
    let expected = rows.concat();
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(&expected);
    let difference = pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(
        difference <= MOST * largest,
        "{name}: {difference} of {largest}"
    );
    Ok(())
}

#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    for name in ["llama2", "llama3", "mistral", "qwen3"] {
        check(name, 1)?;
        check(name, 2)?;
    }
    Ok(())
}
