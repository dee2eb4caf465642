"""Model files as other programs write them: with the safetensors package, whole or sharded with an index."""

import json

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def matrix(rng, shape, dtype):
    """Weights with rows of very different size, so that scales differ."""
    rows = np.exp2(rng.integers(-12, 6, size=shape[:-1] + (1,)))
    return (rng.standard_normal(shape) * rows).astype(dtype)


def edges(dtype):
    """Zeros of both signs, a block of zeros, subnormals, ties, the largest values, infinity and NaN."""
    values = np.zeros((48, 64), np.float32)
    values[0, :16] = [3, -1.5, 0.1, 0.26, 0.75, -0.25, 2, 2.49, -2.5, 1, 0, -0.0, 1.25, 1.75, -3, 0.6]
    values[0, 16:32] = -0.0
    values[5] = np.float32(1e-40)
    values[17, ::3] = np.float32(3e38)
    values[18, 1::2] = 448
    values[33] = np.linspace(-6, 6, 64, dtype=np.float32)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def not_finite(dtype):
    values = edges(dtype)
    values[2, 3] = np.inf
    values[20, 40] = -np.inf
    values[33, 7] = np.nan
    values[34, :32] = np.nan
    return values


def weights():
    """A small language model: matrices of every source dtype, a stack of experts, vectors, a scalar."""
    rng = np.random.default_rng(1)
    bf16 = ml_dtypes.bfloat16
    tensors = {
        "model.embed_tokens.weight": matrix(rng, (97, 64), bf16),
        "model.norm.weight": rng.standard_normal(64).astype(bf16),
        "rotary.inv_freq": (1 / 10000 ** (np.arange(16) / 16)).astype(np.float32),
        "position_ids": np.arange(33, dtype=np.int64),
        "temperature": np.array(0.7, np.float32),
        "edges.f32": edges(np.float32),
        "edges.bf16": edges(bf16),
        "not_finite.f32": not_finite(np.float32),
        "not_finite.f16": not_finite(np.float16),
        "nothing": np.zeros((0, 64), bf16),
        "zeros": np.zeros((33, 32), np.float16),
    }
    for layer, dtype in enumerate([bf16, np.float16, np.float32]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(rng, (160, 64), dtype),
            f"{prefix}.mlp.experts.down_proj": matrix(rng, (3, 7, 96), dtype),
            f"{prefix}.input_layernorm.weight": rng.standard_normal(64).astype(dtype),
        }
    return tensors


def as_matrix(tensor):
    """Leading dimensions are rows."""
    return tensor.reshape(int(np.prod(tensor.shape[:-1])), tensor.shape[-1])


def write(path, tensors):
    save_file(tensors, path, metadata={"format": "pt"})


def write_sharded(folder, tensors, files):
    """Several files and the index that names them, as model hubs keep large models."""
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[number::files])
        write(folder / name, part)
        places |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2))
    return path


def read(path):
    """Tensors and metadata of a file."""
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
