"""Rollouts on the mesh of training and on meshes of their own: seconds, and what it takes to move the parameters.

Command:  XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m experiments.performance.placement

A dense model of 101 M parameters in float32 (four wide layers, which compile soon), 8 answers of 64 tokens to prompts
of 32; the fastest of three turns.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

MODEL = ModelConfig(
    vocab_size=16384,
    num_hidden_layers=4,
    hidden_size=1024,
    intermediate_size=4608,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
)
PROMPTS, GROUP, PROMPT, ANSWER = 4, 2, 32, 64


def measure(model: Model, params: Any, shape: Sequence[int], turns: int) -> tuple[float, float, float]:
    """(bytes that a device holds, seconds of the move, seconds of a rollout) on a mesh of this shape."""
    mesh: Any = model.mesh
    sampler = Model(model.config, sharding.mesh_of_same_devices(mesh, shape, "--meshes"))
    never = model.config.vocab_size
    engine = Engine(sampler, Sampling(), GROUP, ANSWER, (never,), rows_on=mesh)
    prompts = np.random.default_rng(0).integers(0, never, (PROMPTS, PROMPT)).astype(np.int32)
    lengths, uids = np.full(PROMPTS, PROMPT, np.int32), np.arange(PROMPTS, dtype=np.uint32)
    moves, rollouts, held = [], [], 0
    for _ in range(turns + 1):  # the first compiles
        start = time.monotonic()
        prepared = jax.block_until_ready(engine.prepare(params))
        moved = time.monotonic()
        jax.block_until_ready(engine.generate(prepared, prompts, lengths, uids, jax.random.key(0)))
        moves.append(moved - start)
        rollouts.append(time.monotonic() - moved)
        held = sharding.local_bytes(prepared)
        del prepared
    return held, min(moves[1:]), min(rollouts[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=int, nargs=4, default=(1, 4, 1, 1), help="the mesh of the parameters")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    model = Model(MODEL, sharding.make_mesh(given.training))
    params = model.init_sharded(jax.random.key(0))
    print(f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.0f} M parameters, trained on {tuple(given.training)}")
    for shape in (given.training, (4, 1, 1, 1), (1, 1, 1, 4)):
        held, moved, rollout = measure(model, params, shape, given.turns)
        print(f"{tuple(shape)}: {held / 1e6:.0f} MB a device, moved in {moved:.2f} s, rollout {rollout:.2f} s")


if __name__ == "__main__":
    main()
