"""Weights that nobody trains: what they store, and what arithmetic and writes do to them."""

import copy
import os
import tempfile
import unittest

import torch
from torch import nn

import lowp
import model
import ranks
from lowp import _scaled

#: Recipes whose columnwise codes follow from the rowwise ones, with the bytes of a frozen value.
DERIVED = {"fp8-current": 1.01, "fp8-delayed": 1.01, "fp8-block": 1.01, "mxfp8-2d": 1.01, "nvfp4-2d": 0.52}
RECIPES = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


def layer(recipe, frozen=True, **options):
    torch.manual_seed(4)
    made = nn.Linear(256, 256).requires_grad_(not frozen)
    lowp.quantize_model_(made, recipe, **options)
    return made


class Stores(unittest.TestCase):
    def test_codes_that_follow_from_others_and_masters_are_left_out(self):
        for recipe in RECIPES:
            with self.subTest(recipe=recipe):
                frozen, trained = layer(recipe).weight, layer(recipe, frozen=False).weight
                self.assertIsNone(frozen.master)
                self.assertIsNotNone(trained.master)
                self.assertLess(frozen.stored_bytes / frozen.numel(), DERIVED.get(recipe, 2.1))
                for orientation in ("rowwise", "columnwise"):
                    decoded = (weight.detach().dequantize(orientation=orientation) for weight in (frozen, trained))
                    self.assertTrue(torch.equal(*decoded))
        for keep in (False, True):
            weights = (layer("mxfp8-2d", frozen, keep_master=keep).weight for frozen in (False, True))
            self.assertEqual([weight.master is not None for weight in weights], [keep, keep])

    def test_gradients_of_inputs_are_those_beside_all_codes(self):
        for recipe in RECIPES:
            found = []
            for frozen in (True, False):
                x = torch.linspace(-1, 1, 512).view(2, 256).requires_grad_()
                layer(recipe, frozen)(x).square().sum().backward()
                found.append(x.grad)
            self.assertTrue(torch.equal(*found), recipe)

    def test_products_of_codes_transpose_them(self):
        for recipe in ("fp8-current", "fp8-delayed"):
            for orientation in ("rowwise", "columnwise"):
                (codes, scale, _), (all_codes, all_scale, _) = (_scaled.codes(layer(recipe, frozen).weight._store, orientation) for frozen in (True, False))
                self.assertTrue(codes.is_contiguous())
                self.assertTrue(torch.equal(codes.view(torch.uint8), all_codes.view(torch.uint8)))
                self.assertTrue(torch.equal(scale, all_scale))

    def test_copies_between_both_kinds_have_all_codes(self):
        for recipe in RECIPES:
            for frozen in (True, False):
                source, target = layer(recipe, frozen), layer(recipe, not frozen)
                with torch.no_grad():
                    target.weight.zero_()
                self.assertFalse(torch.equal(target.weight, source.weight))
                target.load_state_dict(source.state_dict())
                whole = layer(recipe, frozen=False).weight.buffers
                self.assertTrue(torch.equal(target.weight, source.weight) and torch.equal(source.weight, target.weight))
                for name, buffer in target.weight.buffers.items():
                    self.assertTrue(torch.equal(buffer, whole[name]), (recipe, name))

    def test_a_weight_of_one_direction_is_not_one_of_the_other(self):
        values = torch.randn(32, 32)
        rowwise, columnwise = (lowp.quantize(values, "nvfp4-2d", usage=usage) for usage in ("rowwise", "columnwise"))
        self.assertFalse(torch.equal(rowwise, columnwise) or torch.equal(columnwise, rowwise))

    def test_files_and_pickles_keep_the_codes(self):
        for recipe in DERIVED:
            made = layer(recipe)
            with tempfile.TemporaryDirectory() as folder:
                lowp.save(os.path.join(folder, "codes.safetensors"), {"weight": made.weight})
                torch.save(made.state_dict(), os.path.join(folder, "state"))
                loaded = lowp.load(os.path.join(folder, "codes.safetensors")), torch.load(os.path.join(folder, "state"))
            for state in loaded:
                self.assertTrue(torch.equal(state["weight"], made.weight), recipe)

    def test_a_weight_that_is_trained_later_trains_as_one_without_a_master(self):
        for recipe in DERIVED:
            found = []
            for net in (layer(recipe).requires_grad_(True), layer(recipe, frozen=False, keep_master=False)):
                opt = lowp.AdamW(net.parameters(), lr=1e-2)
                for step in range(2):
                    net(torch.full((2, 256), 0.1 * step + 0.1)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                found.append(net.weight)
            self.assertTrue(torch.equal(*found), recipe)

    def test_full_states_of_shards_with_frozen_weights(self):
        self.assertEqual(ranks.run(2, full_states, DERIVED), [len(DERIVED)] * 2)


def full_states(rank, world, recipes):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    options = StateDictOptions(full_state_dict=True)
    for recipe in recipes:
        whole, net = layer(recipe), nn.Sequential(layer(recipe))
        model.fully_shard(net)
        full = get_model_state_dict(net, options=options)
        assert torch.equal(full["0.weight"], whole.weight), recipe
        with torch.no_grad():
            rows = torch.zeros(256, 256)
            set_model_state_dict(net, {"0.weight": rows, "0.bias": rows[:, 0].clone()}, options=options)
            assert not net[0].weight.full_tensor().dequantize().any(), recipe
            set_model_state_dict(net, {f"0.{name}": value for name, value in whole.state_dict().items()}, options=options)
        assert torch.equal(net[0].weight.full_tensor(), whole.weight), recipe
    return len(recipes)


ARITHMETIC = {
    "sum": lambda w: w + 1,
    "difference": lambda w: torch.ones(w.shape) - w,
    "product": lambda w: w * torch.full(w.shape, 0.5),
    "quotient": lambda w: w / 3,
    "matrix product": lambda w: torch.ones(2, w.shape[0]) @ w,
    "of itself": lambda w: w * w,
    "decomposition": lambda w: torch.linalg.svd(w, full_matrices=False).S,
    "of .data": lambda w: w.data + 1,
    "of a copy": lambda w: w.detach().clone() * 2,
    "in another dtype": lambda w: w.to(torch.bfloat16).mul(2),
}


class Reads(unittest.TestCase):
    def test_arithmetic_is_that_of_the_decoded_values(self):
        for recipe in ("mxfp8-2d", "nvfp4-2d", "mxfp8"):
            weight = layer(recipe).weight
            for what, work in ARITHMETIC.items():
                with self.subTest(recipe=recipe, what=what):
                    found = work(weight)
                    self.assertIs(type(found), torch.Tensor)
                    self.assertTrue(torch.equal(found, work(nn.Parameter(weight.dequantize(), requires_grad=False))))

    def test_arithmetic_with_a_trained_weight_raises(self):
        frozen, trained = layer("mxfp8-2d").weight, layer("mxfp8-2d", frozen=False).weight
        averages = (lambda: frozen * 0.9 + trained * 0.1, lambda: frozen - trained.detach(), lambda: trained.data * 2, lambda: frozen.data.add_(trained.data))
        for average in averages:
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"requires_grad_\(False\)"):
                average()

    def test_views_raise(self):
        # Written to, they would not change the weight.
        weight = layer("mxfp8-2d").weight
        for view in (lambda: weight.t(), lambda: weight.data.transpose(0, 1), lambda: weight.unsqueeze(0)):
            with self.assertRaisesRegex(lowp.UnsupportedOp, "no such view"):
                view()

    def test_graphs_read_decoded_values(self):
        net = layer("mxfp8-2d")
        work = lambda x: net(x) + (net.weight + 1).norm(dim=1)
        x = torch.randn(2, 256)
        self.assertTrue(torch.equal(torch.compile(work, backend="aot_eager", fullgraph=True)(x), work(x)))


