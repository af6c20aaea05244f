"""Random answers for the tests of the objectives."""

import numpy as np

from jaxrl_llm import objectives


def make(name, **hyperparameters):
    if name == "dr_grpo":
        hyperparameters.setdefault("max_length", 8)
    return objectives.make(name, **hyperparameters)


def corrected(name, correction, **more):
    """The hyper-parameters of a sampler correction, none for a recipe whose ratio is taken to the sampler already."""
    return {} if "sampler_logprobs" in make(name).needs else {"correction": correction, **more}


def random_batch(seed=0, rows=4, length=6, spread=0.3):
    """Random arrays with a ragged mask (one row empty, one row full), a constant advantage an answer."""
    rng = np.random.default_rng(seed)
    old = np.log(rng.uniform(0.1, 0.9, (rows, length)))
    mask = rng.random((rows, length)) < 0.7
    mask[0], mask[-1] = True, False
    shift = rng.uniform(0, 0.4, (2, rows, length, 2))
    return {
        "logprobs": old + spread * rng.normal(size=old.shape),
        "old_logprobs": old,
        "sampler_logprobs": old,
        "advantages": rng.normal(size=rows),
        "mask": mask,
        "age": rng.integers(0, 5, (rows, length)).astype(float),
        "router_logprobs": -1.0 - shift,
        "old_router_logprobs": np.full_like(shift, -1.0),
    }
