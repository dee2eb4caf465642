"""FSDP2 by accelerate and by transformers' Trainer. On CPUs accelerate makes replicas whatever its plugin says, so that its state is set here."""

import os
import tempfile
import unittest
from unittest import mock

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.fsdp import fully_shard

import lowp
import ranks
from test_transformers import Texts, by_class, overriding, trainer

transformers.utils.logging.disable_progress_bar()

RECIPES = ("mxfp8", "fp8-delayed")
#: What a checkpoint is.
SHARDED, FULL = {"state_dict_type": "SHARDED_STATE_DICT"}, {"state_dict_type": "FULL_STATE_DICT"}
POLICY = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}


def llama(recipe, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(dtype)
    lowp.quantize_model_(net, recipe, ignore=["lm_head"])
    return net


def environment(rank, world):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def as_fsdp(accelerator, plugin):
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)


def accelerated(rank, world, mixed_precision="no", **kwargs):
    environment(rank, world)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **POLICY, **kwargs)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision)
    as_fsdp(accelerator, plugin)
    return accelerator


def stepped(net, opt, rank, steps):
    for step in steps:
        ids = Texts()[2 * step + rank]["input_ids"][None]
        net(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()


def assert_same(net, other):
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        a, b = a.to_local(), b.to_local()
        assert torch.equal(a, b), name
        assert not isinstance(a, lowp.Tensor) or torch.equal(a.master, b.master), name


def prepared(rank, world, recipes, folder):
    """What ``prepare`` shards trains as what ``fully_shard`` does, and goes on from each kind of checkpoint to the bit."""
    for recipe in recipes:
        own = llama(recipe)
        for module in (own.model.layers[0], own):
            fully_shard(module)
        own_opt = lowp.AdamW(own.parameters(), lr=1e-2)
        stepped(own, own_opt, rank, range(4))
        for kind in (SHARDED, FULL):
            where = f"{folder}/{recipe}-{kind['state_dict_type']}"
            for seed, steps in ((0, range(2)), (1, range(2, 4))):
                accelerator, net = accelerated(rank, world, **kind), llama(recipe, seed)
                net, opt = accelerator.prepare(net, lowp.AdamW(net.parameters(), lr=1e-2))
                if seed == 1:
                    accelerator.load_state(where)
                stepped(net, opt, rank, steps)
                if seed == 0:
                    accelerator.save_state(where)
            assert_same(own, net)


def half(rank, world):
    """bfloat16 weights with mixed precision, which accelerate makes float32 before it shards them."""
    accelerator, net = accelerated(rank, world, "bf16"), llama("mxfp8", dtype=torch.bfloat16)
    before = {name: param.detach().clone() for name, param in net.named_parameters() if isinstance(param, lowp.Tensor)}
    net, opt = accelerator.prepare(net, lowp.AdamW(net.parameters(), lr=1e-2))
    for name, codes in before.items():
        param = net.get_parameter(name)
        assert param.dtype == torch.float32 and torch.equal(param.full_tensor(), codes), name
    ids = Texts()[rank]["input_ids"][None]
    with torch.autocast("cpu", torch.bfloat16):
        first, *_, last = (step(net, opt, ids) for _ in range(6))
    return float(first), float(last)


def step(net, opt, ids):
    loss = net(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def efficient(rank, world):
    accelerator, net = accelerated(rank, world, cpu_ram_efficient_loading=True), llama("mxfp8")
    try:
        accelerator.prepare(net, lowp.AdamW(net.parameters()))
    except lowp.UnsupportedOp as error:
        return str(error)


def by_trainer(rank, world, folder):
    """Trainer from the start, and from its checkpoint in the middle."""
    init = Accelerator.__init__

    def set_state(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        as_fsdp(self, fsdp_plugin)

    config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    with mock.patch.object(Accelerator, "__init__", set_state):
        for way, kind in ((by_class, SHARDED), (overriding, FULL)):
            nets, where = [], f"{folder}/{way.__name__}"
            for seed, resumed in ((0, None), (1, f"{where}/checkpoint-2")):
                environment(rank, world)
                net = llama("mxfp8", seed)
                made = trainer(net, where, 4, arguments={"fsdp": True, "fsdp_config": {**config, **kind}}, **way(net))
                made.train(resume_from_checkpoint=resumed)
                nets.append(net)
            assert_same(*nets)
        # A full checkpoint of the last way also has the decoded values.
        plain = transformers.LlamaForCausalLM.from_pretrained(f"{where}/checkpoint-4")
        for (name, value), param in zip(plain.named_parameters(), net.parameters(), strict=True):
            full = param.full_tensor()
            assert torch.equal(value, full.dequantize() if isinstance(full, lowp.Tensor) else full), name


class Fsdp2(unittest.TestCase):
    def test_what_prepare_shards_trains_and_resumes_to_the_bit(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, prepared, RECIPES, folder)

    def test_trainer_resumes_to_the_bit(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, by_trainer, folder)

    def test_weights_of_bfloat16_with_mixed_precision(self):
        for first, last in ranks.run(2, half):
            self.assertLess(last, 0.9 * first)

    def test_loads_on_one_rank_alone_are_an_error_on_every_rank(self):
        for message in ranks.run(2, efficient):
            self.assertIn("cpu_ram_efficient_loading=False", message)


if __name__ == "__main__":
    unittest.main()