class Writes(unittest.TestCase):
    def test_values_that_are_assigned_on_meta_have_no_codes_that_follow(self):
        with torch.device("meta"):
            net = nn.Linear(64, 64, bias=False).requires_grad_(False)
        lowp.quantize_model_(net, "fp8-current")
        net.load_state_dict({"weight": torch.randn(64, 64)}, assign=True)
        self.assertEqual(net.weight.stored_bytes, 64 * 64 + 4)

    def test_sums_and_values_are_cast(self):
        for recipe in (*DERIVED, "mxfp8", "nvfp4-1d"):
            delta = torch.linspace(-0.1, 0.1, 256).expand(256, 256)
            before = layer(recipe).weight.dequantize()
            for sign, write in ((1, lambda w: w.data.add_(delta)), (-2, lambda w: w.data.sub_(delta, alpha=2)), (1, lambda w: w.detach().add_(delta))):
                weight = layer(recipe).weight
                write(weight)
                self.assertTrue(torch.equal(weight, lowp.quantize(before + sign * delta, recipe)), recipe)
            weight = layer(recipe).weight
            weight.data += delta
            self.assertTrue(torch.equal(weight, lowp.quantize(before + delta, recipe)), recipe)
            weight.data = before - delta
            self.assertTrue(torch.equal(weight, lowp.quantize(before - delta, recipe)), recipe)
            weight.data = layer(recipe).weight
            self.assertTrue(torch.equal(weight, layer(recipe).weight), recipe)

    def test_weights_of_copies_are_written_as_theirs(self):
        expected = lowp.quantize(layer("mxfp8-2d").weight.dequantize() + 1, "mxfp8-2d")
        made = layer("mxfp8-2d")
        for net in (copy.deepcopy(made), layer("mxfp8-2d").to(torch.float64).to(torch.float32)):
            net.weight.data += 1
            self.assertTrue(torch.equal(net.weight, expected))
        weight = nn.Parameter(made.weight.detach().clone(), requires_grad=False)
        with torch.no_grad():
            weight += 1
        self.assertTrue(torch.equal(weight, expected))
        self.assertFalse(torch.equal(made.weight, expected))
        self.assertTrue(torch.equal(copy.deepcopy(weight.detach()) * 2, expected.dequantize() * 2))

    def test_a_master_follows(self):
        weight = layer("mxfp8-2d", keep_master=True).weight
        total = weight.dequantize() + 1
        weight.data += 1
        self.assertTrue(torch.equal(weight.master, total))

    def test_what_would_lose_values_raises(self):
        weight, trained = layer("mxfp8-2d").weight, layer("mxfp8-2d", frozen=False).weight
        before = copy.deepcopy(weight)
        with self.assertRaisesRegex(lowp.UnsupportedOp, "a copy of a frozen lowp.Tensor"):
            weight.data.clone().add_(1)
        for write in (lambda: weight.data.mul_(2), lambda: trained.data.add_(1), lambda: setattr(trained, "data", torch.zeros(256, 256))):
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"requires_grad_\(False\)"):
                write()
        for values in (torch.zeros(256, 128), torch.zeros(256, 256, dtype=torch.int32)):
            with self.assertRaisesRegex(lowp.LowpError, "same shape"):
                weight.data = values
        self.assertTrue(torch.equal(weight, before))


if __name__ == "__main__":
    unittest.main()
