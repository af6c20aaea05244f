"""A rollout, its scores and an update on eight devices against one: a line of JSON for each cell that is asked for.

python -m tests.reference.eight_devices '[["moe", "blocks", "R3", [1, 2, 2, 2], "padded"]]', with eight devices in
XLA_FLAGS.

A cell is the kind of model, the experts' implementation, the replay, the mesh (data, fsdp, expert, tensor[, context])
and the layout. One device runs the dense form. Errors are of the largest value.
"""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import optax

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_rollout
from tests.reference import tiny_training as tiny

BOUND = tiny.TIME - tiny_rollout.PROMPTS.shape[1]
EXPERTS = 8
LIMITS = np.minimum([8, 1, 3, 5, 2, 4, 7, 2], BOUND)


@functools.cache
def learner(kind, implementation, mesh, rows="padded"):
    """SGD at rate 1: the change of the parameters is minus the gradient."""
    fields = {"num_experts": EXPERTS} if kind == "moe" else {"num_experts": 0, "decoder_sparse_step": 1}
    model = tiny.make_model(mesh, experts_implementation=implementation, **fields)
    aux_coef = 0.1 if kind == "moe" else 0.0
    return Learner(model, objectives.make("gspo"), optax.sgd(1.0), aux_coef=aux_coef, rows=rows)


@functools.cache
def answers(kind, implementation, mesh):
    """Two groups of four answers of at most so many tokens, without their rewards."""
    model = learner(kind, implementation, mesh).model
    engine = Engine(model, Sampling(), tiny.GROUP, BOUND, end_ids=(tiny_rollout.VOCABULARY,))
    prompts = [x[:2] for x in (tiny_rollout.PROMPTS, tiny_rollout.LENGTHS, tiny_rollout.UIDS)]
    return engine.generate(tiny.draw_params(model), *prompts, jax.random.key(1), LIMITS)


@functools.cache
def update(kind, implementation, replay, mesh, shape):
    """(old log-probs, experts replayed or None, loss, gradient) of the answers of one device."""
    one = learner(kind, implementation, mesh, rows="packed" if shape == "packed" else "padded")
    first = jax.device_get(answers(kind, "dense", None))
    first = first.replace(rewards=np.random.default_rng(0).random(tiny.ROWS).astype(np.float32))
    lengths = np.sum(first.segment_ids > 0, axis=1)
    updates = dataclasses.replace(tiny.UPDATES, layout=shape)
    layout = tiny.lay_out(np.arange(tiny.ROWS), lengths, tiny.TIME, updates)
    params = tiny.draw_params(one.model)
    scorer = Scorer(one, ReplayConfig(replay, "experts"), tiny.GROUP)
    scored, _ = tiny.learned(scorer, make_state(one.model, params, one.optimizer), None, first, [layout])
    replayed = None if replay == "off" else np.asarray(scored.routes.replayed.experts)
    before = jax.device_get(params)  # the update takes their place
    shift = 0.3 * np.random.default_rng(3).normal(size=(tiny.ROWS, tiny.TIME)).astype(np.float32)
    moved = scored.replace(old_logprobs=scored.old_logprobs + shift)  # a first loss would be about 0
    after, metrics = one.update(make_state(one.model, params, one.optimizer), moved, layout)
    gradient = jax.tree.map(np.subtract, before, jax.device_get(after.trained.policy))
    return np.asarray(scored.old_logprobs), replayed, M.finalize(metrics)["loss/total"], gradient


def error(found, wanted):
    """Largest difference over the largest value, of the worst leaf."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((found, wanted))), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs)


def compare(kind, implementation, replay, mesh, shape):
    here, there = answers(kind, implementation, mesh), answers(kind, "dense", None)
    same = {"tokens": np.array_equal(here.tokens, there.tokens)}
    if kind == "moe":
        same["routing"] = np.array_equal(here.routes.sampled.experts, there.routes.sampled.experts)
    found, wanted = update(kind, implementation, replay, mesh, shape), update(kind, "dense", replay, None, "padded")
    if replay != "off":
        same["replayed"] = np.array_equal(found[1], wanted[1])
    errors = {"sampler_logprobs": error(here.sampler_logprobs, there.sampler_logprobs)}
    errors |= {"old_logprobs": error(found[0], wanted[0]), "loss": error(found[2], wanted[2])}
    errors["gradient"] = error(found[3], wanted[3])
    return {"same": same, "errors": errors, "trained": all(np.abs(x).max() > 0 for x in jax.tree.leaves(wanted[3]))}


def main():
    assert jax.device_count() == 8, "set XLA_FLAGS=--xla_force_host_platform_device_count=8"
    for kind, implementation, replay, mesh, shape in json.loads(sys.argv[1]):
        print(json.dumps(compare(kind, implementation, replay, tuple(mesh), shape)), flush=True)


if __name__ == "__main__":
    main()
