"""How long a program takes at the peaks of a chip, what bounds it, and the model-FLOPs utilisation that this allows."""

import dataclasses

from jaxrl_llm.plan.programs import Part
from jaxrl_llm.plan.wires import Traffic, Wires


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds at the peaks. If compute, memory and network overlap completely, the time is the largest of the three.

    The model needs 2 x passes x active parameters x tokens FLOPs, without attention's products.
    """

    compute: float
    memory: float
    network: float  # of all collectives, one after the other
    traffic: tuple[Traffic, ...]
    excess: float  # FLOPs of all devices over the model's; 0 for a part that computes nothing
    mfu: float  # the model's FLOPs over what the chips could do in that time (PaLM, arXiv 2204.02311, appendix B)

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def roofline(part: Part, wires: Wires, active_parameters: int) -> Roofline:
    cost, chip, traffic = part.cost, wires.chip, tuple(wires.traffic(part.cost))
    times = (cost.flops / chip.flops, cost.bytes / chip.bandwidth, sum((row.seconds for row in traffic), 0.0))
    model = 2.0 * part.passes * active_parameters * part.tokens / wires.mesh.size
    mfu = model / (max(times) * chip.flops) if max(times) else 0.0
    return Roofline(*times, traffic=traffic, excess=cost.flops / model if model else 0.0, mfu=mfu)
