"""The package on GPUs: `python3 crates/lowp-python/tests/gpu.py`, where the wheel with CUDA kernels is installed.

Ranks are as many as there are GPUs; with one, the tests of two are left out and say so. Tests of products are in gpu_products.py.
"""

import datetime
import gc
import threading
import time
import unittest

import torch
import torch.distributed as dist
from torch import nn

import lowp
import model
import ranks
import test_moments
from gpu_products import SCALED, Products, ScaledProducts, scaled

DEVICE = torch.device("cuda", 0)


def low():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


class Casts(unittest.TestCase):
    def test_bytes_are_those_of_the_cpu(self):
        for name in low():
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(name=name, dtype=dtype):
                    torch.manual_seed(1)
                    source = (torch.randn(512, 768) * torch.logspace(-4, 3, 768)).to(dtype)
                    here, there = lowp.quantize(source, name), lowp.quantize(source.to(DEVICE), name)
                    for key, buffer in here.buffers.items():
                        self.assertTrue(torch.equal(buffer, there.buffers[key].cpu()), key)
                    for orientation in ("rowwise", "columnwise"):
                        a, b = (t.dequantize(orientation=orientation) for t in (here, there))
                        self.assertTrue(torch.equal(a, b.cpu()), orientation)

    def test_the_current_stream_is_respected(self):
        stream = torch.cuda.Stream()
        source = torch.randn(4096, 4096, device=DEVICE)
        expected = lowp.quantize(source * 3, "mxfp8")
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(stream):
                late = source.clone()
                for _ in range(20):
                    late = late * 1.0
                found = lowp.quantize(late * 3, "mxfp8")
            stream.synchronize()
            self.assertTrue(torch.equal(found, expected))

    def test_products_of_codes_are_near_those_of_values(self):
        for name in ("fp8-current", "fp8-delayed"):
            with self.subTest(name=name):
                torch.manual_seed(2)
                layer = nn.Linear(512, 256, device=DEVICE, dtype=torch.bfloat16)
                plain = nn.Linear(512, 256, device=DEVICE, dtype=torch.bfloat16)
                plain.load_state_dict(layer.state_dict())
                lowp.quantize_model_(layer, name)
                x = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16)
                found = []
                for net in (layer, plain):
                    own = x.clone().requires_grad_()
                    out = net(own)
                    out.backward(torch.ones_like(out) / 64)
                    found.append((out, own.grad, net.weight.grad, net.bias.grad))
                for a, b in zip(*found):
                    self.assertLess((a.float() - b.float()).norm() / b.float().norm(), 0.08)


