"""Writes small models of each architecture with the logits that transformers computes for them in f32.

    python make.py        (transformers 5.23, torch 2.15; other versions draw other weights)

Each folder has config.json and model.safetensors, and `reference.json` with `ids` and `logits`, both row by row, and with the largest
difference of the logits that transformers computes in bf16, relative to the largest logit: `bf16`. A GPU takes all of these sizes.
"""

import json
import pathlib

import torch
import transformers

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
# Of the eight frequencies one stays, one is scaled in part, and six are scaled.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
MODELS = {
    "llama2": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}, rms_norm_eps=1e-5),
    "llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"rope_theta": 500000.0}, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=7, rms_norm_eps=1e-5),
    "qwen3": transformers.Qwen3Config(**SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True),
}

for name, config in MODELS.items():
    torch.manual_seed(len(name))
    config.initializer_range = 0.2
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = pathlib.Path(__file__).parent / name
    model.save_pretrained(folder)
    for other in folder.iterdir():
        if other.name not in ("config.json", "model.safetensors"):
            other.unlink()
    ids = torch.randint(0, config.vocab_size, (2, 64))
    with torch.no_grad():
        logits = model(ids).logits
        # Read again, since `bfloat16()` also rounds the frequencies of positions.
        bf16 = type(model).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
        rounded = bf16(ids).logits.float()
    rows = [[float(f"{value:.7g}") for value in row] for row in logits.flatten(0, 1).tolist()]
    error = ((rounded - logits).abs().max() / logits.abs().max()).item()
    reference = {"seq": ids.shape[1], "bf16": float(f"{error:.3g}"), "ids": ids.flatten().tolist(), "logits": rows}
    (folder / "reference.json").write_text(json.dumps(reference, separators=(",", ":")) + "\n")
