"""Each way to compute the log-probs of sampled tokens, against the way of the sampler: fast and exact, by dtype.

python -m experiments.numerics.sources --json OUT.json [--seeds 2] [--dtypes float32,bfloat16] [--numerics fast,exact]

XLA_FLAGS=--xla_force_host_platform_device_count=8 adds the rows of eight devices.
"""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import start_up
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.models import Model, ModelConfig, score
from jaxrl_llm.models.lora import LoRAConfig, attach, init_adapters, merged
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

_PROMPTS, _GROUP, _WIDTH, _ANSWER = 16, 4, 12, 40
_Scored = tuple[np.ndarray, np.ndarray | None]


def model_of(dtype: str, numerics: str, experts: int = 16, **fields: Any) -> Model:
    """Four layers of 16 experts, of which a token uses four, or dense layers."""
    config = ModelConfig(
        vocab_size=64,
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=4 if experts else 1,
        moe_intermediate_size=32,
        dtype=dtype,
        numerics=numerics,
        **fields,
    )
    return Model(config)


@functools.cache
def parameters(model: Model, seed: int) -> Any:
    """Matrices half as large again as at initialisation: log-probs that differ by tokens."""
    params = model.init_sharded(jax.random.key(seed))
    return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, params)


def sample(model: Model, params: Any, seed: int, slots: int, **fields: Any) -> Any:
    """A rollout; fields: of its engine."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 64, (_PROMPTS, _WIDTH)).astype(np.int32)
    lengths = rng.integers(3, _WIDTH + 1, _PROMPTS).astype(np.int32)
    engine = Engine(model, Sampling(), _GROUP, _ANSWER, (0,), slots=slots, dtype=model.config.dtype, **fields)
    return engine.generate(params, prompts, lengths, np.arange(_PROMPTS), jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def scored(model: Model, params: Any, tokens: Any, segment_ids: Any) -> Any:
    out = score(model, params, tokens, segment_ids)
    return out.logprobs, None if out.routing is None else out.routing.experts


@functools.partial(jax.jit, static_argnums=0)
def in_gradient(model: Model, params: Any, tokens: Any, segment_ids: Any) -> Any:
    """The forward inside value_and_grad; the gradient is returned, or it would not be computed."""

    def loss(params: Any) -> Any:
        out = score(model, params, tokens, segment_ids)
        return jnp.sum(out.logprobs), (out.logprobs, None if out.routing is None else out.routing.experts)

    (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return found, gradient


def ways(model: Model, params: Any, of: Any, seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and function of every other way to compute the same tokens."""
    tokens, ids = of.tokens, of.segment_ids
    rows = len(tokens)

    def in_parts(size: int, width: int = 0) -> Any:
        pad = ((0, 0), (0, width))
        parts = [
            scored(model, params, jnp.pad(tokens[at : at + size], pad), jnp.pad(ids[at : at + size], pad))
            for at in range(0, rows, size)
        ]
        logprobs = np.concatenate([one for one, _ in parts])[:, : tokens.shape[1]]
        if parts[0][1] is None:
            return logprobs, None
        return logprobs, np.concatenate([experts for _, experts in parts], axis=1)[:, :, : tokens.shape[1]]

    def packed() -> Any:
        """Two answers a row, the second behind the first one's padding, which is cut."""
        lengths = np.asarray(ids).sum(1)
        width = int((lengths[: rows // 2] + lengths[rows // 2 :]).max())
        both, segments = np.zeros((rows // 2, width), np.int32), np.zeros((rows // 2, width), np.int32)
        places = []
        for row in range(rows // 2):
            at = 0
            for number, answer in enumerate((row, row + rows // 2), start=1):
                end = at + lengths[answer]
                both[row, at:end], segments[row, at:end] = np.asarray(tokens)[answer, : lengths[answer]], number
                places.append((answer, row, at, end))
                at = end
        logprobs, experts = scored(model, params, both, segments)
        out = np.zeros(tokens.shape, np.float32)
        routes = None if experts is None else np.full((len(experts), *tokens.shape, experts.shape[-1]), 255, np.uint8)
        for answer, row, at, end in places:
            out[answer, : end - at] = np.asarray(logprobs)[row, at:end]
            if routes is not None:
                routes[:, answer, : end - at] = np.asarray(experts)[:, row, at:end]
        return out, routes

    def slots(count: int) -> Any:
        other = sample(model, params, seed, count)
        routes = other.routes.sampled
        return other.sampler_logprobs, None if routes is None else routes.experts, other.tokens

    def other_experts() -> Any:
        config = dataclasses.replace(model.config, experts_implementation="dense")
        return scored(Model(config), params, tokens, ids)

    def adapters() -> Any:
        pairs = init_adapters(LoRAConfig(rank=4, targets="attention,mlp"), model, jax.random.key(seed))
        pairs = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), pairs)
        own = sample(model, merged(model, params, pairs, 2.0), seed, 0)
        routes = own.routes.sampled
        apart = scored(model, attach(params, pairs, 2.0), own.tokens, own.segment_ids)
        return *apart, None, (own, own.sampler_logprobs, None if routes is None else routes.experts)

    def devices(shape: tuple[int, ...]) -> Any:
        several = dataclasses.replace(model, mesh=sharding.make_mesh(shape))
        with jax.set_mesh(several.mesh):
            return scored(several, parameters(several, seed), tokens, ids)

    yield "trainer, whole batch", lambda: scored(model, params, tokens, ids)
    yield "sampler with 3 slots, refilled", lambda: slots(3)
    yield "trainer, 8 rows at a time", lambda: in_parts(8)
    yield "trainer, 1 row at a time", lambda: in_parts(1)
    yield "rows padded by 12", lambda: in_parts(rows, 12)
    yield "two answers a row (packed)", packed
    yield "forward inside value_and_grad", lambda: in_gradient(model, params, tokens, ids)[0]
    yield "LoRA: merged, and apart", adapters
    if model.config.numerics == "fast" and model.config.num_experts:
        yield "experts by another implementation", other_experts
    if len(jax.devices()) >= 8:
        yield "8 devices, data axis", lambda: devices((8, 1, 1, 1))
        yield "8 devices, fsdp axis", lambda: devices((1, 8, 1, 1))
        if model.config.num_experts:
            yield "8 devices, expert axis", lambda: devices((1, 2, 4, 1))


def compare(model: Model, seed: int) -> dict[str, dict[str, float]]:
    """For each way: tokens, the share with equal log-probs, k3, and the share of experts that differ."""
    params, found = parameters(model, seed), {}
    of = sample(model, params, seed, 0)
    for name, way in ways(model, params, of, seed):
        forget_programs()  # of the ways before, once they are many
        logprobs, experts, *rest = way()
        here, base, routes = of, of.sampler_logprobs, None if of.routes.sampled is None else of.routes.sampled.experts
        if len(rest) == 2:
            here, base, routes = rest[1]
        mask = np.array(here.loss_mask)
        alike = np.ones_like(mask)
        if len(rest) == 1:  # of what was sampled twice, rows up to their first other token
            alike = np.cumprod(np.asarray(rest[0]) == np.asarray(here.tokens), axis=1).astype(bool)
        mask &= alike
        other, own = np.asarray(logprobs)[mask], np.asarray(base)[mask]
        one = {"tokens": int(mask.sum()), "equal": float(np.mean(other == own))}
        one["k3"] = float(np.mean(np.asarray(k3(jnp.asarray(other - own)))))
        if experts is not None:
            a, b = np.asarray(experts), np.asarray(routes)
            known = (a[..., 0] != 255) & (b[..., 0] != 255) & alike
            same = (a[..., :, None] == b[..., None, :]).any(-1).mean(-1)
            one["experts_changed"] = float(1 - same[known].mean())
        found[name] = one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--numerics", default="fast,exact")
    arguments = parser.parse_args()
    start_up.start_jax()
    rows = []
    print(f"{'':34} {'numerics':8} {'dtype':8} {'model':7} tokens   equal       k3   experts changed", flush=True)
    for dtype in arguments.dtypes.split(","):
        for numerics in arguments.numerics.split(","):
            for experts in (16, 0):
                each = [compare(model_of(dtype, numerics, experts), seed) for seed in range(arguments.seeds)]
                for name in each[0]:
                    of = [one[name] for one in each]
                    tokens = sum(one["tokens"] for one in of)
                    mean = {
                        key: sum(one[key] * one["tokens"] for one in of) / tokens for key in of[0] if key != "tokens"
                    }
                    kind = "mixture" if experts else "dense"
                    rows.append(
                        {"way": name, "numerics": numerics, "dtype": dtype, "model": kind, "tokens": tokens, **mean}
                    )
                    changed = f"{mean['experts_changed']:8.2%}" if experts else ""
                    cells = f"{tokens:6} {mean['equal']:7.2%} {mean['k3']:8.1e} {changed}"
                    print(f"{name:34} {numerics:8} {dtype:8} {kind:7} {cells}", flush=True)
    made = {"seeds": arguments.seeds, "xla_flags": os.environ.get("XLA_FLAGS", ""), "rows": rows}
    arguments.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
