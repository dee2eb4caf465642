#!/usr/bin/env python3
"""Makes te_2.20.2_hopper.safetensors: what TransformerEngine 2.20.2 writes on a Hopper GPU.

  te_hopper.py LIB FILE           writes FILE
  te_hopper.py LIB FILE --check   makes the same again of the inputs in FILE, and names what differs

LIB is libtransformer_engine.so of the wheel transformer_engine_cu13 2.20.2; torch and safetensors must be
installed. The C API is called directly, so TransformerEngine's Python package is not needed. Its transposing
kernels are compiled at run time: name CUDA's headers in NVTE_CUDA_INCLUDE_DIR, or set NVTE_DISABLE_NVRTC=1.
torch's random numbers may differ in the last bit between versions; --check does not draw any.

Of each input: `fp8current`, the FP8 cast with current scaling (amax, scale from amax, cast with transpose), and
of the bf16 input `mxfp8_partial`, what `quantize_master_weights` runs for one rank that holds all rows (amaxes of
blocks, E8M0 scales, cast). Both E4M3, no power-of-two scales, epsilon 0.
"""
import ctypes
import sys

import torch
from safetensors.torch import load_file, save_file

ROWS, COLS = 256, 384
BYTE, F32, BF16, E4M3 = 0, 4, 6, 7                                  # NVTEDType
DELAYED = 0                                                         # NVTEScalingMode: one scale a tensor
ROW, COL, SCALE, AMAX, ROW_INV, COL_INV = range(6)                  # NVTETensorParam
CHUNK = 2048 * 32                                                   # elements of a multi-tensor launch


class Shape(ctypes.Structure):
    _fields_ = [('data', ctypes.c_size_t * 15), ('ndim', ctypes.c_size_t)]


class BasicTensor(ctypes.Structure):
    _fields_ = [('ptr', ctypes.c_void_p), ('dtype', ctypes.c_int), ('shape', Shape)]


