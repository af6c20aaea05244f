"""How long a program takes at the peaks of a chip, what bounds it, and the model-FLOPs utilisation that this allows."""

import dataclasses

from jaxrl_llm.plan.chips import Chip
from jaxrl_llm.plan.programs import Part


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds at the peaks. If compute, memory and network overlap completely, the time is the largest of the three.

    The model needs 2 x passes x active parameters x tokens FLOPs, without attention's products.
    """

    compute: float
    memory: float
    network: float
    excess: float  # FLOPs of all devices over the model's; 0 for a part that computes nothing
    mfu: float  # the model's FLOPs over what the chips could do in that time (PaLM, arXiv 2204.02311, appendix B)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def roofline(part: Part, chip: Chip, devices: int, active_parameters: int) -> Roofline:
    cost = part.cost
    times = (cost.flops / chip.flops, cost.bytes / chip.bandwidth, cost.sent / chip.network)
    model = 2.0 * part.passes * active_parameters * part.tokens / devices
    mfu = model / (max(times) * chip.flops) if max(times) else 0.0
    return Roofline(*times, excess=cost.flops / model if model else 0.0, mfu=mfu)
