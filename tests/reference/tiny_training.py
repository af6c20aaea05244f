"""One tiny mixture of experts and one small rollout with every kind of row, shared by the tests of training.

Parameters are drawn with numpy: nothing is compiled for them, and they do not follow a library's generator.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.training.layout import UpdateConfig, lay_out
from jaxrl_llm.training.optimizer import OptimizerConfig
from jaxrl_llm.training.state import parameter_axes

ROWS, TIME, GROUP, PROMPT, ANSWER = 8, 12, 4, 4, 8
CONFIG = ModelConfig(
    vocab_size=16,
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
OPTIMIZER = OptimizerConfig(learning_rate=0.01, eps=1e-3)  # large, so that a first step is no bare sign
UPDATES = UpdateConfig(minibatches=1)
# Answer tokens of each row: one cut off at its bound, one of EOS alone, one empty, the others in between.
ANSWERS = np.array([8, 1, 0, 5, 3, 4, 7, 2])
LENGTHS = PROMPT + ANSWERS


def draw_params(model, *, value_head=False, seed=0):
    """Norms 1, matrices of variance 1 / fan-in, routers wide enough that two experts are seldom close to a tie."""
    rng = np.random.default_rng(seed)

    def one(path, shape):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return np.ones(shape.shape, np.float32)
        scale = 2.0 if "router" in name else 1.0
        return (scale * rng.normal(size=shape.shape) / np.sqrt(max(shape.shape[-2:-1] or (4,)))).astype(np.float32)

    shapes = dict(jax.eval_shape(model.init, jax.random.key(0)))
    if value_head:
        kernel = jax.ShapeDtypeStruct((1, model.config.hidden_size), jnp.float32)
        shapes["value_head"] = {"kernel": kernel, "bias": jax.ShapeDtypeStruct((), jnp.float32)}
    params = jax.tree_util.tree_map_with_path(one, shapes)
    if value_head:
        params["value_head"]["kernel"] = params["value_head"]["kernel"][0]
    if model.mesh is None:
        return jax.tree.map(jnp.asarray, params)
    return jax.device_put(params, sharding.shardings(parameter_axes(model, params), params, model.mesh))


def no_record(model):
    """A record of the rollout in which every token routes freshly."""
    return model.config.gate.blank(model.config.num_moe_layers, ROWS, TIME)


def draw_batch(seed=0, **changes):
    """A scored rollout: log-ratios of +-0.5, so that some tokens are clipped and most are not."""
    rng = np.random.default_rng(seed)
    column = np.arange(TIME)[None]
    segment_ids = (column < LENGTHS[:, None]).astype(np.int32)
    mask = (column >= PROMPT) & (segment_ids > 0)
    tokens = np.where(segment_ids > 0, rng.integers(1, 16, (ROWS, TIME)), 0).astype(np.int32)

    def per_token(mean, spread):
        return np.where(mask, mean + spread * rng.normal(size=mask.shape), 0).astype(np.float32)

    old, ref, sampler = (per_token(-2.7, 0.4) for _ in range(3))
    values, returns = per_token(0, 1.0), per_token(0, 1.0)
    advantages = np.where(mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    arrays = {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "loss_mask": mask,
        "advantages": advantages,
        "sampler_logprobs": sampler,
        "old_logprobs": old,
        "ref_logprobs": ref,
        "old_values": values,
        "returns": returns,
    }
    return Rollout(**jax.tree.map(jnp.asarray, arrays | changes))


def draw_trajectory(routing=None, seed=0):
    """The same rollout before it is scored, with rewards; row 0 was cut off."""
    scores = ("old_logprobs", "ref_logprobs", "old_values", "returns")
    rewards = np.random.default_rng(seed).random(ROWS).astype(np.float32)
    return draw_batch(seed, **dict.fromkeys(scores)).replace(
        advantages=None,
        truncated=jnp.asarray(ANSWERS == ANSWER),
        routes=Routes(sampled=routing),
        rewards=jnp.asarray(rewards),
    )


def learned(scorer, state, reference, rollout, layouts):
    """The rollout with scores and advantages, and its metrics."""
    return scorer.experience(scorer.score(state, reference, rollout, layouts))


def layout_of(rows=None, *, layout="padded", micro=0, updates=UPDATES):
    """The micro-batches of these rollout rows (default: all) in their natural shape."""
    config = dataclasses.replace(updates, layout=layout, micro_batch_rows=micro)
    return lay_out(np.arange(ROWS) if rows is None else np.asarray(rows), LENGTHS, TIME, config)


def in_one_shape(layout, micro=4):
    """The same micro-batches inside [micro, ROWS, TIME], so that every cut runs in one compiled program."""
    m, rows, time = layout.index.shape
    room = [(0, micro - m), (0, ROWS - rows), (0, TIME - time)]
    index = np.pad(layout.index, room, constant_values=-1)
    return layout.replace(index=index, segment_ids=np.pad(layout.segment_ids, room))


def everything(aggregation, ratio=None, surrogate=None):
    """An objective with all terms: policy with a sampler correction, KL, entropy and value."""
    base = objectives.make("ppo", kl_coef=0.1, entropy_coef=0.05, correction="tis")
    return dataclasses.replace(
        base, aggregation=aggregation, ratio=ratio or base.ratio, surrogate=surrogate or base.surrogate
    )


def make_model(mesh=None, **changes):
    """The tiny model on a mesh of that shape (None: no mesh)."""
    config = dataclasses.replace(CONFIG, **changes)
    return Model(config, None if mesh is None else sharding.make_mesh(mesh))
