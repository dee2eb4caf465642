"""``lowp.quantize`` beside the command, which writes the same bytes to files."""

import os
import subprocess
import tempfile
import unittest

import torch

import lowp

COMMAND = os.environ.get("LOWP")


def of_command(weight, recipe):
    """The tensors of the file that ``lowp quantize`` makes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        source, target = (os.path.join(folder, name) for name in ("in.safetensors", "out.safetensors"))
        save_file({"w": weight}, source)
        subprocess.run([COMMAND, "quantize", source, "-o", target, "--recipe", recipe, "--scales", "compact"], check=True, capture_output=True)
        with safe_open(target, "pt") as file:
            return {name.removeprefix("w."): file.get_tensor(name) for name in file.keys() if name.startswith("w.")}


@unittest.skipUnless(COMMAND, "LOWP names no command")
class Bytes(unittest.TestCase):
    def test_every_recipe_has_the_bytes_of_the_command(self):
        for name in lowp.recipes():
            if not lowp.Recipe(name).is_low_precision:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(name=name, dtype=dtype):
                    torch.manual_seed(3)
                    # Some blocks of zeros and wide ones among them.
                    weight = torch.randn(192, 256) * torch.logspace(-6, 3, 256)
                    weight[40:90, 64:160] = 0
                    weight = weight.to(dtype)
                    quantized, fields = lowp.quantize(weight, name), of_command(weight, name)
                    for own, buffer in quantized.buffers.items():
                        field = field_of(own, fields)
                        theirs = fields[field].contiguous().flatten().view(torch.uint8)
                        self.assertTrue(torch.equal(buffer, theirs), f"{own} beside {field}")


def field_of(own, fields):
    """The field of a file that is a buffer: docs/decisions/0005-files.md has the names."""
    if own in fields:
        return own
    if own == "tensor_scale":
        # The amax where block scales stand under it, the decode scale elsewhere.
        return "amax" if "rowwise_scale_inv" in fields and fields["rowwise_scale_inv"].numel() > 1 else "rowwise_scale_inv"
    if own.endswith("_amax"):
        return "amax" if own == "rowwise_amax" else "amax_columnwise"
    return own.replace("shared", "rowwise")


if __name__ == "__main__":
    unittest.main()
