"""TransformerEngine's C API by ctypes, with torch for the memory: its Python package is not needed."""

import ctypes as C
import glob
import lzma
import os
import subprocess
import sys
import tempfile

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
CHUNK = 2048 * 32                                               # of TransformerEngine's multi_tensor_applier
BYTE, I16, I32, F32, BF16, E4M3 = 0, 1, 2, 4, 6, 7                     # NVTEDType
PLAIN = 0                                                       # NVTEScalingMode
ROW, COL, SCALE, AMAX, ROW_INV, COL_INV = range(6)              # NVTETensorParam
POINTER, SIZE = C.c_void_p, C.c_size_t

te = loop = None            # the library and te_loop.so, once loaded
kept, handles = [], []      # tensors whose memory handles point to; the handles


class Shape(C.Structure):
    _fields_ = [("data", SIZE * 15), ("ndim", SIZE)]


class Basic(C.Structure):
    _fields_ = [("ptr", POINTER), ("dtype", C.c_int), ("shape", Shape)]


# ---------------------------------------------------------------- loading

def unpacked(folder):
    """The shared library that the .so.xz of `folder` holds, unpacked beside this process's other temporary files."""
    files = sorted(glob.glob(os.path.join(folder, "*.so.xz")))
    if len(files) != 1:
        raise OSError(f"{folder} holds {len(files)} files *.so.xz instead of one; benches/peers/fetch.py makes it")
    name = os.path.basename(files[0]).removesuffix(".xz")
    target = os.path.join(tempfile.gettempdir(), f"lowp-te-{os.getuid()}-{os.path.getsize(files[0])}-{name}")
    if not os.path.exists(target):
        partial = f"{target}.{os.getpid()}"
        with lzma.open(files[0]) as source, open(partial, "wb") as file:
            while block := source.read(1 << 16):
                if block.strip(b"\0"):
                    file.write(block)
                else:                       # leave holes for the zeros
                    file.seek(len(block), 1)
            file.truncate(file.tell())
        os.replace(partial, target)
    return target


