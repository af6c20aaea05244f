"""Samplers made different on purpose: rounded weights and another router, and what the trainer sees of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import EXACT, Router
from jaxrl_llm.rollout.engine import Engine, as_sampler
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import lay_out
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.slowly import first_quick

MODEL = tiny.make_model()


@pytest.fixture(scope="module")
def params():
    return tiny.draw_params(MODEL)


def test_float8_rounds_each_matrix_by_its_own_scale(params):
    """By hand: the largest entry 448 gives scale 1; e4m3 has three bits of mantissa, 1/32 apart from 0.25 to 0.5."""
    matrix = jnp.zeros_like(params["moe"]["mlp"]["gate"]).at[0, 0, 0, :2].set(jnp.array([448.0, 0.3]))
    matrix = matrix.at[0, 1, 0, :2].set(jnp.array([896.0, 0.3]))  # another expert: scale 2, 0.3 -> 0.15 -> 0.15625
    given = {**params, "moe": {**params["moe"], "mlp": {**params["moe"]["mlp"], "gate": matrix}}}
    model, rounded = as_sampler(MODEL, given, "float8_e4m3", EXACT)
    assert model == MODEL
    gate = rounded["moe"]["mlp"]["gate"]
    np.testing.assert_array_equal(gate[0, 0, 0, :2], [448, 0.3125])
    np.testing.assert_array_equal(gate[0, 1, 0, :2], [896, 0.3125])
    assert not np.any(gate[1:])
    np.testing.assert_array_equal(rounded["moe"]["mlp"]["router"], params["moe"]["mlp"]["router"])
    np.testing.assert_array_equal(rounded["moe"]["mlp_norm"]["scale"], params["moe"]["mlp_norm"]["scale"])
    assert rounded["ends"] is params["ends"]
    change = np.abs(rounded["moe"]["mlp"]["up"] - params["moe"]["mlp"]["up"])
    assert 0 < change.max() <= np.abs(params["moe"]["mlp"]["up"]).max() / 16  # half a step at the largest entry


@pytest.mark.parametrize(
    ("dtype", "gates"),
    first_quick(1, [("float8_e4m3", "same"), ("float32", "same"), ("float32", "exact")], several=True),
)
def test_noise_flips_experts_and_replaying_the_rollout_undoes_it(params, dtype, gates):
    """The trainer's experts differ from the sampler's, under R3 they are the same and the log-probs come closer: of
    noise on the choice alone, which is all that R3 replays, as close as rounding."""
    router = Router(noise=1.0, gates=gates)
    engine = Engine(MODEL, Sampling(), tiny.GROUP, tiny.ANSWER, end_ids=(1,), dtype=dtype, router=router)
    prompts = np.random.default_rng(0).integers(2, 16, (2, tiny.PROMPT)).astype(np.int32)
    lengths = np.array([3, 4], np.int32)
    out = engine.generate(params, prompts, lengths, np.arange(2, dtype=np.uint32), jax.random.key(0))
    again = engine.generate(params, prompts, lengths, np.arange(2, dtype=np.uint32), jax.random.key(0))
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    out = out.replace(rewards=jnp.arange(8.0))
    learner = Learner(MODEL, objectives.make("grpo", kl_coef=0.1), optax.sgd(1.0), rows="packed")
    width = np.asarray(out.segment_ids).sum(1)
    layout = lay_out(np.arange(tiny.ROWS), width, tiny.TIME, tiny.UPDATES)
    found = {}
    for mode in ("off", "R3"):
        scorer = Scorer(learner, ReplayConfig(mode, "experts"), tiny.GROUP)
        state = make_state(MODEL, params, learner.optimizer)
        scored, metrics = tiny.learned(scorer, state, Policy(params), out, [layout])
        found[mode] = M.finalize(metrics)
        if mode == "R3":
            fed = np.asarray(out.routes.sampled.experts) != 255
            used = np.asarray(scored.routes.scored.experts)
            np.testing.assert_array_equal(used[fed], np.asarray(out.routes.sampled.experts)[fed])
    assert found["off"]["routing/flips_sampler_old"] > 0.02
    assert found["R3"]["check/old_sampler_mean"] < found["off"]["check/old_sampler_mean"]
    if gates == "exact":
        assert found["R3"]["check/old_sampler_mean"] < 1e-6
