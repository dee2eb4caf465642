"""Which work of a peer stands beside which row of lowp, and what differs."""

# (operation, recipe or None for any, peer, work, marks). Without a lower-case mark the work is equal: the same
# dtypes come in and go out.
PAIRS = [
    ("adamw", None, "TE", "Adam", ""),
    ("adamw", None, "PyTorch", "AdamW(fused)", "a"),
    ("adamw, bf16+16 masters", None, "TE", "Adam, parameter remainders", ""),
    ("adamw, bf16 moments", None, "TE", "FusedAdam's bf16 moments", "H"),
    ("adamw, fp8 moments", None, "TE", "FusedAdam's FP8 moments", "H"),
    ("adamw + encode both", "fp8-delayed", "TE", "Adam with FP8, transposes", "A"),
    ("adamw + encode both", "fp8-delayed", "TE", "Adam with FP8 rowwise", "c"),
    ("adamw + encode both", "fp8-current", "TE", "Adam, grouped current scaling", "B"),
    ("adamw + encode both", "fp8-current", "TE", "FusedAdam's current scaling", "d"),
    ("adamw + encode both", "mxfp8", "TE", "Adam, quantize_master_weights mxfp8", "e"),
    ("adamw + encode both", None, "PyTorch", "AdamW(fused)", "ab"),
    ("encode bf16 both", "mxfp8", "TE", "mxfp8 partial cast, bf16 both", "f"),
    ("encode bf16 both", "mxfp8", "compiled", "mxfp8, bf16 both", ""),
    ("encode bf16 rowwise", "mxfp8", "compiled", "mxfp8, bf16 rowwise", ""),
    ("encode bf16 rowwise", "mxfp8", "torchao", "to_mx", ""),
    ("encode bf16 rowwise", "nvfp4-1d", "torchao", "nvfp4_quantize with amax", ""),
    ("transpose E4M3", None, "PyTorch", "byte transpose", ""),
]
for _dtype in ("bf16", "f32"):
    for _usage in ("both", "rowwise"):
        for _recipe, _kind in (("fp8-delayed", "known"), ("fp8-current", "current")):
            for _peer in ("TE", "compiled"):
                _work = f"fp8 {_kind} scale, {_dtype} {_usage}"
                PAIRS.append((f"encode {_dtype} {_usage}", _recipe, _peer, _work, ""))

# The peer whose times are under a bar.
BARRED = "TE"

NOTES = {
    "A": "lowp also rolls the amax history and makes the next scale of it",
    "B": "the kernels of the peer at their best: none of its optimizers makes these calls, which need contiguous masters of one shape",
    "G": "the peer's calls replayed as a CUDA graph, which was faster; an update in it repeats one step count",
    "H": "the peer's optimizer: moments become f32 in memory before the update and are rounded after it, tensor by tensor; its FP8 has one scale per tensor",
    "a": "the peer reads f32 gradients, lowp bf16",
    "b": "the peer only updates; lowp updates and writes both orientations",
    "c": "the peer writes rowwise codes only, lowp both orientations",
    "d": "the peer's optimizer: it converts gradients to f32 first, and calls tensor by tensor",
    "e": "the peer rounds masters to bf16 and encodes those, tensor by tensor, lowp the f32 masters",
    "f": "the peer's cast for sharded masters, which keeps amaxes of blocks in memory: it has no MXFP8 quantize for Hopper",
}


def is_equal_work(marks):
    return not any(mark.islower() for mark in marks)


def peers_of(row, measured):
    """The measurements that stand beside `row` (operation, recipe, shape), each with its marks."""
    operation, recipe, shape = row
    for its_operation, its_recipe, peer, work, marks in PAIRS:
        if its_operation == operation and its_recipe in (None, recipe):
            for line in measured:
                if (line["peer"], line["work"], line["shape"]) == (peer, work, shape):
                    yield line, marks