class Steps(unittest.TestCase):
    def test_steps_are_those_of_the_cpu(self):
        for name in low():
            with self.subTest(name=name):
                nets = []
                for device in ("cpu", DEVICE):
                    torch.manual_seed(0)
                    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128, bias=False)).to(device)
                    lowp.quantize_model_(net, name)
                    nets.append((net, lowp.AdamW(net.parameters(), lr=1e-2, max_norm=0.5)))
                for step in range(4):
                    for (here, _), (there, _) in [nets]:
                        torch.manual_seed(step)
                        for a, b in zip(here.parameters(), there.parameters()):
                            a.grad = torch.randn(a.shape)
                            b.grad = a.grad.to(DEVICE)
                    for _, opt in nets:
                        opt.step()
                (here, own), (there, other) = nets
                for a, b in zip(here.parameters(), there.parameters()):
                    if isinstance(a, lowp.Tensor):
                        for key, buffer in a.buffers.items():
                            self.assertTrue(torch.equal(buffer, b.buffers[key].cpu()), (name, key))
                    else:
                        self.assertTrue(torch.equal(a, b.cpu()), name)
                self.assertEqual(own.last_step(), other.last_step())

    def test_steps_of_muon_are_nearly_those_of_the_cpu(self):
        # Products add up in another order; momenta are of one element each.
        nets = []
        for device in ("cpu", DEVICE):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(256, 384, bias=False), nn.Linear(384, 128, bias=False)).to(device)
            lowp.quantize_model_(net, "mxfp8", ignore=["1"])
            nets.append((net, lowp.Muon(net.parameters(), lr=0.02)))
        (here, own), (there, other) = nets
        begun = [lowp.dequantize_state_dict(here, masters=True)[key].clone() for key in here.state_dict()]
        for step in range(4):
            torch.manual_seed(step)
            for a, b in zip(here.parameters(), there.parameters()):
                a.grad = torch.randn(a.shape)
                b.grad = a.grad.to(DEVICE)
            own.step()
            other.step()
        for a, b, first in zip(here.parameters(), there.parameters(), begun):
            (a_state, b_state), values = (own.state[a], other.state[b]), (a, b)
            self.assertTrue(torch.equal(a_state["momentum_buffer"], b_state["momentum_buffer"].cpu()))
            mine, theirs = (state.get("master", value).detach().cpu() for state, value in zip((a_state, b_state), values))
            self.assertLess((mine - theirs).norm(), 0.02 * (mine - first).norm())

    def test_moments_of_another_dtype_are_those_of_the_cpu(self):
        of = test_moments.States()
        for dtypes in ((test_moments.FP8, torch.float32), (torch.bfloat16, test_moments.FP8)):
            found = []
            for device in ("cpu", DEVICE):
                (_, saved), (_, opt) = (of.trained(dtype, device=device) for dtype in dtypes)
                opt.load_state_dict(saved.state_dict())
                found.append([value.cpu() for state in opt.state_dict()["state"].values() for value in state.values()])
            for a, b in zip(*found, strict=True):
                self.assertTrue(torch.equal(a, b), (dtypes, a.shape))

    def test_a_captured_step_is_a_step(self):
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            net = nn.Linear(256, 256, device=DEVICE)
            lowp.quantize_model_(net, "mxfp8-2d")
            for param in net.parameters():
                param.grad = torch.zeros(param.shape, device=DEVICE)
            nets.append((net, lowp.AdamW(net.parameters(), lr=1e-2, capturable=True)))
        grads = [[torch.randn(p.shape, device=DEVICE) for p in nets[0][0].parameters()] for _ in range(5)]

        def take(net, numbers):
            for param, grad in zip(net.parameters(), numbers):
                param.grad.copy_(grad)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            take(nets[0][0], grads[0])
            nets[0][1].step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            nets[0][1].step()
        for numbers in grads[1:]:
            take(nets[0][0], numbers)
            graph.replay()
        for numbers in grads:
            take(nets[1][0], numbers)
            nets[1][1].step()
        torch.cuda.synchronize()
        for a, b in zip(nets[0][0].parameters(), nets[1][0].parameters()):
            self.assertTrue(torch.equal(a, b))

    def test_memory_that_comes_and_goes(self):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(DEVICE)
        lowp.quantize_model_(net, "fp8-current")
        opt = lowp.AdamW(net.parameters(), lr=1e-3)
        for step in range(30):
            trash = [torch.empty(1 << (10 + step % 8), device=DEVICE) for _ in range(step % 5)]
            net(torch.randn(64 + 16 * (step % 3), 256, device=DEVICE)).square().mean().backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            del trash
        self.assertEqual(opt.last_step()["steps"], 30)


class Devices(unittest.TestCase):
    @unittest.skipIf(torch.cuda.device_count() < 2, "one GPU: that of a program is the one of its model")
    def test_the_current_device_of_a_program_stays(self):
        failures = []

        def train():
            device, current = torch.device("cuda", 1), torch.cuda.current_device()

            def check(what):
                if torch.cuda.current_device() != current:
                    failures.append((name, what))
                    torch.cuda.set_device(current)

            for name in ("fp8-current", "mxfp8-2d"):
                # Alone, this test has no call on a GPU before the first layer.
                net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
                lowp.quantize_model_(net, name)
                net.to(device)
                net(torch.randn(32, 256, device=device))
                check("the first layer")
                lowp.quantize(torch.randn(256, 256, device=device), name)
                check("quantize")
                opt = lowp.AdamW(net.parameters(), max_norm=1.0)
                for _ in range(2):
                    out = net(torch.randn(32, 256, device=device))
                    check("forward")
                    out.square().sum().backward()
                    check("backward")
                    opt.step()
                    check("step")
                    opt.last_step()
                    check("last_step")
                    opt.state_dict()
                    check("state_dict")
                net[0].weight.detach().dequantize()
                check("dequantize")
                del net, opt, out
                gc.collect()
                check("the end of a model")

        train()
        # One that has no context yet.
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        self.assertEqual(failures, [])


def gathered(rank, world, shape):
    import test_fsdp2
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in low():
        for reshard in (True, False):
            rows = max(lowp.Recipe(name).row_quantum, 16) * shape[-1]
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(256, rows, bias=False)).to(device)
            whole = lowp.quantize(net[0].weight.detach(), name)
            lowp.quantize_model_(net, name)
            fully_shard(net[0], mesh=mesh, reshard_after_forward=reshard)
            fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
            for _ in range(3):
                x = torch.randn(16, 256, device=device, requires_grad=True)
                y = test_fsdp2.Check(net[0], whole)(net, x)
                y.sum().backward()
                expected = torch.ones(16, rows, device=device) @ whole.dequantize(orientation="columnwise")
                error = (x.grad - expected).norm() / expected.norm()
                assert error < (0.08 if name.startswith("fp8-") else 1e-3), (name, reshard, error)
    return True