def library_path(name):
    """Where the shared library `name` is: in this process already, in a wheel's folder, or elsewhere."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip()
            if os.path.basename(path) == name:
                return path
    places = [os.path.join(path, "nvidia", "*", "lib") for path in sys.path if path]
    places += [os.path.join(os.path.dirname(torch.__file__), "lib"), "/usr/local/cuda/lib64",
               "/usr/local/cuda-13*/lib64", "/usr/lib/x86_64-linux-gnu"]
    for place in places:
        for path in sorted(glob.glob(os.path.join(place, name))):
            return path
    return name


def stub(name, symbols):
    """A library called `name` whose functions do nothing, for a machine without it: none of them is called here."""
    path = os.path.join(tempfile.mkdtemp(prefix="te_stub"), name)
    code = "".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in symbols)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path, "-Wl,-soname," + name],
                   input=code.encode(), check=True)
    return path


def headers(nvrtc):
    """The first folder of CUDA headers with which the loaded NVRTC compiles what TransformerEngine includes."""
    programs = [os.path.join(path, "nvcc") for path in os.environ.get("PATH", "").split(":")]
    places = [os.environ.get("NVTE_CUDA_INCLUDE_DIR", ""), os.environ.get("CUDA_HOME", "") + "/include",
              "/usr/local/cuda/include", "/usr/local/cuda-13*/include"]
    places += [os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(program))), "include")
               for program in programs if os.path.exists(program)]
    places += [os.path.join(path, "nvidia", "cu13", "include") for path in sys.path if path]
    source = (b"#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_fp8.h>\n"
              b'extern "C" __global__ void k(__nv_fp8_e4m3 *p, float v) { *p = __nv_fp8_e4m3(v); }\n')
    for folder in [folder for place in places if place for folder in sorted(glob.glob(place))]:
        if not os.path.exists(os.path.join(folder, "cuda_runtime.h")):
            continue
        program = POINTER()
        if nvrtc.nvrtcCreateProgram(C.byref(program), source, b"probe.cu", 0, None, None):
            continue
        flags = (C.c_char_p * 3)(b"--std=c++17", b"--gpu-architecture=sm_90", b"-I" + folder.encode())
        failed = nvrtc.nvrtcCompileProgram(program, 3, flags)
        nvrtc.nvrtcDestroyProgram(C.byref(program))
        if not failed:
            return folder
    return None


# What the library is linked with, and the functions to stand in for those that may be missing.
NEEDED = {
    "libcudart.so.13": None,
    "libnvrtc.so.13": None,
    "libcublasLt.so.13": (),
    "libcublas.so.13": (),
    "libnccl.so.2": ("ncclGetVersion", "ncclGetErrorString", "ncclCommCount"),
    "libcudnn.so.9": ("cudnnCreate", "cudnnGetErrorString", "cudnnGetVersion", "cudnnSetStream"),
}


def load(folder):
    """Loads the library that is in `folder`, and te_loop.so; returns what to know about it."""
    global te, loop
    facts, held = {}, {}
    for name, symbols in NEEDED.items():
        path = library_path(name)
        try:
            if "nvrtc" in name:             # it finds its second half only if that is loaded already
                for half in sorted(glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*"))):
                    C.CDLL(half, mode=C.RTLD_GLOBAL)
            held[name] = C.CDLL(path, mode=C.RTLD_GLOBAL)
        except OSError as error:
            facts.setdefault("missing", []).append(f"{name}: {error}")
            if symbols is not None:
                held[name] = C.CDLL(stub(name, symbols), mode=C.RTLD_GLOBAL)
    # TransformerEngine compiles its cast+transpose and transpose kernels when they are first called.
    place = headers(held["libnvrtc.so.13"]) if "libnvrtc.so.13" in held else None
    if place:
        os.environ["NVTE_CUDA_INCLUDE_DIR"] = facts["headers"] = place
    else:
        os.environ["NVTE_DISABLE_NVRTC"] = "1"
        facts["headers"] = "none that NVRTC can use, so TransformerEngine's untuned transposing kernels run"
    os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "256")
    # ctypes binds every symbol at once, and the library wants one of cuBLASLt that is newer than
    # torch 2.11's cuBLAS and never called here: open it lazily.
    libc = C.CDLL(None)
    libc.dlopen.restype, libc.dlopen.argtypes = POINTER, [C.c_char_p, C.c_int]
    libc.dlerror.restype = C.c_char_p
    path = unpacked(folder)
    handle = libc.dlopen(path.encode(), os.RTLD_LAZY | os.RTLD_GLOBAL)
    if not handle:
        raise OSError((libc.dlerror() or b"dlopen failed").decode())
    te = C.CDLL(path, handle=handle)
    loop = C.CDLL(os.path.join(folder, "te_loop.so"))
    signatures()
    size = SIZE()
    te.nvte_get_tensor_param_v2(None, ROW, None, 0, C.byref(size))
    if size.value != C.sizeof(Basic):
        raise OSError(f"NVTEBasicTensor has {size.value} bytes in this library, not {C.sizeof(Basic)}: "
                      "another version of the C API")
    return facts


def signatures():
    p, i, f, z = POINTER, C.c_int, C.c_float, SIZE
    adam = [p, i, p, p, z, z, f, f, f, f, i, i, i, f]
    loop.tl_error.restype = C.c_char_p
    loop.tl_loop_abc.argtypes = [p, p, p, p, i, p]
    loop.tl_loop_ab.argtypes = [p, p, p, i, p]
    loop.tl_current.argtypes = [p, p, p, p, p, p, p, i, p]
    loop.tl_grouped_current.argtypes = [p, p, p, p, p, p, p]
    loop.tl_mxfp8_amax.argtypes = [p, p, p, p, i, i, i, p]
    loop.tl_mxfp8_cast.argtypes = [p, p, p, p, p, p, i, i, i, p]
    loop.tl_e8m0.argtypes = [p, i, p, z, z, p]
    loop.tl_adam.argtypes = [*adam, p]
    loop.tl_adam_fp8.argtypes = [*adam, i, p]
    te.nvte_create_tensor.restype, te.nvte_create_tensor.argtypes = p, [i]
    te.nvte_destroy_tensor.restype, te.nvte_destroy_tensor.argtypes = None, [p]
    te.nvte_set_tensor_param_v2.restype, te.nvte_set_tensor_param_v2.argtypes = None, [p, i, p, z]
    te.nvte_get_tensor_param_v2.restype, te.nvte_get_tensor_param_v2.argtypes = None, [p, i, p, z, p]
    te.nvte_create_grouped_tensor.restype, te.nvte_create_grouped_tensor.argtypes = p, [i, z, Shape]
    te.nvte_set_grouped_tensor_param.restype = None
    te.nvte_set_grouped_tensor_param.argtypes = [p, i, p, z]
    te.nvte_create_quantization_config.restype = p
    te.nvte_set_quantization_config_attribute.restype = None
    te.nvte_set_quantization_config_attribute.argtypes = [p, i, p, z]


# ---------------------------------------------------------------- handles

def shape_of(dims):
    return Shape((SIZE * 15)(*dims), len(dims))


def basic(tensor, dtype, dims=None):
    return Basic(tensor.data_ptr(), dtype, shape_of(tensor.shape if dims is None else dims))


def handle(mode, params):
    """An NVTETensor; params: {parameter: (torch tensor, NVTEDType[, shape])}."""
    made = te.nvte_create_tensor(mode)
    for which, spec in params.items():
        kept.append(spec[0])
        value = basic(*spec)
        te.nvte_set_tensor_param_v2(made, which, C.byref(value), C.sizeof(value))
    handles.append(made)
    return made


def plain(tensor, dtype, dims=None):
    return handle(PLAIN, {ROW: (tensor, dtype, dims)})


def array(pointers):
    made = (POINTER * len(pointers))(*pointers)
    kept.append(made)
    return made


def lists(*columns):
    """NVTETensor** for the multi-tensor functions, with its two sizes."""
    columns = [array(column) for column in columns]
    made = array([C.addressof(column) for column in columns])
    return C.addressof(made), len(columns), len(columns[0])


def config():
    """Scales of current scaling as they come: no powers of two, no epsilon."""
    made = te.nvte_create_quantization_config()
    for attribute, value in ((0, C.c_uint8(0)), (1, C.c_float(0.0))):
        te.nvte_set_quantization_config_attribute(made, attribute, C.byref(value), C.sizeof(value))
    return made


def release():
    """Destroys every handle, and frees what they pointed to."""
    for made in handles:
        te.nvte_destroy_tensor(made)
    handles.clear()
    kept.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def address(name):
    return C.cast(getattr(te, "nvte_" + name), POINTER)


def stream():
    return POINTER(torch.cuda.current_stream().cuda_stream)


def check(code):
    if code:
        raise RuntimeError(loop.tl_error().decode(errors="replace").strip())
