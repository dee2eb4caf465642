"""What the file commands write is what numpy and ml_dtypes say, on models that the safetensors package wrote."""

import json
import unittest

import ml_dtypes
import numpy as np

import models
import numerics
from numerics import COLUMNWISE, ROWWISE
from support import Bench

# Options of the command, and the same for the independent definition.
CASES = [
    ("fp8-current", [], {}),
    ("fp8-current", ["--format", "e5m2"], {"code": "e5m2"}),
    ("fp8-current", ["--pow2"], {"pow2": True}),
    ("fp8-delayed", [], {}),
    ("fp8-delayed", ["--delayed-scale", "3.7"], {"scale": np.float32(3.7)}),
    ("mxfp8", [], {}),
    ("mxfp8", ["--format", "e5m2"], {"code": "e5m2"}),
    ("mxfp8", ["--scale-mode", "ocp-floor"], {"mode": "ocp-floor"}),
    ("mxfp8-2d", [], {}),
    ("nvfp4-1d", [], {}),
    ("nvfp4-2d", [], {}),
]
PLAIN = [recipe for recipe in numerics.RECIPES]
FORMS = ["padded", "compact", "swizzled"]
USAGES = {"both": (ROWWISE, COLUMNWISE), ROWWISE: (ROWWISE,), COLUMNWISE: (COLUMNWISE,)}
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


def is_matrix(tensor):
    return tensor.ndim >= 2


def expected_file(tensors, recipe, form, usage="both", **options):
    """Every tensor of the output of `lowp quantize`."""
    expected = {}
    for name, tensor in tensors.items():
        if is_matrix(tensor):
            matrix = models.as_matrix(tensor)
            fields = numerics.quantize(matrix, recipe, form, USAGES[usage], **options)
            expected |= {f"{name}.{field}": array for field, array in fields.items()}
        else:
            expected[name] = tensor
    return expected


