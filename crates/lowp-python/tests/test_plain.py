"""Values in the place of codes: state dictionaries and models without lowp."""

import copy
import unittest

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowp
import ranks


def tied(dtype=torch.float32):
    """Three layers, of which the first two share a weight and the last is not quantized."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)).to(dtype)
    net[1].weight = net[0].weight
    lowp.quantize_model_(net, "mxfp8-2d", ignore=["2"])
    return net


def fresh(rows=64):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, rows), nn.Linear(rows, 8))


def sharded(rank, world):
    """Values of shards in a model that is sharded and has no codes, and the error of one whose weights would be replaced."""
    net, other = fresh(), fresh()
    lowp.quantize_model_(net, "fp8-current")
    states = [lowp.dequantize_state_dict(net, masters=masters) for masters in (False, True)]
    for of in (net, other):
        fully_shard(of)
    for masters, expected in zip((False, True), states):
        other.load_state_dict(lowp.dequantize_state_dict(net, masters=masters))
        for name, param in other.named_parameters():
            assert torch.equal(param.full_tensor(), expected[name]), (name, masters)
    said = []
    for _ in range(2):
        try:
            lowp.dequantize_model_(net)
        except lowp.LowpError as error:
            said.append(str(error))
        net(torch.ones(2, 64))  # leaves the root gathered
    assert all(type(module) is not nn.Linear for module in net)
    lowp.quantize_model_(net := fresh(), "mxfp8-2d", ignore=["0"])
    replica = nn.parallel.DistributedDataParallel(net)
    try:
        lowp.dequantize_model_(replica)
    except lowp.LowpError as error:
        said.append(str(error))
    assert lowp.dequantize_model_(replica.module) == ["1.weight"]
    return said


class Plain(unittest.TestCase):
    def test_state_dictionaries_have_decoded_values_or_masters(self):
        net = tied(torch.bfloat16)
        weight, last = net[0].weight, net[2].weight
        for kwargs, expected in (
            ({}, weight.detach().dequantize()),
            ({"dtype": torch.float32}, weight.detach().dequantize(dtype=torch.float32)),
            ({"masters": True}, weight.master),
            ({"masters": True, "dtype": torch.float16}, weight.master.to(torch.float16)),
        ):
            with self.subTest(kwargs=kwargs):
                for of in (net, net.state_dict()):
                    state = lowp.dequantize_state_dict(of, **kwargs)
                    self.assertEqual(state.keys(), net.state_dict().keys())
                    self.assertIs(type(state["0.weight"]), torch.Tensor)
                    self.assertEqual(state["0.weight"].dtype, expected.dtype)
                    self.assertTrue(torch.equal(state["0.weight"], expected))
                    self.assertEqual(state["1.weight"].data_ptr(), state["0.weight"].data_ptr())
                    self.assertEqual(state["2.weight"].data_ptr(), last.data_ptr())
        self.assertTrue(torch.equal(lowp.plain_state_dict(net)["0.weight"], weight.master))
        lowp.quantize_model_(other := fresh(64).bfloat16(), "mxfp8", keep_master=False)
        self.assertTrue(torch.equal(lowp.plain_state_dict(other)["0.weight"], other[0].weight.detach().dequantize(dtype=torch.float32)))
        self.assertTrue(torch.equal(lowp.dequantize_state_dict(other, masters=True)["0.weight"], other[0].weight.detach().dequantize()))

    def test_models_get_plain_parameters(self):
        for dtype, masters in ((None, False), (torch.bfloat16, False), (None, True)):
            with self.subTest(dtype=dtype, masters=masters):
                net = tied()
                net[0].weight.requires_grad_(False)
                before = copy.deepcopy(net)
                values = before[0].weight.master if masters else before[0].weight.dequantize(dtype=dtype)
                self.assertEqual(lowp.dequantize_model_(net, dtype, masters=masters), ["0.weight", "1.weight"])
                self.assertIs(net[0].weight, net[1].weight)
                self.assertIs(type(net[0].weight), nn.Parameter)
                self.assertFalse(net[0].weight.requires_grad)
                self.assertTrue(net[2].weight.requires_grad)
                self.assertTrue(torch.equal(net[0].weight, values) and net[0].weight.dtype == values.dtype)
                self.assertEqual({type(module) for module in net}, {nn.Linear})
                self.assertEqual(lowp.dequantize_model_(net), [])
                if dtype is None and not masters:
                    self.assertTrue(torch.equal(net(torch.ones(2, 64)), before(torch.ones(2, 64))))
                # They may be quantized again.
                self.assertEqual(len(lowp.quantize_model_(net, "mxfp8-2d", ignore=["2"])), 2)

    def test_save_pretrained_is_that_of_the_model_again(self):
        class Pretrained(nn.Linear):
            def save_pretrained(self, folder, is_main_process=True, state_dict=None):
                return state_dict

        net = Pretrained(64, 64)
        lowp.quantize_model_(net, "mxfp8")
        self.assertTrue(torch.equal(net.save_pretrained("folder")["weight"], net.weight.master))
        lowp.dequantize_model_(net)
        self.assertIsNone(net.save_pretrained("folder"))

    def test_models_that_cannot_get_plain_parameters(self):
        for said in ranks.run(2, sharded):
            self.assertEqual(len(said), 3)
            self.assertIn("dequantize_model_(model.module)", said.pop())
            for text in said:
                self.assertIn("0.weight is sharded by FSDP2", text)
                self.assertIn("again.load_state_dict(lowp.dequantize_state_dict(model))", text)


if __name__ == "__main__":
    unittest.main()
