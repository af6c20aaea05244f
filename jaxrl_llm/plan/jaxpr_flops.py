"""FLOPs of a traced program: its matrix products, with every loop body counted as often as it runs.

XLA's own `cost_analysis` counts the body of a loop once, whatever its bound.
"""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def flops_of(jaxpr: Any, devices: int) -> tuple[float, float]:
    """(FLOPs outside loops of a run-time bound, FLOPs of one turn of the outermost such loops), over all devices.

    Micro-batches and decode steps are such loops; one inside another (the refilling of slots) is not counted. A loop in
    the named scope `usually_once`, as the rounds of expert_parallel.py, is one turn wherever it stands; a loop of a
    known bound is a scan. Of a branch the costliest side counts, of a kernel every block of its grid.

    Args:
      jaxpr: of `jax.stages.Traced`.
      devices: each runs the body of a `shard_map` once.
    """
    once, turn = 0.0, 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = [flops_of(getattr(one, "jaxpr", one), devices) for one in jaxprs_in_params(params)]
        if name == "cond":
            inner = [max(inner)]
        first, second = map(sum, zip(*inner, strict=True)) if inner else (_products(eqn), 0.0)
        times = {"scan": params.get("length"), "shard_map": devices}.get(name, 1)
        if name == "pallas_call":
            times = _blocks(eqn)
        if name == "while" and not str(eqn.source_info.name_stack).endswith("usually_once"):
            turn += first
        else:
            once, turn = once + times * first, turn + times * second
    return once, turn


def _blocks(eqn: Any) -> int:
    """Blocks of a kernel's grid. A size that only the run knows is at most the length of the operands that list the
    blocks, as megablox lists the tiles of its groups."""
    mapping = eqn.params["grid_mapping"]
    first = mapping.num_dynamic_grid_bounds
    lists = eqn.invars[first : first + mapping.num_index_operands]
    most = max((math.prod(variable.aval.shape) for variable in lists), default=1)
    return math.prod(size if isinstance(size, int) else most for size in mapping.grid)


def _products(eqn: Any) -> float:
    """2 x (entries of the result) x (entries summed for each); 0 of what is no matrix product."""
    name = eqn.primitive.name
    if not (name.startswith("ragged_dot") or name in ("dot_general", "conv_general_dilated")):
        return 0.0
    left, right = (variable.aval.shape for variable in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        spec = eqn.params["dimension_numbers"].rhs_spec
        return 2.0 * out * math.prod(right) / right[spec[0]]
    numbers = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return 2.0 * out * math.prod(left[axis] for axis in numbers[0][0])