class Te:
    """The calls of the library that make the file."""

    def __init__(self, path):
        # Lazily: cuBLAS symbols that nothing here calls may be newer than torch's cuBLAS.
        libc = ctypes.CDLL(None)
        libc.dlopen.restype, libc.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
        handle = libc.dlopen(path.encode(), 1 | 0x100)              # RTLD_LAZY | RTLD_GLOBAL
        if not handle:
            raise OSError(libc.dlerror().decode())
        self.lib = ctypes.CDLL(path, handle=handle)
        self.lib.nvte_create_tensor.restype = ctypes.c_void_p
        self.lib.nvte_create_quantization_config.restype = ctypes.c_void_p
        # By default scales are no powers of two and epsilon is 0.
        self.config = ctypes.c_void_p(self.lib.nvte_create_quantization_config())

    def tensor(self, params):
        """A tensor of the library; `params` are memory, type and shape of each of its parts."""
        made = ctypes.c_void_p(self.lib.nvte_create_tensor(DELAYED))
        for which, (memory, dtype, dims) in params.items():
            shape = Shape((ctypes.c_size_t * 15)(*dims), len(dims))
            part = BasicTensor(memory.data_ptr(), dtype, shape)
            size = ctypes.c_size_t(ctypes.sizeof(part))
            self.lib.nvte_set_tensor_param_v2(made, which, ctypes.byref(part), size)
        return made

    def plain(self, memory, dtype, dims=None):
        return self.tensor({ROW: (memory, dtype, dims or memory.shape)})

    def call(self, name, *args):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        getattr(self.lib, 'nvte_' + name)(*args, stream)
        torch.cuda.synchronize()

    def current(self, x):
        """FP8 of `x` with current scaling."""
        u8 = lambda *dims: torch.zeros(*dims, dtype=torch.uint8, device='cuda')
        one = lambda: torch.zeros(1, device='cuda')
        row, col, scale, inv, amax = u8(ROWS, COLS), u8(COLS, ROWS), one(), one(), one()
        params = {
            ROW: (row, E4M3, row.shape),
            ROW_INV: (inv, F32, inv.shape),
            SCALE: (scale, F32, scale.shape),
            COL: (col, E4M3, col.shape),
            COL_INV: (inv, F32, inv.shape),
        }
        source = self.plain(x, F32 if x.dtype == torch.float32 else BF16)
        meta = self.tensor({**params, AMAX: (amax, F32, amax.shape)})
        self.call('compute_amax_with_config', source, meta, self.config)
        self.call('compute_scale_from_amax', meta, self.config)
        self.call('quantize_v2', source, self.tensor(params), self.config)
        return {'row': row, 'col': col, 'scale_inv': inv, 'scale': scale, 'amax': amax}

    def mxfp8_partial(self, x):
        """MXFP8 of the bf16 matrix `x`, along rows and along columns; scales are padded, codes not transposed."""
        zeros = lambda dims, dtype: torch.zeros(*dims, dtype=dtype, device='cuda')
        # Padded to 128 along the outer axis and 4 along the blocks, which changes nothing for this shape.
        blocks = [(ROWS, COLS // 32), (ROWS // 32, COLS)]
        codes = [zeros((ROWS, COLS), torch.uint8) for _ in blocks]
        scales = [zeros(dims, torch.uint8) for dims in blocks]
        amaxes = [zeros(dims, torch.bfloat16) for dims in blocks]
        flat = (ROWS * COLS,)
        source = self.plain(x, BF16, flat)
        out = [self.plain(t, BYTE, flat) for t in codes]
        amax = [self.plain(t, BF16) for t in amaxes]
        scale = [self.plain(t, BYTE) for t in scales]
        size = [ctypes.c_int(ROWS), ctypes.c_int(COLS), ctypes.c_size_t(0)]
        self.call('mxfp8_scaling_compute_partial_amax', source, *amax, *size)
        lists = [(ctypes.c_void_p * 2)(*(t.value for t in pair)) for pair in (amax, scale)]
        lists = (ctypes.c_void_p * 2)(*map(ctypes.addressof, lists)), lists
        count = [ctypes.c_size_t(2), ctypes.c_size_t(2)]
        self.call('multi_tensor_compute_scale_inv_e8m0_cuda', CHUNK, lists[0], *count)
        self.call('mxfp8_scaling_partial_cast', source, *out, *scale, *size)
        return {'row': codes[0], 'row_inv': scales[0], 'col': codes[1], 'col_inv': scales[1]}


def drawn():
    """Values over 40 binades, with whole blocks of zeros along rows and along columns."""
    torch.manual_seed(7)
    torch.randn(ROWS, COLS)
    values = torch.randn(ROWS, COLS) * torch.exp2((torch.arange(ROWS) % 40 - 20).float())[:, None]
    values[3, :32], values[32:64, 5] = 0, 0
    return {'bf16': values.bfloat16(), 'f32': values}


def make(te, inputs):
    tensors = {}
    for name, host in inputs.items():
        x = host.cuda()
        made = {'input': x, **{'fp8current.' + k: t for k, t in te.current(x).items()}}
        if name == 'bf16':
            made.update({'mxfp8_partial.' + k: t for k, t in te.mxfp8_partial(x).items()})
        tensors.update({f'{name}.{key}': tensor.cpu() for key, tensor in made.items()})
    return tensors


def main(lib, path, check=None):
    if check not in (None, '--check'):
        sys.exit(__doc__)
    kept = load_file(path) if check else None
    inputs = {name: kept[name + '.input'] for name in ('bf16', 'f32')} if check else drawn()
    made = make(Te(lib), inputs)
    if not check:
        save_file(made, path)
        return
    same = lambda key: key in made and torch.equal(kept[key].view(torch.uint8), made[key].view(torch.uint8))
    different = sorted(set(made) - set(kept)) + [key for key in kept if not same(key)]
    print('\n'.join(f'differs: {key}' for key in different) or f'{len(made)} tensors, all equal')
    sys.exit(bool(different))


if __name__ == '__main__':
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
