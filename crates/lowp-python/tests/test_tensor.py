"""``lowp.Tensor``: values, operations, files, errors."""

import copy
import io
import os
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
from torch import nn

import lowp
import ranks

SHAPE = (256, 384)


def values(shape=SHAPE):
    torch.manual_seed(5)
    return torch.randn(shape)


#: Dtypes whose values would be rounded, cut or counted.
REFUSED = (torch.complex64, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn)


def low():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


class Values(unittest.TestCase):
    def test_decoded_values_are_near_and_quantize_to_the_same_codes(self):
        for name in low():
            with self.subTest(name=name):
                source = values()
                weight = lowp.quantize(source, name)
                for orientation in ("rowwise", "columnwise"):
                    decoded = weight.dequantize(orientation=orientation)
                    error = (decoded - source).norm() / source.norm()
                    self.assertLess(error, 0.2, name)
                self.assertEqual(weight.dtype, torch.float32)
                self.assertEqual(weight.stored_bytes, sum(b.numel() for b in weight.buffers.values()))

    def test_sources_of_any_layout_and_dtype(self):
        source = values().bfloat16()
        expected = lowp.quantize(source, "mxfp8")
        for other in (source.t().contiguous().t(), source[:, :].float(), torch.nn.Parameter(source)):
            self.assertTrue(torch.equal(lowp.quantize(other, "mxfp8"), expected))
        self.assertEqual(lowp.quantize(source.half(), "fp8-current").dtype, torch.float16)
        wide = torch.randn(64, 1024)[:, 256:640]
        self.assertTrue(torch.equal(lowp.quantize(wide, "nvfp4-1d"), lowp.quantize(wide.clone(), "nvfp4-1d")))

    def test_the_source_stays_as_it_is_and_masters_are_copies(self):
        source = values()
        before = source.clone()
        weight = lowp.quantize(source, "fp8-current", keep_master=True)
        self.assertTrue(torch.equal(source, before))
        self.assertNotEqual(weight.master.data_ptr(), source.data_ptr())
        self.assertTrue(torch.equal(weight.master, source))

    def test_one_direction_alone(self):
        both = lowp.quantize(values(), "mxfp8")
        for usage in ("rowwise", "columnwise"):
            one = lowp.quantize(values(), "mxfp8", usage=usage)
            self.assertTrue(torch.equal(one.dequantize(orientation=usage), both.dequantize(orientation=usage)))
            self.assertLess(one.stored_bytes, both.stored_bytes)
        with self.assertRaises(lowp.LowpError):
            lowp.quantize(values(), "mxfp8", usage="rowwise").dequantize(orientation="columnwise")

    def test_options_and_text(self):
        weight = lowp.quantize(values(), "fp8-current", pow2=True)
        self.assertEqual(weight.recipe.options["pow2"], "true")
        self.assertEqual(weight.recipe, lowp.Recipe("fp8-current", pow2=True))
        for part in ("fp8-current", "pow2=true", "[256, 384]", "196,612 bytes", "float32"):
            self.assertIn(part, repr(weight))

    def test_memory_of_another_device_is_refused(self):
        from lowp import _lowp
        from lowp._memory import memory

        recipe, source = lowp.Recipe("mxfp8"), values()
        weight = lowp.quantize(source, recipe)
        buffers = [(name, memory(buffer)) for name, buffer in weight.buffers.items()]
        cpu = ("cpu", 0, 0)
        _lowp.quantize(cpu, recipe, SHAPE, memory(source), "float32", buffers)
        pointer, bytes, device, owner = memory(source)
        self.assertEqual(device, -1)
        with self.assertRaisesRegex(lowp.LowpError, "is on cuda:1, but the work is on the CPU"):
            _lowp.quantize(cpu, recipe, SHAPE, (pointer, bytes, 1, owner), "float32", buffers)
        with self.assertRaisesRegex(lowp.LowpError, "entries of 4 bytes"):
            _lowp.quantize(cpu, recipe, SHAPE, (pointer, bytes - 1, -1, owner), "float32", buffers)

    def test_delayed_scales_may_be_given(self):
        weight = lowp.quantize(values(), "fp8-delayed", encode_scale=16.0)
        self.assertEqual(weight.buffers["tensor_scale"].view(torch.float32).item(), 1 / 16)
        for name, scale, message in (
            ("mxfp8", 16.0, "encode_scale=16.0 was given for mxfp8, .* delayed"),
            ("mxfp8", float("nan"), "encode_scale=NaN was given for mxfp8"),
            ("fp8-delayed", float("nan"), "encode_scale=NaN"),
            ("fp8-delayed", float("inf"), "encode_scale=inf"),
            ("fp8-delayed", 1e300, "encode_scale=inf as a float32"),
            ("fp8-delayed", 0.0, "encode_scale=0.0"),
            ("fp8-delayed", -2.0, "encode_scale=-2.0"),
            ("fp8-delayed", 1e-45, "encode_scale=1e-45 .*inverse"),
        ):
            weight = lowp.quantize(values(), name)
            before = weight.clone()
            for call in (lambda: lowp.quantize(values(), name, encode_scale=scale), lambda: weight.quantize_(values() * 2, encode_scale=scale)):
                with self.subTest(name=name, scale=scale), self.assertRaisesRegex(lowp.LowpError, message):
                    call()
            self.assertTrue(torch.equal(weight, before))


