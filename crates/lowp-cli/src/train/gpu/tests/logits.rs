//! Models of each architecture, read from small Hugging Face folders, give the logits that transformers gives.

use super::{Alone, gpu};
use lowp_comm::{Mesh, MeshComm};
use lowp_file::{Hub, Values};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ModelOptions, ShardedModel};
use lowp_kernels::Cuda;
use lowp_train::{HubValues, Model, Network};
use lowp_transformer::{CudnnPasses, GptConfig, MicroBatch, Transformer};
use serde_json::Value;

/// Its name, config.json, model.safetensors and reference.json.
type Folder = (&'static str, [&'static [u8]; 3]);

/// A part of the program, which runs where the tree is not.
macro_rules! folder {
    ($name:literal, $($file:literal),*) => {
        ($name, [$(include_bytes!(concat!("../../../../../lowp-candle/tests/models/", $name, $file)).as_slice()),*])
    };
    ($name:literal) => {
        folder!($name, "/config.json", "/model.safetensors", "/reference.json")
    };
}

const FOLDERS: [Folder; 4] = [
    folder!("llama2"),
    folder!("llama3"),
    folder!("mistral"),
    folder!("qwen3"),
];

/// The largest difference, in that of transformers in bf16.
const MOST: f32 = 2.0;

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).expect("JSON")
}

/// The largest difference of the logits, relative to the largest logit, and what transformers has of it in bf16.
fn difference(
    cuda: &Cuda,
    (name, [config, weights, reference]): Folder,
    cudnn: CudnnPasses,
) -> [f32; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, bytes) in [("config.json", config), ("model.safetensors", weights)] {
        std::fs::write(folder.path().join(file), bytes).expect(file);
    }
    let mut reference = json(reference);
    let [seq, bf16, ids, logits] =
        ["seq", "bf16", "ids", "logits"].map(|key| reference[key].take());
    let seq = serde_json::from_value(seq).expect("a length");
    let bf16 = serde_json::from_value(bf16).expect("a number");
    let ids: Vec<u32> = serde_json::from_value(ids).expect("tokens");
    let expected: Vec<Vec<f32>> = serde_json::from_value(logits).expect("logits");
    let expected = expected.concat();

    let config = GptConfig::of_hub(name, &json(config), Some(seq)).expect("a model");
    let hub = Hub::open(folder.path()).expect("a model");
    let first = HubValues(Values::new(&hub).expect("weights"));
    let mesh = MeshComm::new(Mesh::sharded(1), cuda.alone()).expect("a mesh");
    let recipe: Variant = "bf16".parse().expect("a recipe");
    let options = ModelOptions {
        vars: <Transformer<Variant> as Network<Cuda>>::VARS,
        ..ModelOptions::default()
    };
    let (linears, vars) = (config.linears(), config.vars());
    let sharded =
        ShardedModel::with_values(cuda, &mesh, |_| recipe, &linears, &vars, options, &first);
    let sharded = sharded.expect("a model");
    let part = MicroBatch {
        sequences: ids.len() / seq,
        first_token: 0,
        cudnn,
        agree_amaxes: false,
        prefetch: true,
        recompute: false,
        documents: false,
    };
    let transformer = Transformer::new(cuda, &sharded, &config.sizes(), part);
    let mut transformer = transformer.expect("a network");
    let found = transformer.logits(&ids).expect("logits");
    assert_eq!(found.len(), expected.len(), "{name}");
    let pairs = found.iter().zip(&expected);
    let difference = pairs.map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp);
    let largest = expected.iter().map(|x| x.abs()).max_by(f32::total_cmp);
    [difference.expect("logits") / largest.expect("logits"), bf16]
}

#[test]
fn logits_are_those_of_transformers() {
    let Some(cuda) = gpu() else { return };
    for folder in FOLDERS {
        for cudnn in [CudnnPasses::Both, CudnnPasses::None] {
            let [found, bf16] = difference(&cuda, folder, cudnn);
            let what = format!(
                "{}, cudnn {cudnn:?}: {found:.4}; transformers in bf16 {bf16:.4}",
                folder.0
            );
            println!("{what}");
            assert!(found <= MOST * bf16, "{what}");
        }
    }
}
