"""What transformers, compressed-tensors and torch make of exported models is what `lowp dequantize` says."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

LOWP = os.environ["LOWP"]
TARGETS = {
    "compressed-tensors": ["nvfp4-1d", "nvfp4-2d", "mxfp4", "mxfp8", "mxfp8-2d", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block"],
    "modelopt": ["nvfp4-1d", "nvfp4-2d", "mxfp8", "mxfp8-2d", "fp8-current", "fp8-rowwise", "fp8-block"],
    "deepseek": ["fp8-block", "fp8-current"],
}
# Recipes that compressed-tensors decodes in another order: scale / global_scale, rounded to bf16, in the place of
# (scale * amax) / 2688 in f32. Everything else is one product of a code and a scale, in f32 or exact.
OTHER_ORDER = ("nvfp4-1d", "nvfp4-2d")
IGNORED = ["--ignore", "*embed*", "--ignore", "lm_head*"]


def folder_of(test):
    folder = tempfile.TemporaryDirectory()
    test.addClassCleanup(folder.cleanup) if isinstance(test, type) else test.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name)


def lowp(*args, code=0):
    done = subprocess.run([LOWP, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{args}: {done.stderr}"
    return done.stderr


def model(folder):
    """A Llama of two layers with rows of very different size, as transformers saves it."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    llama = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in llama.named_parameters():
            if name.endswith("proj.weight"):
                weight.mul_(torch.exp2(torch.randint(-8, 8, (weight.shape[0], 1)).to(torch.bfloat16)))
    llama.save_pretrained(folder)
    return folder


def tensors(folder):
    """All tensors of a folder, and the metadata of its files."""
    found, metadata = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata |= file.metadata() or {}
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found, metadata


def ulps(found, expected):
    """How many bf16 lie between two tensors at most, after rounding."""
    order = [tensor.to(torch.bfloat16).view(torch.int16).int() for tensor in (found, expected)]
    order = [torch.where(bits < 0, -32768 - bits, bits) for bits in order]
    return (order[0] - order[1]).abs().max().item()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpacked(codes):
    """The values of E2M1, two in a byte, the first in the low nibble."""
    return E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


def modelopt_values(found, name, algo):
    """What ModelOpt's names mean, written out in f32."""
    codes, scale = found[f"{name}.weight"], found[f"{name}.weight_scale"]
    if algo == "W4A16_NVFP4":
        assert codes.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn
        scale = scale.float() * found[f"{name}.weight_scale_2"]
        return unpacked(codes) * scale.repeat_interleave(16, 1)
    codes = codes.float()
    if algo == "MXFP8":
        assert scale.dtype == torch.uint8
        return codes * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return codes * scale[:, None]
    assert algo == "FP8_PB_WO" and scale.dim() == 4
    grid = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * grid[: codes.shape[0], : codes.shape[1]]


