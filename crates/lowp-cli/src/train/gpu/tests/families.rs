//! Models that a config.json describes, and what is special in some of them: norms of queries and keys, windows, documents.

use super::{SMALL, asked, check, distance, gpu, train};

const LLAMA3: &str = r#""model_type": "llama", "head_dim": 32, "tie_word_embeddings": true, "rope_theta": 500000.0, "rope_scaling":
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#;
const MISTRAL: &str = r#""model_type": "mistral", "head_dim": 32, "sliding_window": 128"#;
pub(super) const QWEN3: &str =
    r#""model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": true"#;

pub(super) const TIED: &str = r#""model_type": "llama", "tie_word_embeddings": true"#;

pub(super) const WINDOW: &str = r#""model_type": "mistral", "head_dim": 128, "sliding_window": 50"#;

/// The options of a small model that a config.json in a new folder describes, with what `family` says.
pub(super) fn described(family: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let config = format!(
        r#"{{"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, {family}}}"#
    );
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    let path = folder.path().display();
    let model = format!("--model {path} --from-scratch --seq 128 --batch 4");
    (folder, model)
}

/// Heads of a width of their own, scaled rotary positions, a tied head, and a window that is longer than sequences.
#[test]
fn models_of_config_files() {
    for family in [LLAMA3, MISTRAL] {
        let (_folder, model) = described(family);
        check(&format!("{model} --recipe bf16"), 0.03);
        check(&format!("{model} --recipe fp8-current --recompute"), 0.2);
    }
}

/// Windows that end within the tiles of a kernel and at their edges.
#[test]
fn windows_that_are_shorter_than_sequences() {
    for window in [127, 64, 37, 2] {
        let family =
            format!(r#""model_type": "mistral", "head_dim": 64, "sliding_window": {window}"#);
        let (_folder, model) = described(&family);
        check(&format!("{model} --recipe bf16"), 0.03);
    }
    let (_folder, model) = described(WINDOW);
    check(&format!("{model} --recipe fp8-current --recompute"), 0.2);
}

/// Alone, with windows, and where blocks run forward again.
#[test]
fn documents_that_are_apart() {
    check(&format!("{SMALL} --recipe bf16 --mask-documents"), 0.03);
    let llama = format!("{SMALL} --arch llama --kv-heads 2 --mask-documents");
    check(&format!("{llama} --recipe fp8-current --recompute"), 0.2);
    let (_folder, window) = described(WINDOW);
    check(
        &format!("{window} --recipe bf16 --mask-documents --accumulate 2"),
        0.03,
    );
}

/// Also of heads whose sixteenths are no power of two.
#[test]
fn norms_of_queries_and_keys() {
    for head_dim in [64, 128, 48] {
        let family = format!(r#""model_type": "qwen3", "head_dim": {head_dim}"#);
        let (_folder, model) = described(&family);
        check(&format!("{model} --recipe bf16"), 0.03);
    }
    let (_folder, model) = described(QWEN3);
    check(&format!("{model} --recipe fp8-current --recompute"), 0.2);
    check(&format!("{model} --recipe bf16 --accumulate 2"), 0.03);
}

/// Attention by cuDNN of some heads at a time, and of one sequence, beside products over all.
#[test]
fn attention_in_slices() {
    let Some(cuda) = gpu() else { return };
    for long in ["--seq 8192 --batch 1", "--seq 4096 --batch 3"] {
        let [sliced, whole] = ["", " --no-cudnn"].map(|more| {
            let sizes = "--arch llama --dim 768 --heads 48 --kv-heads 6 --layers 1 --recipe bf16";
            let words = format!("{sizes} {long} --device cuda{more}");
            train(&cuda, &asked(&words), 1)
        });
        let apart = (sliced.losses[0] - whole.losses[0]).abs() / whole.losses[0];
        assert!(apart < 2e-3, "{long}: losses {apart:.1e} apart");
        for (name, gradient) in &whole.gradients {
            let apart = distance(gradient, &sliced.gradients[name]);
            assert!(apart < 0.03, "{long}: {name} is {apart:.2e} apart");
        }
    }
}
