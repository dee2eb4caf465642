"""Adapters of peft over frozen quantized weights: what trains, what is stored, and what becomes of adapters that are merged."""

import contextlib
import io
import os
import tempfile
import unittest
import warnings

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

try:
    import peft
except ImportError as error:
    raise unittest.SkipTest(f"peft is not installed: {error}") from None

import lowp
import ranks

transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

#: Recipes whose columnwise codes have the values of the rowwise ones, with the bytes of a frozen value: the model of decoded values is the same.
BYTES = {"fp8-current": 1.01, "fp8-delayed": 1.01, "fp8-block": 1.01, "mxfp8-2d": 1.01, "nvfp4-2d": 0.52}
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
WAYS = {
    "lora": {},
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "dora with dropout": dict(use_dora=True, lora_dropout=0.1),
}


def llama(recipe, width=64):
    """A small random Llama that is frozen and quantized."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    net = transformers.LlamaForCausalLM(config).requires_grad_(False)
    if recipe is not None:
        lowp.quantize_model_(net, recipe, ignore=["lm_head"])
    return net


def decoded(net):
    """The same with decoded values in the place of codes."""
    for module in net.modules():
        if isinstance(getattr(module, "weight", None), lowp.Tensor):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return net


def adapted(net, seed=1, **config):
    torch.manual_seed(seed)
    return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=TARGETS, **config))


def loss_of(net, rank=0):
    ids = (torch.arange(12)[None] * 5 + rank) % 64
    return net(input_ids=ids, labels=ids).loss


def train(net, make=lowp.AdamW, steps=2, rank=0):
    """Losses, and what was trained."""
    opt = make([param for param in net.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    torch.manual_seed(2)
    for _ in range(steps):
        loss = loss_of(net, rank)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in net.named_parameters() if param.requires_grad}


def codes_of(net):
    """The weights that hold codes, by the names that they have without adapters."""
    name_of = lambda name: name.removeprefix("base_model.model.").replace(".base_layer", "")
    return {name_of(name): param for name, param in net.named_parameters() if isinstance(param, lowp.Tensor)}


def trained(recipe="mxfp8-2d", **config):
    net = adapted(llama(recipe), **config)
    train(net)
    return net


def shards(rank, world, recipe, configs):
    """Shards of codes, and of decoded values, with the same adapters."""
    for config in configs:
        for make in (lowp.AdamW, torch.optim.AdamW):
            found = []
            for change in (lambda net: net, decoded):
                net = adapted(change(llama(recipe)), **config)
                for layer in net.base_model.model.model.layers:
                    fully_shard(layer)
                fully_shard(net)
                losses, values = train(net, make, rank=rank)
                found.append((losses, {name: value.to_local() for name, value in values.items()}))
                if change is not decoded:
                    merges = []
                    for safe in (False, True):
                        try:
                            net.merge_adapter(safe_merge=safe)
                        except lowp.UnsupportedOp as error:
                            merges.append(str(error))
            (losses, values), (plain_losses, plain_values) = found
            assert losses == plain_losses, (config, losses, plain_losses)
            for name, value in values.items():
                assert torch.equal(value, plain_values[name]), name
    return merges


class Trains(unittest.TestCase):
    def equal(self, net, other, make=lowp.AdamW):
        (losses, values), (plain_losses, plain_values) = train(net, make), train(other, make)
        self.assertEqual(losses, plain_losses)
        for name, value in values.items():
            self.assertTrue(torch.equal(value, plain_values[name]), name)

    def test_losses_are_those_over_decoded_values(self):
        for recipe, way in [*((recipe, "lora") for recipe in BYTES), *(("nvfp4-2d", way) for way in WAYS)]:
            for make in (lowp.AdamW, torch.optim.AdamW):
                with self.subTest(recipe=recipe, way=way, make=make.__module__):
                    self.equal(adapted(llama(recipe), **WAYS[way]), adapted(decoded(llama(recipe)), **WAYS[way]), make)

    def test_quantized_under_adapters_is_quantized_before(self):
        for recipe in BYTES:
            before, under = adapted(llama(recipe)), adapted(llama(None))
            lowp.quantize_model_(under, recipe, ignore=["*lm_head"])
            self.assertEqual(codes_of(before).keys(), codes_of(under).keys())
            for name, weight in codes_of(before).items():
                self.assertTrue(torch.equal(weight, codes_of(under)[name]), name)
            self.equal(before, under)

    def test_a_frozen_weight_is_codes_alone(self):
        for recipe, most in BYTES.items():
            net = llama(recipe, width=256)
            opt = lowp.AdamW(adapted(net).parameters(), lr=1e-2)
            loss_of(net).backward()
            opt.step()
            for name, weight in codes_of(net).items():
                with self.subTest(recipe=recipe, name=name):
                    self.assertIsNone(weight.master)
                    self.assertLess(weight.stored_bytes / weight.numel(), most)
                    self.assertNotIn(weight, opt.state)

    def test_frozen_layers_keep_no_inputs(self):
        for frozen in (False, True):
            layer = nn.Linear(64, 64, bias=False).requires_grad_(not frozen)
            lowp.quantize_model_(layer, "mxfp8-2d")
            x, kept = torch.randn(2, 64, requires_grad=True), []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                layer(x)
            self.assertEqual(sum(type(t) is torch.Tensor for t in kept), 0 if frozen else 1)

    def test_blocks_compile_as_one_graph(self):
        for config in ({}, dict(use_dora=True)):
            net = adapted(llama("nvfp4-2d"), **config)
            for block in net.base_model.model.model.layers:
                block.compile(backend="aot_eager", fullgraph=True)
            self.equal(net, adapted(llama("nvfp4-2d"), **config))

    def test_shards_of_codes_and_adapters_in_one_group(self):
        for merges in ranks.run(2, shards, "nvfp4-2d", ({}, dict(use_dora=True))):
            self.assertEqual(len(merges), 2)
            for text in merges:
                self.assertIn("before fully_shard", text)


class Merges(unittest.TestCase):
    def test_a_merge_casts_the_decoded_values_and_the_delta(self):
        for recipe in (*BYTES, "mxfp8", "nvfp4-1d"):
            with self.subTest(recipe=recipe):
                net = trained(recipe)
                layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, peft.tuners.lora.Linear)}
                self.assertEqual(len(layers), 8)
                for sign, write in ((1, net.merge_adapter), (-1, net.unmerge_adapter)):
                    sums = {name: layer.base_layer.weight.dequantize() + sign * layer.get_delta_weight("default") for name, layer in layers.items()}
                    write()
                    for name, layer in layers.items():
                        self.assertTrue(torch.equal(layer.base_layer.weight, lowp.quantize(sums[name].detach(), recipe)), name)

    def test_a_copy_that_would_be_rounded_names_the_other_way(self):
        net = trained()
        expected = {name: weight.dequantize() for name, weight in codes_of(net).items()}
        with self.assertRaisesRegex(lowp.UnsupportedOp, "safe_merge=False"):
            net.merge_adapter(safe_merge=True)
        self.assertFalse(any(layer.merged for layer in net.modules() if isinstance(layer, peft.tuners.lora.Linear)))
        for name, weight in codes_of(net).items():
            self.assertTrue(torch.equal(weight.dequantize(), expected[name]), name)

    def test_dora_is_merged_and_taken_out(self):
        for safe in (False, True):
            net = trained(use_dora=True)
            expected, before = loss_of(net).item(), {name: weight.dequantize() for name, weight in codes_of(net).items()}
            net.merge_adapter(safe_merge=safe)
            self.assertLess(abs(loss_of(net).item() - expected), 1e-2)
            net.unmerge_adapter()
            for name, weight in codes_of(net).items():
                self.assertLess((weight - before[name]).norm() / before[name].norm(), 0.05)

    def test_codes_that_were_kept_come_back_to_the_bit(self):
        net = trained()
        kept = {name: value.clone() for name, value in net.state_dict().items()}
        expected = loss_of(net).item()
        net.merge_adapter()
        self.assertNotEqual(loss_of(net).item(), expected)
        net.unmerge_adapter()
        net.load_state_dict(kept)
        self.assertEqual(loss_of(net).item(), expected)

    def test_a_merged_model_saves_its_values(self):
        for config in ({}, dict(use_dora=True)):
            net = trained(**config)
            merged = net.merge_and_unload()
            with tempfile.TemporaryDirectory() as folder:
                merged.save_pretrained(folder)
                plain = transformers.LlamaForCausalLM.from_pretrained(folder)
            self.assertEqual(len(codes_of(merged)), 14)
            self.assertEqual(loss_of(plain).item(), loss_of(merged).item())

    def test_what_pissa_leaves_in_the_weight_is_cast(self):
        net, before = adapted(llama("mxfp8-2d"), init_lora_weights="pissa"), codes_of(llama("mxfp8-2d"))
        layers = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, peft.tuners.lora.Linear)]
        self.assertEqual(len(layers), 8)
        for name, layer in layers:
            weight = before[f"{name.removeprefix('base_model.model.')}.weight"]
            rest = weight.dequantize() - layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            self.assertTrue(torch.equal(layer.base_layer.weight, lowp.quantize(rest.detach(), "mxfp8-2d")), name)

    def test_adapters_are_saved_and_loaded(self):
        net = trained(use_dora=True)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stderr(io.StringIO()):
                net.save_pretrained(folder)
            self.assertLess(os.path.getsize(os.path.join(folder, "adapter_model.safetensors")), 50_000)
            again = peft.PeftModel.from_pretrained(llama("mxfp8-2d"), folder)
        self.assertEqual(loss_of(again).item(), loss_of(net).item())

    def test_weights_that_are_trained_are_not_merged(self):
        net = adapted(llama(None).requires_grad_(True))
        net.requires_grad_(True)
        lowp.quantize_model_(net, "mxfp8-2d", ignore=["*lm_head"])
        for safe in (False, True):
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"requires_grad_\(False\)"):
                net.merge_adapter(safe_merge=safe)


if __name__ == "__main__":
    unittest.main()
