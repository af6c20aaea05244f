"""FLOPs of kernels, which HLO shows as custom calls."""

import math
import re

from jaxrl_llm.plan.hlo import Computation, Instruction

__all__ = ["grouped", "kernel_flops"]

# Matrix products per (query, key) pair and half: of softmax attention, causal, so half of all pairs count.
_ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
_NONE = re.compile(r"Sharding|AllocateBuffer|ConcatBitcast|AssumeGather|TopK|Sort|Pad|Slice|Annotate|MoveTo|Buffer")
_TRITON = re.compile(r'name = "grouped_(multiply|accumulate)"')  # of models/experts/triton_matmul.py


def grouped(i: Instruction) -> bool:
    """Whether it is the kernel of a grouped matmul, which skips rows past the last group."""
    return i.opcode == "custom-call" and ("gmm" in i.name or _TRITON.search(i.attributes) is not None)


def kernel_flops(inside: Computation, i: Instruction) -> float | None:
    """What the kernel states (a Pallas kernel's cost estimate), otherwise what is known of it by name; None: unknown.

    Sources: a cuBLAS call carries its contracting dimensions; attention by the count of its products, forward
    q k^T and w v, backward per FlashAttention-2 (arXiv 2307.08691, section 3.1). A grouped matmul multiplies each row
    by the matrix of its group.
    """
    target = i.attribute("custom_call_target").strip('"')
    stated = re.search(r'cost_estimate":\{"flops":"?(\d+)', i.attributes)
    if stated:
        return float(stated[1])
    arrays = [inside.by_name[name].shapes[0] for name in i.operands if inside.by_name[name].shapes]
    shapes = [array.dims for array in arrays]
    if grouped(i):
        return 2.0 * math.prod(shapes[0]) * i.shapes[0].dims[-1]
    if target.startswith("__cublas"):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        dims = re.findall(r"\d+", contracted[1]) if contracted else []
        return 2.0 * i.shapes[0].size * math.prod(shapes[0][int(d)] for d in dims)
    if target.startswith("__cudnn$fmha"):
        b, h, t, d = i.shapes[0].dims  # of the result; operands may be [b t h d]
        masks = [math.prod(dims[2:]) for dims in shapes if len(dims) == 4 and dims[1:3] == (1, t)]
        pairs = t * t / 2 if '"CAUSAL"' in i.attributes else next(iter(masks), t * t)
        return 2.0 * (5 if "Backward" in target else 2) * b * h * pairs * d
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