class Interchange(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        cls.root = folder_of(cls)
        cls.source = model(cls.root / "source")

    def quantized(self, recipe, *options):
        """A folder with the model in a recipe, and the values of its weights."""
        folder = self.root / f"q-{recipe}"
        if not folder.exists():
            folder.mkdir()
            weights = folder / "model.safetensors"
            lowp("quantize", self.source / "model.safetensors", "-o", weights, "--recipe", recipe, *IGNORED, *options)
            shutil.copy(self.source / "config.json", folder)
            lowp("dequantize", weights, "-o", self.values_of(folder))
        return folder, load_file(self.values_of(folder))

    def values_of(self, folder):
        """The file beside a folder that has its values."""
        return folder.with_name(f"{folder.name}-values.safetensors")

    def exported(self, recipe, target):
        quantized, values = self.quantized(recipe)
        folder = folder_of(self) / "hub"
        lowp("export", quantized, "-o", folder, "--to", target, "--max-shard-size", "200KB")
        self.assertGreater(len(list(folder.glob("*.safetensors"))), 1)
        return folder, values

    def assert_model(self, folder, values, recipe, **config):
        """transformers loads the folder, every weight of it, with these values."""
        loaded, said = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **config)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(said[problem], f"{recipe}: {problem}")
        found = loaded.state_dict()
        for name, expected in values.items():
            if recipe in OTHER_ORDER and name.endswith("proj.weight"):
                self.assertLessEqual(ulps(found[name], expected), 1, f"{recipe}: {name}")
            else:
                self.assertTrue(torch.equal(found[name], expected.float()), f"{recipe}: {name}")

    def test_transformers_loads_compressed_tensors(self):
        for recipe in TARGETS["compressed-tensors"]:
            folder, values = self.exported(recipe, "compressed-tensors")
            config = AutoConfig.from_pretrained(folder).quantization_config
            self.assertEqual(config["quant_method"], "compressed-tensors")
            dequantize = transformers.CompressedTensorsConfig(dequantize=True)
            self.assert_model(folder, values, recipe, quantization_config=dequantize)

    def test_transformers_loads_deepseek(self):
        for recipe in TARGETS["deepseek"]:
            folder, values = self.exported(recipe, "deepseek")
            dequantize = transformers.FineGrainedFP8Config(dequantize=True)
            self.assert_model(folder, values, recipe, quantization_config=dequantize)

    def test_transformers_loads_decoded_models(self):
        for target in ("fp32", "bf16"):
            folder, values = self.exported("nvfp4-2d", target)
            dtype = torch.float32 if target == "fp32" else torch.bfloat16
            values = {name: value.to(dtype).float() for name, value in values.items()}
            self.assert_model(folder, values, "decoded")

    def test_every_tensor_of_compressed_tensors(self):
        """The compressors themselves, group by group of the configuration."""
        for recipe in TARGETS["compressed-tensors"]:
            folder, values = self.exported(recipe, "compressed-tensors")
            found, _ = tensors(folder)
            said = json.loads((folder / "config.json").read_text())["quantization_config"]
            config = QuantizationConfig.model_validate(said)
            self.assertEqual(config.quantization_status.value, "compressed")
            (scheme,) = config.config_groups.values()
            self.assertEqual(scheme.targets, ["Linear"])
            self.assertEqual(sorted(config.ignore), ["lm_head", "model.embed_tokens"])
            compressor = BaseCompressor.get_value_from_registry(config.format)
            names = compressor.compression_param_names(scheme)
            modules = [name.removesuffix(".weight") for name in values if name.endswith("proj.weight")]
            for module in modules:
                state = {name: found.pop(f"{module}.{name}") for name in names}
                value = compressor.decompress(state, scheme)["weight"].float()
                expected = values[f"{module}.weight"]
                if recipe in OTHER_ORDER:
                    self.assertLessEqual(ulps(value, expected), 1, f"{recipe}: {module}")
                else:
                    self.assertTrue(torch.equal(value, expected), f"{recipe}: {module}")
            self.assertEqual(sorted(found), sorted(set(values) - {f"{module}.weight" for module in modules}))

    def test_modelopt(self):
        for recipe in TARGETS["modelopt"]:
            folder, values = self.exported(recipe, "modelopt")
            found, _ = tensors(folder)
            said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
            inline = json.loads((folder / "config.json").read_text())["quantization_config"]
            self.assertEqual((inline["quant_method"], inline["quant_algo"]), ("modelopt", said["quant_algo"]))
            self.assertEqual(sorted(said["exclude_modules"]), ["lm_head", "model.embed_tokens"])
            for name in (name.removesuffix(".weight") for name in values if name.endswith("proj.weight")):
                value, expected = modelopt_values(found, name, said["quant_algo"]), values[f"{name}.weight"]
                if recipe in OTHER_ORDER:
                    # f32 throughout: scale * (amax / 2688) in the place of (scale * amax) / 2688.
                    self.assertLessEqual(ulps(value, expected), 1, f"{recipe}: {name}")
                    self.assertTrue(torch.allclose(value, expected, rtol=3e-7, atol=0), f"{recipe}: {name}")
                else:
                    self.assertTrue(torch.equal(value, expected), f"{recipe}: {name}")

    def test_models_of_several_formats(self):
        """Weights of two recipes in one model: each layer is a target of its own group."""
        parts = [self.quantized("mxfp8")[0], self.quantized("nvfp4-1d")[0]]
        held, values = {}, {}
        metadata = {}
        for layer, part in enumerate(parts):
            found, said = tensors(part)
            decoded = load_file(self.values_of(part))
            mine = lambda name: f"layers.{1 - layer}." not in name  # noqa: E731
            held |= {name: tensor for name, tensor in found.items() if mine(name)}
            metadata |= {key: value for key, value in said.items() if mine(key)}
            values |= {name: value for name, value in decoded.items() if mine(name)}
        folder = folder_of(self)
        mixed, hub = folder / "mixed", folder / "hub"
        mixed.mkdir()
        save_file(held, mixed / "model.safetensors", metadata=metadata)
        shutil.copy(self.source / "config.json", mixed)
        lowp("export", mixed, "-o", hub, "--to", "compressed-tensors")
        said = json.loads((hub / "config.json").read_text())["quantization_config"]
        self.assertEqual(said["format"], "mixed-precision")
        self.assertEqual(len(said["config_groups"]), 2)
        # transformers 5.23 decodes all layers with one group while it loads; kept compressed, each layer has its own.
        loaded, problems = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.bfloat16, output_loading_info=True)
        self.assertFalse(problems["missing_keys"] or problems["unexpected_keys"] or problems["mismatched_keys"])
        state = loaded.state_dict()
        for group in QuantizationConfig.model_validate(said).config_groups.values():
            compressor = BaseCompressor.get_value_from_registry(group.format)
            for module in group.targets:
                self.assertEqual(loaded.get_submodule(module).quantization_scheme.format, group.format)
                names = compressor.compression_param_names(group)
                parts = {name: state[f"{module}.{name}"] for name in names}
                value = compressor.decompress(parts, group)["weight"]
                self.assertLessEqual(ulps(value, values[f"{module}.weight"].float()), 1, module)
        lowp("export", mixed, "-o", folder / "opt", "--to", "modelopt")
        said = json.loads((folder / "opt/hf_quant_config.json").read_text())["quantization"]
        self.assertEqual(said["quant_algo"], "MIXED_PRECISION")
        self.assertEqual(said["quantized_layers"]["model.layers.1.mlp.up_proj"], {"quant_algo": "W4A16_NVFP4", "group_size": 16})

    def test_trained_models(self):
        """A Llama that lowp trained: transformers loads its masters, and its codes with their values."""
        folder = folder_of(self)
        sizes = "--arch llama --kv-heads 1 --dim 128 --layers 1 --heads 2 --seq 32 --batch 2 --steps 2 --eval-batches 1"
        lowp("train", *sizes.split(), "--compare", "mxfp8-2d", "--save", folder / "runs")
        run = folder / "runs/mxfp8-2d-seed0"
        lowp("export", run, "-o", folder / "fp32", "--to", "fp32")
        masters, _ = tensors(folder / "fp32")
        self.assert_model(folder / "fp32", masters, "masters")
        lowp("export", run, "-o", folder / "hub", "--to", "compressed-tensors")
        lowp("import", folder / "hub", "-o", folder / "values.safetensors", "--to", "fp32")
        values = load_file(folder / "values.safetensors")
        dequantize = transformers.CompressedTensorsConfig(dequantize=True)
        self.assert_model(folder / "hub", values, "trained", quantization_config=dequantize)
        # Codes of masters that were trained, not of others: within half a step of E4M3.
        up = "model.layers.0.mlp.up_proj.weight"
        self.assertLess(((values[up] - masters[up]).abs().max() / masters[up].abs().max()).item(), 1 / 16)

    def test_trained_models_have_their_loss(self):
        """The masters in transformers give the loss that training measured: of f32 and bf16 weights."""
        folder = folder_of(self)
        sizes = "--arch llama --kv-heads 2 --dim 64 --layers 2 --heads 4 --seq 32 --batch 4 --steps 20 --eval-batches 2"
        words = ["alpha", "beta", "gamma", "delta", "loss", "rank", "scale", "code"]
        text = " ".join(words[i * i * 7 // 5 % len(words)] for i in range(3000)).encode()
        (folder / "text").write_bytes(text)
        # What `--eval-batches` takes: sequences spread evenly over the last tenth.
        length, total = 32, 8
        split = len(text) - len(text) // 10
        last = len(text) - split - length - 1
        starts = [split + last * i // total for i in range(total)]
        read = lambda shift: torch.tensor([list(text[s + shift : s + shift + length]) for s in starts])
        for recipe in ["fp32", "bf16"]:
            train = ["train", *sizes.split(), "--no-baseline", "--recipe", recipe, "--data", folder / "text"]
            lowp(*train, "--save", folder / "runs", "--json", folder / "run.json")
            lowp("export", folder / "runs" / f"{recipe}-seed0", "-o", folder / recipe, "--to", "fp32")
            llama = AutoModelForCausalLM.from_pretrained(folder / recipe, dtype=torch.float32)
            with torch.no_grad():
                logits = llama(read(0)).logits
            found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), read(1).flatten()).item()
            expected = json.loads((folder / "run.json").read_text())["runs"][0]["val_loss"]
            self.assertLess(abs(found / expected - 1), 1e-3, recipe)

    def test_what_compressed_tensors_writes_is_read(self):
        """A model that compressed-tensors quantized, imported and decoded."""
        weight = load_file(self.source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
        amax = weight.abs().max()
        blocks = weight.reshape(weight.shape[0], -1, 16).abs().amax(-1)
        cases = {
            "nvfp4-pack-quantized": {"scale": (blocks / 6 * (2688 / amax)).to(torch.float8_e4m3fn), "global": 2688 / amax},
            "float-quantized": {"scale": (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)},
        }
        settings = {
            "nvfp4-pack-quantized": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            "float-quantized": {"num_bits": 8, "strategy": "channel"},
        }
        for name, scales in cases.items():
            groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", **settings[name]}}}
            scheme = QuantizationConfig(config_groups=groups).config_groups["group_0"]
            state = {"weight": weight, "weight_scale": scales["scale"].float()}
            if "global" in scales:
                state["weight_global_scale"] = scales["global"].reshape(1)
            compressor = BaseCompressor.get_value_from_registry(name)
            state = compressor.compress(state, scheme)
            if name == "float-quantized":
                state["weight_scale"] = scales["scale"]
            folder = folder_of(self)
            stored = {f"up.{key}": value.contiguous() for key, value in state.items()}
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
            lowp("import", folder, "-o", folder / "back.safetensors", "--to", "fp32")
            found = load_file(folder / "back.safetensors")["up.weight"]
            if name == "float-quantized":
                expected = state["weight"].float() * scales["scale"].float()
                self.assertTrue(torch.equal(found, expected))
            else:
                expected = compressor.decompress(state, scheme)["weight"].float()
                self.assertLessEqual(ulps(found, expected), 1)

    def test_plans_count_what_transformers_builds(self):
        """Every type that `lowp plan --model` knows: keys that a config.json lacks have the values of transformers' classes."""
        folder = folder_of(self)

        def built(keys):
            config = AutoConfig.for_model(**keys)
            with torch.device("meta"):
                return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())

        def planned(keys):
            (folder / "config.json").write_text(json.dumps(keys))
            args = [LOWP, "plan", "--model", str(folder / "config.json"), "--world-size", "8", "--json"]
            done = subprocess.run(args, capture_output=True, text=True, check=True)
            said = json.loads(done.stdout)["model"]
            return said["linear_parameters"] + said["variable_parameters"]

        types = ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt2"]
        sizes = {"vocab_size": 96, "num_hidden_layers": 2, "n_layer": 2, "intermediate_size": 352, "moe_intermediate_size": 64}
        sizes |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "qkv_bias": False}
        for name in types:
            defaults = AutoConfig.for_model(name).to_dict()
            keys = {"model_type": name} | {key: size for key, size in sizes.items() if key in defaults}
            for key in [None, *keys]:
                if key == "model_type":
                    continue
                some = {other: size for other, size in keys.items() if other != key}
                self.assertEqual(planned(some), built(some), f"{name} without {key}")
            alone = {"model_type": name}
            self.assertEqual(planned(alone), built(alone), name)


if __name__ == "__main__":
    unittest.main()
