"""``lowp.load`` and ``lowp.save`` beside the command, which reads and writes the same files."""

import os
import subprocess
import tempfile
import unittest

import torch
from torch import nn

import lowp

COMMAND = os.environ.get("LOWP")
NARROW = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


def values(dtype=torch.float32):
    torch.manual_seed(3)
    made = torch.randn(192, 256) * torch.logspace(-6, 3, 256)
    made[40:90, 64:160] = 0
    return made.to(dtype)


def plain_model():
    """Layers that run as one, a matrix of three axes, and what is not quantized."""
    torch.manual_seed(4)
    return {
        "a.q_proj.weight": values() * 0.5,
        "a.k_proj.weight": values(torch.bfloat16),
        "a.v_proj.weight": values(torch.float16).clamp(-60000, 60000),
        "experts": torch.randn(2, 128, 128),
        "a.bias": torch.randn(7),
        "ids": torch.arange(12).view(3, 4),
        "mask": torch.tensor([[True, False]]),
        "nothing": torch.empty(0),
        "number": torch.tensor(3.5, dtype=torch.float64),
    }


def of_files(name):
    """The recipe that the command makes of a name: a file holds no gradients, so that their codes are those of weights."""
    return lowp.Recipe(name, **({"format": "e4m3"} if "format" in lowp.Recipe(name).options else {}))


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def bytes_of(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def lowp(self, *args):
        done = subprocess.run([COMMAND, *args], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout


@unittest.skipUnless(COMMAND, "LOWP names no command")
class Command(Files):
    def quantize(self, tensors, name, recipe, *options):
        from safetensors.torch import save_file

        save_file(tensors, self.path("in.safetensors"))
        self.lowp("quantize", self.path("in.safetensors"), "-o", self.path(name), "--recipe", recipe, *options)
        return self.path(name)

    def test_codes_of_every_recipe_are_those_of_the_command_in_both_directions(self):
        for name in NARROW:
            for dtype in (torch.float32, torch.bfloat16):
                for usage in ("both", "rowwise", "columnwise"):
                    with self.subTest(name=name, dtype=dtype, usage=usage):
                        weight, bias = values(dtype), torch.randn(5)
                        path = self.quantize({"w": weight, "b": bias}, "q.safetensors", name, "--usage", usage)
                        loaded, made = lowp.load(path), lowp.quantize(weight, of_files(name), usage=usage)
                        self.assertEqual(sorted(loaded), ["b", "w"])
                        self.assertTrue(torch.equal(loaded["b"], bias))
                        self.assertTrue(torch.equal(loaded["w"], made))
                        self.assertEqual((loaded["w"].dtype, loaded["w"].recipe), (dtype, made.recipe))
                        for what, codes in (("loaded", loaded["w"]), ("made", made), ("copied", made.clone())):
                            lowp.save(self.path("again.safetensors"), {"w": codes, "b": bias})
                            self.assertEqual(self.bytes_of("again.safetensors"), self.bytes_of("q.safetensors"), what)

    def test_models_are_quantized_as_by_the_command(self):
        for name in NARROW:
            with self.subTest(name=name):
                model = plain_model()
                path = self.quantize(model, "q.safetensors", name)
                lowp.save(self.path("own.safetensors"), model, name)
                self.assertEqual(self.bytes_of("own.safetensors"), self.bytes_of("q.safetensors"))
                loaded = lowp.load(path)
                self.assertEqual(list(loaded), sorted(model))
                for key, value in model.items():
                    if isinstance(loaded[key], lowp.Tensor):
                        self.assertEqual(loaded[key].shape, (value.numel() // value.shape[-1], value.shape[-1]))
                    else:
                        self.assertEqual(loaded[key].dtype, value.dtype)
                        self.assertTrue(torch.equal(loaded[key], value))
                kept = {key for key, value in loaded.items() if isinstance(value, lowp.Tensor)}
                self.assertEqual(kept, {"a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "experts"})

    def test_options_and_patterns_are_those_of_the_command(self):
        model = plain_model()
        self.quantize(model, "q.safetensors", "fp8-current", "--format", "e5m2", "--ignore", "a.*")
        lowp.save(self.path("own.safetensors"), model, "fp8-current", format="e5m2", ignore=["a.*"])
        self.assertEqual(self.bytes_of("own.safetensors"), self.bytes_of("q.safetensors"))

    def test_the_command_takes_what_was_trained(self):
        for name in NARROW:
            with self.subTest(name=name):
                torch.manual_seed(1)
                net = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128))
                lowp.quantize_model_(net, name)
                opt = lowp.AdamW(net.parameters(), lr=1e-2)
                for _ in range(2):
                    net(torch.randn(4, 128)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                path = self.path("q.safetensors")
                lowp.save(path, net.state_dict())
                self.assertIn("0.weight", self.lowp("inspect", path))
                self.lowp("dequantize", path, "-o", self.path("d.safetensors"), "--dtype", "f32")
                decoded = lowp.load(self.path("d.safetensors"))
                self.assertTrue(torch.equal(decoded["0.weight"], net[0].weight.detach().dequantize()))
                if name != "fp8-delayed":  # whose scale is of the steps before
                    lowp.save(self.path("m.safetensors"), lowp.plain_state_dict(net))
                    self.lowp("verify", path, "--source", self.path("m.safetensors"))

    def test_folders_and_indices_are_loaded(self):
        model = {"b": values(), "a": values() * 2}
        path = self.quantize(model, "folder", "mxfp8", "--max-shard-size", "150KB")
        self.assertTrue(os.path.exists(os.path.join(path, "model.safetensors.index.json")))
        for of in (path, os.path.join(path, "model.safetensors.index.json")):
            loaded = lowp.load(of)
            for name, value in model.items():
                self.assertTrue(torch.equal(loaded[name], lowp.quantize(value, "mxfp8")))

    def test_rank_files_are_refused(self):
        self.quantize({"w": values()}, "q.safetensors", "mxfp8")
        self.lowp("shard", self.path("in.safetensors"), "-o", self.path("ranks"), "--world-size", "2", "--recipe", "mxfp8")
        files = [name for name in os.listdir(self.path("ranks")) if name.endswith(".safetensors")]
        for of in (self.path("ranks"), os.path.join(self.path("ranks"), files[0])):
            with self.assertRaisesRegex(lowp.LowpError, "gather the folder"):
                lowp.load(of)


class Errors(Files):
    def test_files_that_are_none_say_so(self):
        with self.assertRaisesRegex(lowp.LowpError, "cannot read .*none.safetensors: No such file"):
            lowp.load(self.path("none.safetensors"))
        with self.assertRaisesRegex(lowp.LowpError, self.folder):
            lowp.load(self.folder)
        lowp.save(self.path("q.safetensors"), {"w": lowp.quantize(values(), "mxfp8")})
        whole = self.bytes_of("q.safetensors")
        for bad in (b"", b"abc", whole[:-1], whole[:100], whole + b"x", whole.replace(b"mxfp8", b"mxfp9")):
            with open(self.path("bad.safetensors"), "wb") as file:
                file.write(bad)
            with self.subTest(bytes=len(bad)), self.assertRaisesRegex(lowp.LowpError, "bad.safetensors"):
                lowp.load(self.path("bad.safetensors"))

    def test_a_save_that_fails_leaves_what_was_there(self):
        path = self.path("q.safetensors")
        lowp.save(path, {"w": torch.ones(3)})
        before = self.bytes_of("q.safetensors")
        net = nn.Linear(64, 64)
        for tensors, recipe, message in (
            ({"w": torch.ones(33, 7)}, "mxfp8", "'w': .*ignore="),
            ({"w": torch.ones(32, 32, dtype=torch.float64)}, "mxfp8", "only F32, BF16 and F16"),
            ({"w": 3}, None, "'w' is a int"),
            ({"w": torch.ones(2).to_sparse()}, None, "'w' is .*sparse"),
            ({"w": lowp.quantize(torch.ones(64, 64), "mxfp8"), "w.rowwise_data": torch.ones(2)}, None, "two output tensors"),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(lowp.LowpError, message):
                lowp.save(path, tensors, recipe)
            self.assertEqual(self.bytes_of("q.safetensors"), before)
        with self.assertRaisesRegex(lowp.LowpError, "matches no tensor"):
            lowp.save(path, net.state_dict(), "mxfp8", ignore=["head*"])
        with self.assertRaises(lowp.LowpError):
            lowp.save(os.path.join(self.folder, "no", "q.safetensors"), net.state_dict())
        self.assertEqual(os.listdir(self.folder), ["q.safetensors"])

    def test_tensors_keep_their_bytes(self):
        tied = torch.randn(6, 5)
        tensors = {"a": tied, "b": tied, "t": tied.t(), "p": nn.Parameter(torch.randn(2)), "e": torch.empty(0, 3)}
        lowp.save(self.path("p.safetensors"), tensors)
        for name, value in lowp.load(self.path("p.safetensors")).items():
            self.assertTrue(torch.equal(value, tensors[name]))

    def test_models_load_what_was_saved(self):
        for name in ("mxfp8", "fp8-current"):
            for quantized in (False, True):
                torch.manual_seed(1)
                nets = [nn.Sequential(nn.Linear(64, 64)) for _ in range(2)]
                values = {key: value.clone() for key, value in nets[0].state_dict().items()}
                for net in nets:
                    lowp.quantize_model_(net, name)
                # Also of a recipe that differs in gradients alone.
                lowp.save(self.path("q.safetensors"), nets[0].state_dict() if quantized else values, None if quantized else name)
                loaded = lowp.load(self.path("q.safetensors"))
                nets[1].load_state_dict(loaded)
                x = torch.randn(3, 64)
                self.assertTrue(torch.equal(nets[0](x), nets[1](x)))
                self.assertEqual(nets[1][0].weight.recipe, nets[0][0].weight.recipe)
        with self.assertRaisesRegex(lowp.LowpError, "dequantize and quantize again"):
            lowp.quantize(torch.ones(64, 64), "mxfp8").copy_(loaded["0.weight"])

    def test_rows_that_were_cut_out_keep_the_scale_of_the_whole(self):
        whole = torch.randn(256, 64)
        whole[200, 3] = 100.0
        for name in NARROW:
            for keep in (False, True):
                with self.subTest(name=name, keep=keep):
                    weight = lowp.quantize(whole, name, keep_master=keep)
                    found, rows = self.again(weight[:128]), weight[:128]
                    self.assertTrue(torch.equal(found.dequantize(), rows.dequantize()))
                    if weight.recipe.keeps_amax:
                        self.assertEqual(found._store.amax, 100.0)

    def again(self, weight):
        """A tensor that was saved and loaded."""
        lowp.save(self.path("again.safetensors"), {"w": weight})
        return lowp.load(self.path("again.safetensors"))["w"]

    def test_the_amax_of_codes_is_that_of_what_they_were_made_of(self):
        torch.manual_seed(6)
        for recipe in (lowp.Recipe("fp8-current"), lowp.Recipe("fp8-current", pow2=True), lowp.Recipe("fp8-delayed")):
            with self.subTest(recipe=recipe):
                net = nn.Sequential(nn.Linear(64, 64, bias=False))
                lowp.quantize_model_(net, recipe)
                weight, values = net[0].weight, torch.randn(64, 64) * 3.7
                self.assertIsNotNone(weight.master)
                lowp.save(self.path("q.safetensors"), {"0.weight": lowp.quantize(values, recipe)})
                net.load_state_dict(lowp.load(self.path("q.safetensors")))
                # The master has the values of codes now, whose largest is another.
                self.assertEqual(self.again(weight)._store.amax, values.abs().max())
                before = self.bytes_of("q.safetensors")
                lowp.save(self.path("q.safetensors"), net.state_dict())
                self.assertEqual(self.bytes_of("q.safetensors"), before)
                opt = lowp.AdamW([weight], lr=0.5)
                for _ in range(3):
                    weight.grad = torch.randn(64, 64)
                    opt.step()
                found = self.again(weight)
                self.assertTrue(torch.equal(found, weight))
                made = lowp.quantize(torch.full((1, 1), float(found._store.amax)), recipe)
                self.assertTrue(torch.equal(made.buffers["tensor_scale"], weight.buffers["tensor_scale"]))
                if recipe.name == "fp8-current":
                    self.assertEqual(found._store.amax, weight.master.abs().max())
                rows = self.again(weight[:32])
                self.assertTrue(torch.equal(rows.buffers["tensor_scale"], weight.buffers["tensor_scale"]))

    def test_values_that_are_views_are_those_of_the_view(self):
        view = torch.tensor([1 + 2j]).conj().imag
        self.assertTrue(view.is_neg())
        self.assertEqual(self.again(view), torch.tensor([-2.0]))


if __name__ == "__main__":
    unittest.main()
