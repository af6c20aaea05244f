"""One tiny model and one way to run an engine, shared by every test of the rollout."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.models import Model
from tests.reference.tiny_rollout import LENGTHS, PROMPTS, UIDS, tiny


@pytest.fixture(scope="session")
def model():
    return Model(tiny())


@pytest.fixture(scope="session")
def params(model):
    # A sharper head than at initialisation: the distribution is far from uniform.
    params = jax.jit(model.init)(jax.random.key(0))
    params["ends"]["head"] = params["ends"]["head"] * 2
    return params


@pytest.fixture(scope="session")
def sample(params):
    """Run an engine on the shared prompts, or on some of them in another order; the trajectory as NumPy arrays."""

    def run(engine, rows=slice(None), key=1, limits=None, params=params, uids=UIDS):
        key = jax.random.key(key)
        trajectory = engine.generate(params, PROMPTS[rows], LENGTHS[rows], uids[rows], key, limits)
        arrays = {name: x for name, x in vars(trajectory).items() if name != "routes"}
        fields = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        record = trajectory.routes.sampled
        experts = None if record is None else np.asarray(record.experts)
        return SimpleNamespace(**fields, experts=experts)

    return run
