"""FLOPs of one compiled instruction: matrix products, convolutions, and kernels, which HLO shows as custom calls."""

import math
import re

from experiments.scale.hlo import Computation, Instruction

# Matrix products per (query, key) pair and half: of softmax attention, causal, so half of all pairs count.
_ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
_NONE = re.compile(r"Sharding|AllocateBuffer|ConcatBitcast|AssumeGather|TopK|Sort|Pad|Slice|Annotate|MoveTo|Buffer")
_TRITON = re.compile(r'name = "grouped_(multiply|accumulate)"')  # of models/experts/triton_matmul.py


def flops_of(inside: Computation, i: Instruction) -> float | None:
    """None for a kernel that may compute much and does not say how much."""
    if i.opcode == "custom-call":
        return _kernel(inside, i)
    if i.opcode not in ("dot", "convolution", "ragged-dot"):
        return 0.0
    left, right = (inside.by_name[name].shapes[0].dims for name in i.operands[:2])
    out = math.prod(i.shapes[0].dims)
    if i.opcode == "ragged-dot":
        return 2.0 * out * left[-1] * right[0]  # as XLA:CPU runs it: every row against every group
    if i.opcode == "dot":
        contracted = i.attribute("lhs_contracting_dims")
        return 2.0 * out * math.prod(left[int(d)] for d in contracted.split(",") if d)
    return _convolution(i, left, right)


def grouped(i: Instruction) -> bool:
    """True for the kernel of a grouped matmul, which skips rows past the last group."""
    if i.opcode != "custom-call":
        return False
    mosaic = i.attribute("custom_call_target").strip('"').startswith("mosaic_gpu")  # of tokamax, the only one there is
    return mosaic or "gmm" in i.name or _TRITON.search(i.attributes) is not None


def _convolution(i: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """2 x (batch) x (output features) x (input features of a group) x the pairs (place, tap) that meet no padding."""
    inputs, kernel, output = re.split(r"_|->", i.attribute("dim_labels"))
    window = dict(pair.split("=") for pair in i.attribute("window").split())
    shape = i.shapes[0].dims

    def of(key: str, axis: int, default: str) -> str:
        return window[key].split("x")[axis] if key in window else default

    pairs = 1
    for axis in range(len(inputs) - 2):
        size, taps = left[inputs.index(str(axis))], right[kernel.index(str(axis))]
        stride, low = int(of("stride", axis, "1")), int(of("pad", axis, "0_0").split("_")[0])
        spread, apart = int(of("lhs_dilate", axis, "1")), int(of("rhs_dilate", axis, "1"))
        places = (
            place * stride - low + tap * apart for place in range(shape[output.index(str(axis))]) for tap in range(taps)
        )
        pairs *= sum(0 <= p < (size - 1) * spread + 1 and p % spread == 0 for p in places)
    groups = int(i.attribute("batch_group_count") or 1)
    batch, features = shape[output.index("b")], shape[output.index("f")]
    return 2.0 * batch * features * right[kernel.index("i")] * pairs / groups


def _kernel(inside: Computation, i: Instruction) -> float | None:
    """FLOPs that a kernel states (a Pallas kernel's cost estimate), else those known by its name; None: unknown.

    Sources: a cuBLAS call carries its contracting dimensions; attention by the count of its products, forward
    q k^T and w v, backward per FlashAttention-2 (arXiv 2307.08691, section 3.1). A grouped matmul multiplies each row
    by the matrix of its group.
    """
    if stated := re.search(r'cost_estimate":\{"flops":"?(\d+)', i.attributes):
        return float(stated[1])
    target = i.attribute("custom_call_target").strip('"')
    arrays = [inside.by_name[name].shapes[0] for name in i.operands if inside.by_name[name].shapes]
    shapes = [array.dims for array in arrays]
    if grouped(i):
        return 2.0 * math.prod(shapes[0]) * i.shapes[0].dims[-1]
    if target.startswith("__cublas"):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        dims = re.findall(r"\d+", contracted[1]) if contracted else []
        return 2.0 * math.prod(i.shapes[0].dims) * math.prod(shapes[0][int(d)] for d in dims)
    if target.startswith("__cudnn$fmha"):
        b, h, t, d = i.shapes[0].dims  # of the result; operands may be [b t h d]
        masks = [math.prod(dims[2:]) for dims in shapes if len(dims) == 4 and dims[1:3] == (1, t)]
        pairs = t * t / 2 if '"CAUSAL"' in i.attributes else next(iter(masks), t * t)
        return 2.0 * (5 if "Backward" in target else 2) * b * h * pairs * d
    if 'name = "mha_forward"' in i.attributes:  # of a decode step: queries [n g d], keys [n splits columns d]
        return 4.0 * math.prod(shapes[0]) * math.prod(shapes[1][1:3])
    if i.name.startswith("ragged-dot-metadata"):  # of a grouped matmul: which group a tile belongs to
        return 0.0
    label = i.name + i.attributes[: i.attributes.find("backend_config")]
    for name, products in _ATTENTION.items():
        if name in label:
            # [.. heads, time, head_dim]; other operands tell blocks of the mask. Where devices share a row the kernel
            # has some of its queries, spread evenly, and all keys.
            queries, keys, *_ = (a.dims for a in arrays if len(a.dims) > 2 and a.dtype.startswith(("f", "bf")))
            return 1.0 * products * math.prod(queries) * keys[-2]
    return 0.0 if _NONE.search(target) or not target.startswith(("tpu_custom_call", "__", "triton")) else None
