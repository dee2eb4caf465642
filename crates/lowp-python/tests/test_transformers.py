"""transformers' Trainer over quantized weights on one process: what trains, what is saved, and what error the other ways end with."""

import copy
import gc
import os
import tempfile
import unittest
import weakref

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowp
import ranks

transformers.utils.logging.disable_progress_bar()

RECIPE = "mxfp8-2d"


def llama(recipe=RECIPE, seed=0):
    """A small random Llama, quantized."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    net = transformers.LlamaForCausalLM(config)
    if recipe is not None:
        lowp.quantize_model_(net, recipe, ignore=["lm_head"])
    return net


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(12) * 5 + index) % 64
        return {"input_ids": ids, "labels": ids}


def trainer(net, folder, steps, of=transformers.Trainer, arguments={}, **kwargs):
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=2,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if torch.distributed.is_initialized() else None,
        disable_tqdm=True,
        learning_rate=1e-2,
        **arguments,
    )
    made = of(net, arguments, train_dataset=Texts(), **kwargs)
    made.remove_callback(transformers.PrinterCallback)
    return made


def given(net):
    return dict(optimizers=(lowp.AdamW(net.parameters(), lr=1e-2), None))


def by_class(net):
    return dict(optimizer_cls_and_kwargs=(lowp.AdamW, {"lr": 1e-2}))


class Overriding(transformers.Trainer):
    def create_optimizer(self, *args):
        self.optimizer = lowp.AdamW(self.model.parameters(), lr=1e-2)
        return self.optimizer


def overriding(net):
    return dict(of=Overriding)


def replicas(rank, world):
    """Trains replicas on processes, of another seed on each, and gives their values."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    net = llama("fp8-current", seed=rank)
    with tempfile.TemporaryDirectory() as folder:
        trainer(net, folder, 2, **by_class(net)).train()
    return {name: value.cpu() for name, value in lowp.plain_state_dict(net).items()}


def checkpointing(rank, world, recipes):
    """Losses and gradients of shards with activation checkpointing, and without."""
    for recipe in recipes:
        found = []
        for reentrant in (None, False, True):
            net = llama(recipe)
            if reentrant is not None:
                net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            net.train()
            for layer in net.model.layers:
                fully_shard(layer)
            fully_shard(net)
            ids = Texts()[rank]["input_ids"][None]
            found.append([])
            for _ in range(2):
                loss = net(input_ids=ids, labels=ids).loss
                loss.backward()
                found[-1] += [loss.detach(), *(param.grad.to_local().clone() for param in net.parameters())]
                net.zero_grad()
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), recipe
    return len(recipes)


class Trains(unittest.TestCase):
    def test_training_saves_and_goes_on_to_the_bit(self):
        for recipe, ways in ((RECIPE, (given, by_class, overriding)), ("fp8-current", (by_class,)), ("nvfp4-1d", (by_class,)), ("fp8-delayed", (by_class,))):
            for way in ways:
                with self.subTest(recipe=recipe, way=way.__name__), tempfile.TemporaryDirectory() as folder:
                    net = llama(recipe)
                    trainer(net, folder, 4, **way(net)).train()
                    again = llama(recipe, seed=1)
                    of_again = trainer(again, folder, 4, **way(again))
                    of_again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
                    self.assertEqual(of_again.state.global_step, 4)
                    for (name, a), b in zip(net.named_parameters(), again.parameters()):
                        self.assertTrue(torch.equal(a, b), name)
                        if isinstance(a, lowp.Tensor):
                            self.assertTrue(torch.equal(a.master, b.master), name)

    def test_what_is_saved_are_values(self):
        for keep in (True, False):
            net = llama(None)
            lowp.quantize_model_(net, RECIPE, ignore=["lm_head"], keep_master=keep)
            with self.subTest(keep=keep), tempfile.TemporaryDirectory() as folder:
                net.save_pretrained(folder)
                plain = transformers.LlamaForCausalLM.from_pretrained(folder)
                for (name, value), param in zip(plain.named_parameters(), net.parameters()):
                    self.assertIs(type(value), nn.Parameter)
                    expected = param.master if keep and isinstance(param, lowp.Tensor) else param.detach()
                    expected = expected.dequantize() if isinstance(expected, lowp.Tensor) else expected
                    self.assertTrue(torch.equal(value, expected), name)
                lowp.quantize_model_(plain, RECIPE, ignore=["lm_head"])
                if keep:
                    for (name, a), b in zip(net.named_parameters(), plain.parameters()):
                        self.assertTrue(torch.equal(a, b), name)

    def test_copies_of_models_save_their_own_values(self):
        net = llama()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(net, os.path.join(folder, "whole"))
            for made in (copy.deepcopy(net), torch.load(os.path.join(folder, "whole"), weights_only=False)):
                with torch.no_grad():
                    made.model.layers[0].mlp.up_proj.weight.fill_(2.0)
                made.save_pretrained(folder)
                plain = transformers.LlamaForCausalLM.from_pretrained(folder)
                self.assertTrue(torch.equal(plain.model.layers[0].mlp.up_proj.weight, torch.full((128, 64), 2.0)))
                self.assertEqual(plain.config.architectures, ["LlamaForCausalLM"])

    def test_a_shallow_copy_whose_model_is_gone_says_so(self):
        net = llama()
        made, expected = copy.copy(net), net.model.layers[0].mlp.up_proj.weight.master.clone()
        with tempfile.TemporaryDirectory() as folder:
            made.save_pretrained(folder)
            del net
            for call in (lambda: made.save_pretrained(folder), lambda: copy.deepcopy(made)):
                with self.assertRaisesRegex(lowp.LowpError, "copy.deepcopy"):
                    call()
            type(made).save_pretrained(made, folder, state_dict=lowp.plain_state_dict(made))
            plain = transformers.LlamaForCausalLM.from_pretrained(folder)
            self.assertTrue(torch.equal(plain.model.layers[0].mlp.up_proj.weight, expected))

    def test_a_model_ends_with_its_last_reference(self):
        gc.collect()
        gc.disable()
        try:
            for quantized in (None, RECIPE):
                net = llama(quantized)
                watched = [weakref.ref(net), weakref.ref(net.model.layers[0].mlp.up_proj.weight)]
                del net
                self.assertEqual([thing() for thing in watched], [None, None], quantized)
        finally:
            gc.enable()


class Remedies(unittest.TestCase):
    def test_its_own_optimizer_names_that_of_lowp(self):
        net = llama()
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(lowp.UnsupportedOp, "lowp.AdamW"):
            trainer(net, folder, 2).train()

    def test_replicas_start_from_rank_0(self):
        first, second = ranks.run(2, replicas)
        for name, value in first.items():
            self.assertTrue(torch.equal(value, second[name]), name)

    def test_activation_checkpointing_of_shards(self):
        self.assertEqual(ranks.run(2, checkpointing, ("fp8-current", "nvfp4-1d")), [2, 2])

    def test_files_of_safetensors_are_of_values(self):
        net = llama()
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "model.safetensors")
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"lowp.plain_state_dict\(model\)"):
                save_file(net.state_dict(), file)
            save_file(lowp.plain_state_dict(net), file)
            other = llama(seed=1)
            other.load_state_dict(load_file(file))
            for (name, a), b in zip(net.named_parameters(), other.named_parameters()):
                self.assertTrue(torch.equal(a, b[1]), name)


if __name__ == "__main__":
    unittest.main()