def scaled_rank(rank, world, compiled):
    """Layers that FSDP2 gathers: products are those of the whole weight's codes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (world,))
    for name in SCALED:
        for reshard in (True, False):
            torch._dynamo.reset()
            # 128 rows of the weight are the smallest number that both phases can be cut at.
            layer, x, grad = scaled(name, (144, 272, 384 * world), bias=False, device=device)
            whole = nn.Linear(272, 384 * world, bias=False, device=device, dtype=torch.bfloat16)
            lowp.quantize_model_(whole, name)
            with torch.no_grad():
                whole.weight.copy_(layer.weight)
            net = nn.Sequential(torch.compile(layer, fullgraph=True) if compiled else layer)
            fully_shard(net[0], mesh=mesh, reshard_after_forward=reshard)
            fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
            for _ in range(3):
                own, other = (x.clone().requires_grad_() for _ in range(2))
                out, expected = net(own), whole(other)
                assert torch.equal(out, expected), (name, reshard, "forward")
                out.backward(grad)
                expected.backward(grad)
                assert torch.equal(own.grad, other.grad), (name, reshard, "gradient of the input")
                of_weight = layer.weight.grad.full_tensor()
                error = (of_weight.float() - whole.weight.grad.float()).norm() / whole.weight.grad.float().norm()
                assert error < 1e-2, (name, reshard, error)
                layer.weight.grad = whole.weight.grad = None
    return True


def train(rank, world, name):
    losses, _ = model.train(name, 50, rank=rank, world=world, fsdp=True, device=torch.device("cuda", rank))
    return losses


def grouped(rank, world):
    """Gathers of groups beside those that FSDP2 does: the bits, how often, and the most bytes that were allocated."""
    import test_group
    from torch.distributed.device_mesh import init_device_mesh

    how = dict(mesh=init_device_mesh("cuda", (world,)), device=torch.device("cuda", rank), blocks=4)
    cases = [(name, 1024, 2048, name in SCALED) for name in low()]
    counts = test_group.compared(rank, world, cases, **how)
    ahead = [test_group.train(rank, *cases[0][:3], True, here, prepare=test_group.ahead, **how)[0] for here in (False, True)]
    test_group.same(*ahead, "gathers ahead")
    peaks = []
    for here in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        test_group.train(rank, "fp8-current", 2048, 8192, True, here, **how)
        peaks.append(torch.cuda.max_memory_allocated())
    return counts, peaks


def missing(rank, world):
    """Alternating experts: the steps of each, on every rank."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    net = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2)).to(torch.device("cuda", rank))
    lowp.quantize_model_(net, "mxfp8-2d")
    for layer in net:
        fully_shard(layer)
    opt = lowp.AdamW(net.parameters(), lr=1e-2, max_norm=1.0)
    for step in range(6):
        net[step % 3 == 2](torch.randn(32, 256, device=torch.device("cuda", rank))).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [int(state["step"]) for state in opt.state_dict()["state"].values()], opt.last_step()["steps"]


def offloaded(rank, world):
    """Steps on the host beside those on the GPUs, to the bit."""
    import test_offload
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (world,))
    for case in [*((name, 256, 256) for name in low()), ("fp8-current", 49, 64), ("fp8-delayed", 33, 64), ("mxfp8", 95, 64)]:
        expected = test_offload.train(case[0], rank, *case[1:], device, mesh)
        for pinned in (True, False):
            found = test_offload.train(case[0], rank, *case[1:], device, mesh, CPUOffloadPolicy(pin_memory=pinned))
            test_offload.compare(found, expected, case, pinned)
            assert all(of.device.type == "cpu" for of in found[1]), (case, [of.device for of in found[1]])
    return True


