"""A dense layer with GELU in the place of SiLU (Gemma 3, arXiv 2503.19786). Loaded where a config has it."""

import functools
from typing import Any

import jax

from jaxrl_llm.ground.array_typing import Array, Float
from jaxrl_llm.models.experts.moe import SwiGLU
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import project


class GeGLU(SwiGLU):
    """gelu(x W_gate) * (x W_up) W_down, GELU by its approximation with tanh (Shazeer, arXiv 2002.05202)."""

    def __call__(self, x: Float[Array, "b t d"], seen: Seen, replay: None) -> tuple[Float[Array, "b t d"], None]:
        """Return the output; there is no routing."""
        del seen, replay
        return _gated(project(x, self.gate[...]), project(x, self.up[...]), self.down[...]), None


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: Float[Array, "b t f"], up: Float[Array, "b t f"], down: Any) -> Float[Array, "b t d"]:
    return project(jax.nn.gelu(gate, approximate=True) * up, down)
