"""How long a part of a program takes at the peaks of a chip, what bounds it, and the utilisation that this allows."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import kv_cache
from jaxrl_llm.plan.chips import Chip
from jaxrl_llm.plan.programs import Part
from jaxrl_llm.run.assembly import Run


@dataclasses.dataclass(frozen=True)
class Roofline:
    """FLOPs, bytes and seconds of one device at the peaks, without the network.

    The model needs 2 x passes x active parameters x tokens FLOPs, without attention's products.
    """

    flops: float
    bytes: float
    compute_s: float
    memory_s: float
    flops_over_model: float  # of all devices; 0 for a part that computes nothing
    mfu: float  # the model's FLOPs over what the chips could do in that time (PaLM, arXiv 2204.02311, appendix B)

    @property
    def seconds(self) -> float:
        """The larger time: computing and moving overlap completely."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"


def roofline(part: Part, flops: float, moved: float, chip: Chip, devices: int, active_parameters: int) -> Roofline:
    """The roofline of a part with so many FLOPs and bytes on each device."""
    compute, memory = flops / chip.flops, moved / chip.bandwidth
    model, longest = 2.0 * part.passes * active_parameters * part.tokens / devices, max(compute, memory)
    mfu = model / (longest * chip.flops) if longest else 0.0
    return Roofline(flops, moved, compute, memory, flops / model if model else 0.0, mfu)


def bytes_of(run: Run, part: Part) -> float:
    """Bytes that a part of a program must read and write on one device, by arithmetic.

    Weights count in the type that computes, gathered over the axes that share rows: once in a forward, three times in
    an update (forward, backward, gradients), for every micro-batch; an update also reads and writes what is trained and
    its moments in float32. A decode step reads the weights and the cache at its bound, a prefill writes its part of it.
    Activations are left out.
    """
    s, model = run.settings, run.sampler if part.name in ("move", "prefill", "decode") else run.model
    cuts = sharding.shards("heads", model.mesh) * sharding.shards("expert", model.mesh)
    dtype = s.rollout.dtype if model is run.sampler and part.passes == 1 else s.model.dtype
    size = 1 if dtype == "float8_e4m3" else jnp.dtype(dtype).itemsize
    entries = sum(x.size for x in jax.tree.leaves(model.shapes()))
    weights = entries * size / cuts
    if part.name == "move":
        return 2 * weights
    if part.name == "update":
        return 3 * weights * part.turns + 2 * 3 * 4 * entries / run.model.mesh.size  # pyright: ignore
    if part.name == "score":
        return weights * part.turns
    rows = -(-part.tokens // sharding.shards("rows", model.mesh))
    columns = rows if part.name == "prefill" else rows * (s.task.prompt_length + s.answer_length - 1)
    heads, *sizes = s.model.cached
    states = [kind.startswith("delta") for kind in s.model.kinds]
    column = states.count(False) * heads * sum(sizes) * size
    cache = columns * column / (sharding.shards("heads", model.mesh) if heads > 1 else 1)
    if any(states) and part.name == "decode":  # read and written
        state = jax.eval_shape(lambda: kv_cache.empty_state(s.model, rows))
        cache += 2 * states.count(True) * sum(x.size * x.dtype.itemsize for x in state)
    return weights + cache