def flat(rank, world):
    """Casts of flat slices: where memory stays, they are planned once."""
    from lowp import _flat

    device = torch.device("cuda", rank)
    for name in low():
        weights, masters, starts, wholes = [], [], [], []
        for number, shape in enumerate([(64, 96), (37, 160), (256, 512)]):
            torch.manual_seed(number)
            values = torch.randn(shape)
            wholes.append(lowp.quantize(values, name))
            weights.append(torch.empty_like(wholes[-1].to(device)))
            cuts = [values.numel() * r // world + (0 < r < world) for r in range(world + 1)]
            masters.append(values.flatten()[cuts[rank] : cuts[rank + 1]].to(device))
            starts.append(cuts[rank])
        planned = None
        for _ in range(3):
            lowp.cast_master_weights(weights, masters, starts)
            for weight, whole in zip(weights, wholes):
                assert torch.equal(weight.cpu(), whole), name
                weight.buffers[next(iter(weight.buffers))].zero_()
            found = len(_flat._casts_of(None) if world == 1 else _flat._CASTS[dist.group.WORLD])
            assert planned in (None, found), "a cast over the same memory was planned again"
            planned = found
    return True


def waits(rank, world):
    """Seconds until a rank raises the cause of another one, which failed in a hook and neither ends nor gathers again; and that cause."""
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", rank)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)]).to(device)
    lowp.quantize_model_(net, "fp8-current")
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    x = torch.randn(32, 256, device=device)
    net(x).sum().item()
    begun = time.time()

    def fail():
        raise RuntimeError("a hook failed on purpose")

    if rank == 1:
        net[1].weight._local_tensor._store.check_whole = fail
    found = "nothing was raised", 0.0
    try:
        for _ in range(3):
            net(x).sum().item()
            time.sleep(0.1)
    except (RuntimeError, lowp.LowpError) as error:
        found = str(error), time.time() - begun
    store = dist.distributed_c10d._get_default_store()
    store.set(f"raised {rank}", "")
    store.wait([f"raised {other}" for other in range(world)], datetime.timedelta(seconds=60))
    return found


class Ranks(unittest.TestCase):
    def worlds(self):
        worlds = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]
        if len(worlds) < 2:
            print("one GPU: two ranks are left out")
        return worlds

    def test_gathered_bytes_are_those_of_the_whole_tensor(self):
        for world in self.worlds():
            for shape in ((world,), (2, 2)) if world == 4 else ((world,),):
                with self.subTest(shape=shape):
                    self.assertTrue(all(ranks.run(world, gathered, shape, backend="nccl")))

    def test_groups_are_gathered_as_by_pytorch(self):
        for world in self.worlds()[1:]:
            with self.subTest(world=world):
                for counts, (of_torch, here) in ranks.run(world, grouped, backend="nccl"):
                    self.assertTrue(all(counts), counts)
                    self.assertLess(here, 1.01 * of_torch)

    @unittest.skipUnless(torch.cuda.get_device_capability(0) == (9, 0), "products with these scales are those of Hoppers")
    def test_gathered_weights_are_multiplied_by_their_scales(self):
        for world in self.worlds():
            for compiled in (False, True):
                with self.subTest(world=world, compiled=compiled):
                    self.assertTrue(all(ranks.run(world, scaled_rank, compiled, backend="nccl")))

    def test_rows_and_optimizer_on_the_host(self):
        for world in self.worlds():
            with self.subTest(world=world):
                self.assertTrue(all(ranks.run(world, offloaded, backend="nccl")))

    def test_flat_slices_are_cast_on_the_device(self):
        for world in self.worlds():
            with self.subTest(world=world):
                self.assertTrue(all(ranks.run(world, flat, backend="nccl")))

    def test_parameters_without_gradients(self):
        for world in self.worlds():
            with self.subTest(world=world):
                for found in ranks.run(world, missing, backend="nccl"):
                    self.assertEqual(found, ([4, 2], 6))

    def test_muon_over_ranks_is_that_of_one_process(self):
        expected = model.matrices_by_muon(0, 1, False, "cuda")
        for world in self.worlds()[1:]:
            with self.subTest(world=world):
                for found in ranks.run(world, model.matrices_by_muon, True, "cuda", backend="nccl"):
                    for a, b in zip(found, expected, strict=True):
                        self.assertTrue(torch.equal(a, b), a.shape)

    def test_moments_in_fp8_are_those_of_the_host(self):
        expected = test_moments.saves(0, 1, None, False)
        for world in self.worlds():
            with self.subTest(world=world):
                for found in ranks.run(world, test_moments.saves, None, True, (world,), "cuda", backend="nccl"):
                    for case, values in found.items():
                        for a, b in zip(values, expected[case], strict=True):
                            self.assertTrue(torch.equal(a, b), (case, a.shape))

    def test_a_rank_that_waits_raises_the_cause_of_another(self):
        if 2 not in self.worlds():
            return
        (waited, seconds), (failed, _) = ranks.run(2, waits, backend="nccl")
        self.assertEqual(failed, "a hook failed on purpose")
        self.assertIn("rank 1 failed between gathers: RuntimeError: a hook failed on purpose", waited)
        self.assertLess(seconds, 30)

    def test_ranks_train_what_one_process_trains(self):
        for name in ("mxfp8-2d", "nvfp4-2d", "fp8-current", *SCALED):
            alone, _ = model.train(name, 50, device=DEVICE)
            # Products of codes see other batches on other numbers of ranks, with other scales.
            near = 0.05 if name.startswith("fp8-") else 1e-3
            for world in self.worlds():
                with self.subTest(name=name, world=world):
                    for losses in ranks.run(world, train, name, backend="nccl"):
                        worst = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(alone, losses))
                        self.assertLess(worst, near)


if __name__ == "__main__":
    assert lowp.HAS_CUDA, "this wheel is for the CPU alone"
    unittest.main(verbosity=2)