class Files(Bench):
    def setUp(self):
        super().setUp()
        self.weights = models.weights()
        models.write(self.folder / "model.safetensors", self.weights)

    def assert_file(self, name, expected, what):
        found, metadata = models.read(self.folder / name)
        self.assertEqual(sorted(found), sorted(expected), what)
        for tensor, array in expected.items():
            self.assert_same_bytes(found[tensor], array, f"{what}: {tensor}")
        return metadata

    def test_quantize(self):
        for recipe, args, options in CASES:
            for form in FORMS:
                what = f"{recipe} {args} {form}"
                self.lowp("quantize", "model.safetensors", "-o", "q.safetensors",
                          "--recipe", recipe, "--scales", form, *args)
                expected = expected_file(self.weights, recipe, form, **options)
                metadata = self.assert_file("q.safetensors", expected, what)
                self.assertEqual((metadata["format"], metadata["lowp.format"]), ("pt", "1"))
                for name in filter(lambda name: is_matrix(self.weights[name]), self.weights):
                    said = json.loads(metadata[f"lowp.tensor.{name}"])
                    tensor = self.weights[name]
                    self.assertEqual((said["recipe"], said["scales"]), (recipe, form))
                    self.assertEqual(said["shape"], list(tensor.shape))
                    self.assertEqual(said["dtype"], DTYPES[tensor.dtype])

    def test_quantize_one_orientation(self):
        for recipe in PLAIN:
            for usage in (ROWWISE, COLUMNWISE):
                self.lowp("quantize", "model.safetensors", "-o", "q.safetensors",
                          "--recipe", recipe, "--usage", usage)
                expected = expected_file(self.weights, recipe, "padded", usage)
                self.assert_file("q.safetensors", expected, f"{recipe} {usage}")

    def test_sharded_index(self):
        folder = self.folder / "hub"
        folder.mkdir()
        index = models.write_sharded(folder, self.weights, 3)
        for recipe in PLAIN:
            self.lowp("quantize", index, "-o", "q.safetensors", "--recipe", recipe)
            expected = expected_file(self.weights, recipe, "padded")
            self.assert_file("q.safetensors", expected, recipe)

    def test_dequantize(self):
        for recipe, args, options in CASES:
            self.lowp("quantize", "model.safetensors", "-o", "q.safetensors", "--recipe", recipe, *args)
            for usage in (ROWWISE, COLUMNWISE):
                self.lowp("dequantize", "q.safetensors", "-o", "d.safetensors", "--usage", usage)
                found, metadata = models.read(self.folder / "d.safetensors")
                self.assertEqual(metadata, {"format": "pt"})
                self.assertEqual(sorted(found), sorted(self.weights))
                for name, tensor in self.weights.items():
                    what = f"{recipe} {args} {usage}: {name}"
                    if is_matrix(tensor):
                        matrix = models.as_matrix(tensor)
                        values = numerics.cast(matrix, recipe, usage, "padded", **options).values
                        self.assert_same_values(found[name], values.reshape(tensor.shape), what)
                    else:
                        self.assert_same_bytes(found[name], tensor, what)

    def test_shard_and_unshard(self):
        for recipe, args, options in CASES:
            for world, form, usage in [(1, "compact", "both"), (3, "padded", ROWWISE), (13, "swizzled", "both")]:
                what = f"{recipe} {args} over {world}"
                ranks = self.folder / f"{recipe}{''.join(args)}-{world}"
                self.lowp("shard", "model.safetensors", "-o", ranks, "--world-size", world, "--recipe", recipe,
                          "--scales", form, "--usage", usage, *args)
                names = [f"rank-{rank:05}-of-{world:05}.safetensors" for rank in range(world)]
                self.assertEqual(sorted(path.name for path in ranks.iterdir()), names)
                expected = expected_file(self.weights, recipe, form, usage, **options)
                self.assert_rows([models.read(ranks / name) for name in names], expected, what)
                self.lowp("unshard", ranks, "-o", "u.safetensors")
                self.assert_file("u.safetensors", expected, what)

    def assert_rows(self, ranks, expected, what):
        """The rowwise codes of the ranks, one below another, are those of the whole; rank 0 has what passed through."""
        for name, tensor in self.weights.items():
            if not is_matrix(tensor):
                holders = [rank for rank, (tensors, _) in enumerate(ranks) if name in tensors]
                self.assertEqual(holders, [0], f"{what}: {name}")
                continue
            field = f"{name}.rowwise_data"
            joined = np.concatenate([tensors[field] for tensors, _ in ranks])
            self.assert_same_bytes(joined, expected[field], f"{what}: {field}")
            said = [json.loads(metadata[f"lowp.tensor.{name}"])["shard"] for _, metadata in ranks]
            ends = [shard["rows"][1] for shard in said]
            self.assertEqual([shard["rows"][0] for shard in said], [0, *ends[:-1]], what)

    def test_inspect(self):
        for recipe in PLAIN:
            self.lowp("quantize", "model.safetensors", "-o", "q.safetensors", "--recipe", recipe)
            text = self.lowp("inspect", "q.safetensors", "--reference", "model.safetensors")
            rows = [line.split() for line in text.split("\n\n")[2].splitlines()]
            column = {title: at for at, title in enumerate("tensor used scales min max zeros saturated rel max_error".split())}
            name = "model.layers.1.mlp.experts.down_proj"
            found = [row for row in rows if row[0] == name]
            # One row where both orientations share their codes or have them transposed.
            self.assertIn([row[column["used"]] for row in found], [[ROWWISE], [ROWWISE, COLUMNWISE]])
            for row in found:
                source = models.as_matrix(self.weights[name]).astype(np.float64)
                values = numerics.cast(source, recipe, row[column["used"]], "padded").values.astype(np.float64)
                off = values - source
                relative = np.sqrt(np.sum(off**2) / np.sum(source**2))
                self.assertAlmostEqual(float(row[column["rel"]]) / relative, 1, places=3, msg=recipe)
                self.assertAlmostEqual(float(row[column["max_error"]]) / np.abs(off).max(), 1, places=3, msg=recipe)

    def test_verify(self):
        self.lowp("quantize", "model.safetensors", "-o", "a.safetensors", "--recipe", "nvfp4-1d")
        tensors, metadata = models.read(self.folder / "a.safetensors")
        models.save_file(tensors, self.folder / "b.safetensors", metadata=metadata)
        self.assertTrue(self.lowp("verify", "a.safetensors", "b.safetensors").startswith("equal: "))
        field = "model.embed_tokens.weight.columnwise_data"
        tensors[field][5, 30] ^= 0x10
        models.save_file(tensors, self.folder / "b.safetensors", metadata=metadata)
        message = self.lowp("verify", "a.safetensors", "b.safetensors", code=1)
        # Byte 5 * 49 + 30 holds rows 60 and 61 of column 5.
        self.assertIn(f"'{field}' differs first at byte 275 (row 61, column 5, in block 3,5 of 16x1)", message)

    def test_what_a_recipe_cannot_take(self):
        tensors = self.weights | {
            "ids": np.arange(6, dtype=np.int64).reshape(2, 3),
            "double": np.ones((2, 32)),
            "narrow": np.ones((2, 33), np.float32),
        }
        models.write(self.folder / "mixed.safetensors", tensors)
        message = self.lowp("quantize", "mixed.safetensors", "-o", "q.safetensors", "--recipe", "mxfp8", code=2)
        self.assertIn("'double' cannot be quantized: its dtype is F64", message)
        self.assertFalse((self.folder / "q.safetensors").exists())
        self.lowp("quantize", "mixed.safetensors", "-o", "q.safetensors", "--recipe", "mxfp8", "--skip-unsupported")
        found, _ = models.read(self.folder / "q.safetensors")
        for name in ("ids", "double", "narrow"):
            self.assert_same_bytes(found[name], tensors[name], name)
        self.assertIn("zeros.rowwise_data", found)


if __name__ == "__main__":
    unittest.main()