class Plans(unittest.TestCase):
    def test_the_cast_that_was_not_used_for_longest_goes(self):
        from lowp import _lowp
        from lowp._memory import memory

        casts, cpu = _lowp.Casts(3), ("cpu", 0, 0)
        weight = lowp.quantize(values((32, 64)), "fp8-current")
        outs = [torch.empty(32, 64) for _ in range(5)]

        def decode(number, recipe=weight.recipe):
            outs[number].fill_(-1)
            casts.decode(cpu, recipe, (32, 64), weight._store.named(), "rowwise", memory(outs[number]), "float32")
            self.assertTrue(torch.equal(outs[number], weight.dequantize()))

        for number, planned in ((0, 1), (1, 2), (0, 2), (2, 3), (3, 3), (0, 3), (4, 3), (1, 3)):
            decode(number)
            self.assertEqual(len(casts), planned)
        decode(1, lowp.Recipe("fp8-current", epsilon=0.5))
        decode(1, lowp.Recipe("fp8-current", epsilon=0.25))
        self.assertEqual(len(casts), 3)


class Operations(unittest.TestCase):
    def test_rows_are_those_of_the_whole(self):
        for name in low():
            quantum = max(lowp.Recipe(name).row_quantum, 16)
            with self.subTest(name=name):
                source = values((2 * quantum + 8, 384))
                weight = lowp.quantize(source, name)
                parts = weight.split(quantum)
                self.assertEqual([part.shape[0] for part in parts], [quantum, quantum, 8])
                decoded = torch.cat([part.dequantize() for part in parts])
                self.assertTrue(torch.equal(decoded, weight.dequantize()))
                self.assertTrue(torch.equal(weight[quantum:].dequantize(), weight.dequantize()[quantum:]))
                self.assertTrue(torch.equal(weight.narrow(0, 0, quantum), parts[0]))

    def test_views_and_copies(self):
        weight = lowp.quantize(values(), "nvfp4-2d", keep_master=True)
        flat = weight.view(-1)
        self.assertEqual(tuple(flat.shape), (256 * 384,))
        self.assertTrue(torch.equal(flat.view(256, 384), weight))
        self.assertTrue(torch.equal(torch.as_strided(weight, SHAPE, (384, 1), 0), weight))
        for other in (weight.clone(), copy.deepcopy(weight), weight.to("cpu", copy=True)):
            self.assertTrue(torch.equal(other, weight))
            self.assertNotEqual(other.buffers["rowwise_data"].data_ptr(), weight.buffers["rowwise_data"].data_ptr())
            self.assertTrue(torch.equal(other.master, weight.master))
        self.assertEqual(weight.detach().buffers["rowwise_data"].data_ptr(), weight.buffers["rowwise_data"].data_ptr())
        self.assertEqual(weight.bfloat16().dtype, torch.bfloat16)

    def test_copies_into(self):
        for name in low():
            with self.subTest(name=name):
                weight = lowp.quantize(values(), name)
                target = torch.empty_like(weight)
                target.copy_(weight)
                self.assertTrue(torch.equal(target, weight))
                target.copy_(values() * 3)
                self.assertTrue(torch.equal(target, lowp.quantize(values() * 3, name)))
                plain = torch.empty(SHAPE, dtype=torch.bfloat16)
                plain.copy_(weight)
                self.assertTrue(torch.equal(plain, weight.dequantize(dtype=torch.bfloat16)))
        with self.assertRaisesRegex(lowp.LowpError, "dequantize and quantize"):
            lowp.quantize(values(), "mxfp8").copy_(lowp.quantize(values(), "mxfp8-2d"))

    def test_rows_that_cannot_be_written_back_stay(self):
        for name in low():
            recipe = lowp.Recipe(name)
            rows = max(recipe.row_quantum, 16)
            source = values((2 * rows, 256))
            weight = lowp.quantize(source, name)
            transposed = [spec.name for spec in recipe.buffers(2 * rows, 256) if spec.is_transpose]
            before, other = weight.clone(), lowp.quantize(source[:rows] * 2, name)
            for write in (lambda part: part.copy_(other), lambda part: part.quantize_(source[:rows] * 2)):
                with self.subTest(name=name):
                    if transposed:
                        with self.assertRaisesRegex(lowp.UnsupportedOp, "a transpose"):
                            write(weight[:rows])
                        self.assertTrue(torch.equal(weight, before))
                    else:
                        write(weight[:rows])
                        self.assertFalse(torch.equal(weight, before))

    def test_clones_of_half_replaced_tensors_are_half_replaced(self):
        seen = 0
        for name in low():
            rows = max(lowp.Recipe(name).row_quantum, 16)
            weight = lowp.quantize(values((2 * rows, 256)), name)
            if any(spec.is_transpose for spec in weight.recipe.buffers(2 * rows, 256)):
                continue
            weight[:rows].copy_(lowp.quantize(values((rows, 256)) * 2, name))
            if weight._store._stale is None:
                continue
            seen += 1
            for other in (weight.clone(), copy.deepcopy(weight), torch.empty_like(weight).copy_(weight)):
                with self.subTest(name=name), self.assertRaisesRegex(lowp.LowpError, "another scale"):
                    other.dequantize()
        self.assertGreater(seen, 0)

    def test_initial_values(self):
        layer = nn.Linear(384, 256, bias=False)
        lowp.quantize_model_(layer, "mxfp8-2d")
        torch.manual_seed(1)
        nn.init.normal_(layer.weight, std=0.02)
        torch.manual_seed(1)
        expected = torch.empty(SHAPE).normal_(std=0.02)
        self.assertTrue(torch.equal(layer.weight, lowp.quantize(expected, "mxfp8-2d")))
        self.assertTrue(torch.equal(layer.weight.master, expected))

    def test_values_that_are_written_in_place(self):
        layer = nn.Linear(384, 256, bias=False)
        lowp.quantize_model_(layer, "mxfp8-2d")
        weight, plain = layer.weight.detach(), torch.ones(SHAPE)
        for write in (torch.Tensor.zero_, lambda w: w.fill_(3.0), lambda w: w[:32].fill_(5.0), lambda w: w.__setitem__(slice(64, 128), 7.0)):
            write(weight)
            write(plain)
            same = lowp.quantize(plain, "mxfp8-2d")
            rows = slice(0, 32) if plain.unique().numel() > 1 else slice(None)
            self.assertTrue(torch.equal(weight.dequantize()[rows], same.dequantize()[rows]))
        # Operations whose first part is written before another one is refused.
        for make in (nn.init.trunc_normal_, lambda w: nn.init.trunc_normal_(w, a=1, b=2), nn.init.orthogonal_):
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"in a plain tensor, and copy them with .copy_\(values\): values that such a call wrote .* are not undone"):
                make(layer.weight)
            weight.copy_(make(torch.empty(SHAPE)))
            self.assertTrue(torch.equal(weight, lowp.quantize(layer.weight.master, "mxfp8-2d")))

    def test_plain_tensors_come_of_zeros_like(self):
        weight = lowp.quantize(values(), "mxfp8")
        for made in (torch.zeros_like(weight), weight.new_empty(3), torch.ones_like(weight, dtype=torch.float64)):
            self.assertIs(type(made), torch.Tensor)

    def test_what_is_not_exact_is_named(self):
        weight = lowp.quantize(values(), "mxfp8")
        for name, call in (
            ("aten.add", lambda: weight + 1),
            ("aten.mm", lambda: torch.mm(weight, weight)),
            ("axis 1", lambda: weight[:, 32:]),
            ("axis 1", lambda: weight.chunk(2, dim=1)),
            ("view", lambda: weight.view(128, -1)),
            ("as_strided", lambda: torch.as_strided(weight, (2, 2), (1, 1))),
            ("multiples of 16", lambda: lowp.quantize(values(), "nvfp4-2d", four_over_six="mse")[1:]),
            ("dtype|torch.int8", lambda: weight.to(torch.int8)),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(lowp.LowpError, name):
                call()
        with self.assertRaises(lowp.UnsupportedOp):
            weight * 2
        with self.assertRaises(NotImplementedError):
            weight * 2

    def test_memory_of_its_own_is_refused(self):
        import ctypes
        import numpy

        weight = lowp.quantize(values(), "mxfp8")
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        for name, call in (
            ("share_memory_", weight.share_memory_),
            ("share_memory_", layer.share_memory),
            ("numpy", weight.numpy),
            ("numpy", lambda: weight.numpy(force=True)),
            ("__array__", lambda: numpy.asarray(weight)),
            ("__dlpack__", weight.__dlpack__),
            ("__dlpack_device__", lambda: torch.from_dlpack(weight)),
            ("tolist", weight.tolist),
            ("storage", weight.storage),
            ("an assignment to .data", lambda: setattr(weight, "data", torch.zeros(SHAPE))),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(lowp.UnsupportedOp, f"^{name} of a lowp.Tensor, .*; [a-z]"):
                call()
        address = weight.data_ptr()
        for use in (lambda: address == 0, lambda: address + 4, lambda: address % 16, lambda: hex(address), lambda: address < 1, lambda: bool(address)):
            with self.assertRaisesRegex(lowp.UnsupportedOp, r"^data_ptr\(\) of a lowp.Tensor, .*; decode"):
                use()
        for read in (lambda: ctypes.cast(address, ctypes.c_void_p), lambda: ctypes.c_void_p(address), lambda: ctypes.c_ubyte.from_address(address)):
            with self.assertRaises((TypeError, ctypes.ArgumentError)):
                read()
        # Sizes alone, which torch.distributed.checkpoint asks for.
        self.assertEqual(weight.untyped_storage().size(), weight.nbytes)
        with self.assertRaises(RuntimeError):
            weight.untyped_storage().data_ptr()
        self.assertEqual(layer.double().weight.dtype, torch.float64)

    def test_data_ptr_tells_tensors_apart(self):
        weight = lowp.quantize(values(), "mxfp8")
        own = weight.data_ptr()
        self.assertEqual({weight.detach().data_ptr(): "own"}[torch.nn.Parameter(weight).data_ptr()], "own")
        for other in (weight.clone(), weight[:32], torch.ones(1)):
            self.assertNotEqual(own, other.data_ptr())
        # Also when other tensors may have its place in memory.
        del weight
        self.assertNotIn(own, [lowp.quantize(values(), "mxfp8").data_ptr() for _ in range(10)])

    def test_data_that_is_assigned(self):
        layer = nn.Linear(384, 256, bias=False)
        lowp.quantize_model_(layer, "mxfp8")
        param, other = layer.weight, lowp.quantize(values(), "mxfp8", keep_master=True).bfloat16()
        param.data = other
        self.assertIs(layer.weight, param)
        self.assertEqual((param.dtype, param.data_ptr()), (torch.bfloat16, other.data_ptr()))
        layer(torch.ones(2, 384, dtype=torch.bfloat16)).sum().backward()
        self.assertEqual(param.grad.dtype, torch.bfloat16)
        other.detach().zero_()
        self.assertFalse(param.master.any())
        for wrong in (lowp.quantize(values(), "fp8-current"), other[:32]):
            with self.assertRaisesRegex(lowp.LowpError, "was assigned to .data of one of"):
                param.data = wrong

    def test_sources_that_do_not_fit(self):
        for message, call in (
            ("columns", lambda: lowp.quantize(torch.ones(4, 5), "mxfp8")),
            ("there is no recipe 'mxfp9'", lambda: lowp.quantize(values(), "mxfp9")),
            ("colour", lambda: lowp.quantize(values(), "mxfp8", colour="red")),
            ("1 axes", lambda: lowp.quantize(torch.ones(4), "mxfp8")),
            *((f"values of {dtype}; .*float16", lambda dtype=dtype: lowp.quantize(torch.ones(32, 32).to(dtype), "mxfp8")) for dtype in REFUSED),
            ("values of torch.float64", lambda: lowp.quantize(values(), "mxfp8").quantize_(values().double())),
            ("^weight: values of torch.float64.*ignore=", lambda: lowp.quantize_model_(nn.Linear(32, 32).double(), "mxfp8")),
            ("layout torch.sparse_coo; give dense", lambda: lowp.quantize(torch.ones(32, 32).to_sparse(), "mxfp8")),
            ("values must be a torch.Tensor, not a list", lambda: lowp.quantize([[1.0]], "mxfp8")),
            ("None is not a recipe", lambda: lowp.quantize(values(), None)),
            ("world_size=-1", lambda: lowp.plan("mxfp8", 64, 64, -1)),
            ("rows='a'", lambda: lowp.plan("mxfp8", "a", 64, 1)),
            ("is already quantized; give .*master", lambda: lowp.quantize(lowp.quantize(values(), "mxfp8"), "fp8-current")),
            ("is already quantized; give .*master", lambda: lowp.quantize(values(), "mxfp8").quantize_(lowp.quantize(values(), "mxfp8"))),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(lowp.LowpError, message):
                call()


class Files(unittest.TestCase):
    def test_saved_tensors_are_loaded_to_the_bit(self):
        for name in low():
            with self.subTest(name=name):
                weight = nn.Parameter(lowp.quantize(values(), name, keep_master=True))
                file = io.BytesIO()
                torch.save({"weight": weight}, file)
                file.seek(0)
                loaded = torch.load(file, weights_only=True)["weight"]
                self.assertTrue(torch.equal(loaded, weight))
                self.assertEqual(loaded.recipe, weight.recipe)
                self.assertTrue(torch.equal(loaded.master, weight.master))

    def test_files_name_what_must_be_imported(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "state.pt")
            torch.save(layer.state_dict(), file)
            load = f"torch.load({file!r}, weights_only=True)"
            run = lambda text: subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
            self.assertIn("add_safe_globals([lowp._tensor._rebuild])", run(f"import torch; {load}").stderr)
            self.assertEqual(run(f"import torch, lowp; {load}").returncode, 0)

    def test_files_of_other_buffers_are_refused(self):
        weight = lowp.quantize(values((64, 64)), "mxfp8", keep_master=True)
        rebuild, state = weight.__reduce_ex__(2)
        self.assertTrue(torch.equal(rebuild(*state), weight))
        buffers, master = weight.buffers, weight.master
        data = "rowwise_data"
        bytes = buffers[data].numel()
        other = lambda buffer: (*state[:4], {**buffers, data: buffer}, *state[5:])
        for message, changed in (
            ("int8", other(buffers[data].view(torch.int8))),
            ("contiguous", other(torch.zeros(1, dtype=torch.uint8).expand(bytes))),
            ("contiguous", other(torch.zeros(2 * bytes, dtype=torch.uint8)[::2])),
            ("contiguous", other(buffers[data].view(64, 64))),
            ("list", other([0] * bytes)),
            ("meta", other(buffers[data].to("meta"))),
            ("has the buffers", (*state[:4], {data: buffers[data]}, *state[5:])),
            ("has the buffers none", (*state[:4], {}, *state[5:])),
            ("master", (*state[:5], master[:32], state[6])),
            ("master", (*state[:5], master.double(), state[6])),
            ("master", (*state[:5], master.t(), state[6])),
            ("dtype", (*state[:2], torch.int32, *state[3:])),
            ("int|dtype", (*state[:2], None, *state[3:])),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(lowp.LowpError, message):
                rebuild(*changed)
        names, context = weight.__tensor_flatten__()
        inner = {name: getattr(weight, name) for name in names}
        self.assertTrue(torch.equal(lowp.Tensor.__tensor_unflatten__(inner, context, None, None), weight))

    def test_state_dicts(self):
        nets = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
        for net in nets:
            lowp.quantize_model_(net, "mxfp8-2d")
        self.assertFalse(torch.equal(nets[0][0].weight, nets[1][0].weight))
        nets[1].load_state_dict(nets[0].state_dict())
        for a, b in zip(nets[0].parameters(), nets[1].parameters()):
            self.assertTrue(torch.equal(a, b))
        self.assertTrue(torch.equal(nets[0][0].weight.master, nets[1][0].weight.master))
        # A checkpoint in bfloat16 of the model before it was quantized.
        plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        nets[1].load_state_dict(plain.state_dict())
        self.assertTrue(torch.equal(nets[1][0].weight, lowp.quantize(plain[0].weight, "mxfp8-2d")))

    def test_distributed_checkpoints_of_other_numbers_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            names = ("mxfp8-2d", "mxfp8", "fp8-current", "nvfp4-2d")
            ranks.run(2, save, folder, names)
            for world in (1, 3):
                with self.subTest(world=world):
                    ranks.run(world, load, folder, names)


def sharded(name, seed):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 192, bias=False))
    whole = lowp.quantize(net[0].weight.detach(), name)
    lowp.quantize_model_(net, name, keep_master=False)
    fully_shard(net)
    return net, whole


def save(rank, world, folder, names):
    import torch.distributed.checkpoint as dcp

    for name in names:
        dcp.save({"net": sharded(name, 1)[0].state_dict()}, checkpoint_id=f"{folder}/{name}")


def load(rank, world, folder, names):
    for name in names:
        _load(rank, world, f"{folder}/{name}", name)


def _load(rank, world, folder, name):
    import torch.distributed.checkpoint as dcp

    net, _ = sharded(name, 2)
    _, whole = sharded(name, 1)
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    local = net[0].weight._local_tensor
    expected = whole[rank * 192 // world : (rank + 1) * 192 // world]
    for key, buffer in local.buffers.items():
        assert torch.equal(buffer, expected.buffers[key]), (name, key, world)


class Models(unittest.TestCase):
    def test_linear_multiplies_by_decoded_codes(self):
        for name in low():
            with self.subTest(name=name):
                layer = nn.Linear(384, 256)
                weight = lowp.quantize(layer.weight.detach(), name)
                lowp.quantize_model_(layer, name)
                x = torch.randn(2, 3, 384, requires_grad=True)
                out = layer(x)
                torch.testing.assert_close(out, nn.functional.linear(x, weight.dequantize(), layer.bias))
                grad = torch.randn_like(out)
                out.backward(grad)
                torch.testing.assert_close(x.grad, grad @ weight.dequantize(orientation="columnwise"))
                expected = grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
                torch.testing.assert_close(layer.weight.grad, expected)
                torch.testing.assert_close(layer.bias.grad, grad.flatten(0, 1).sum(0))

    def test_autocast(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(torch.randn(2, 64))
        self.assertEqual(out.dtype, torch.bfloat16)
        out.float().sum().backward()
        self.assertEqual(layer.weight.grad.dtype, torch.float32)

    def test_what_is_chosen(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(64, 64)
                self.body, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 64)
                self.lm_head.weight = self.body.weight

        net = Net()
        with self.assertRaisesRegex(lowp.LowpError, r"body.weight is tied to lm_head.weight, which.*ignore=\['body.weight'\]"):
            lowp.quantize_model_(net, "mxfp8", ignore=["lm_head"])
        self.assertIs(net.lm_head.weight, net.body.weight)
        self.assertEqual(lowp.quantize_model_(Net(), "mxfp8", ignore=["lm_head", "body"]), [])
        net = Net()
        net.alias = net.body  # a module in two places
        self.assertEqual(lowp.quantize_model_(net, "mxfp8"), ["body.weight", "lm_head.weight"])
        self.assertIs(net.lm_head.weight, net.body.weight)

    def test_embeddings_that_are_tied_stay_tied(self):
        net = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
        net[2].weight = net[0].weight
        with self.assertRaisesRegex(lowp.LowpError, r"2.weight is tied to 0.weight, which.*ignore=\['2.weight'\]"):
            lowp.quantize_model_(net, "mxfp8")
        self.assertEqual(lowp.quantize_model_(net, "mxfp8", ignore=["2"]), ["1.weight"])
        self.assertIs(net[2].weight, net[0].weight)

    def test_weights_that_others_multiply_by_are_refused(self):
        for message, name, net in (
            ("MultiheadAttention", "self_attn.out_proj.weight", nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)),
            ("parametrization", "0.weight", nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))),
            ("no shape yet", "0.weight", nn.Sequential(nn.LazyLinear(64))),
        ):
            with self.subTest(name=name):
                with self.assertRaisesRegex(lowp.LowpError, f"^{name} .*{message}.*ignore=.'{name}'"):
                    lowp.quantize_model_(net, "mxfp8")
                lowp.quantize_model_(net, "mxfp8", ignore=[name])
                for train in (True, False):
                    net.train(train)(torch.randn(2, 3, 64))

    def test_a_second_call_leaves_codes_as_they_are(self):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.assertEqual(lowp.quantize_model_(net, "mxfp8", ignore=["1"]), ["0.weight"])
        first, before = net[0].weight, net[0].weight.detach().clone()
        self.assertEqual(lowp.quantize_model_(net, "mxfp8"), ["1.weight"])
        self.assertEqual(lowp.quantize_model_(net, lowp.Recipe("mxfp8")), [])
        self.assertIs(net[0].weight, first)
        self.assertTrue(torch.equal(first, before))
        for recipe in ("fp8-current", "mxfp8-2d"):
            with self.assertRaisesRegex(lowp.LowpError, f"^0.weight already has codes of .*mxfp8.*, not of .*{recipe}.*ignore=.'0.weight'"):
                lowp.quantize_model_(net, recipe)
        self.assertEqual(lowp.quantize_model_(net, "fp8-current", ignore=["*"]), [])

    def test_errors_change_nothing(self):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(30, 64))
        with self.assertRaisesRegex(lowp.LowpError, "1.weight: .*ignore="):
            lowp.quantize_model_(net, "mxfp8")
        self.assertNotIsInstance(net[0].weight, lowp.Tensor)
        with self.assertRaisesRegex(lowp.LowpError, "matches no module"):
            lowp.quantize_model_(net, "mxfp8", ignore=["lm_haed"])

    def test_a_model_without_linear_layers_is_warned_of(self):
        with self.assertWarnsRegex(UserWarning, "no torch.nn.Linear in Sequential, and quantized nothing"):
            self.assertEqual(lowp.quantize_model_(nn.Sequential(nn.Conv1d(2, 2, 1)), "mxfp8"), [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lowp.quantize_model_(nn.Linear(32, 32), "mxfp8", ignore=["*"])


class StoredAndSent(unittest.TestCase):
    def test_a_plan_says_what_is_stored_and_sent(self):
        plan = lowp.plan("mxfp8-2d", 4096, 4096, 8)
        self.assertEqual((plan["stored"], plan["sent"]), (16793600, 33587200))
        self.assertEqual(plan["fsdp2"], [2099200, 2099200])
        self.assertIn("shared_data", str(plan))
        # Rows within blocks send codes alone.
        self.assertEqual(lowp.plan("mxfp8-2d", 100, 64, 3)["fsdp2"], [34 * 64] * 2)
        self.assertIn("multiples of 16", lowp.plan("nvfp4-2d", 100, 64, 3, four_over_six="mse")["fsdp2"])

    def test_what_layers_return_may_be_written_to(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        for shape in ((16, 64), (2, 8, 64), (64,)):
            x = torch.randn(shape, requires_grad=True)
            out = layer(x)
            out += 1
            out.relu_().sum().backward()
            self.assertEqual(x.grad.shape, x.shape)

    def test_codes_are_no_inputs_of_layers(self):
        codes, plain = lowp.quantize(torch.randn(64, 64), "mxfp8"), torch.randn(64, 64)
        linear = torch.nn.functional.linear
        for call in (lambda: linear(codes, plain), lambda: linear(codes, codes), lambda: linear(plain, codes, lowp.quantize(plain, "mxfp8"))):
            with self.assertRaisesRegex(lowp.UnsupportedOp, "the input or bias of a linear layer"):
                call()


if __name__ == "__main__":
    unittest.main()
