"""Costs of further gates and layers beside those of Qwen3-MoE: tokens a CPU second of training and of decoding.

python -m experiments.performance.layers [--workload S] [--repeats 7] [--json OUT.json]

Each row is one layer of the workload's model with one thing changed. Training is a forward and a backward of all rows,
decoding a loop over the tokens of the answers with a cache. All layers are in one process on one core and take turns; a
ratio is taken within a turn, and a figure is the median over turns.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.performance import workload as workloads
from experiments.performance.workload import Workload
from jaxrl_llm.config import start_up
from jaxrl_llm.models import Model, ModelConfig

__all__ = ["changes", "table"]

FIRST = "Qwen3-MoE"
_SIGMOID = {"scoring_func": "sigmoid", "selection_bias": True}
_PHASES = ("train", "decode")


def changes(w: Workload) -> dict[str, dict[str, Any]]:
    """Fields of the model of each row; sizes are the workload's, so that weights are nearly as many.

    Raises:
      ValueError: the workload has too few experts, or heads of a size that the rows cannot cut.
    """
    if w.E < 4 or w.E % 4 or w.hd % 4:
        raise ValueError(f"workload {w.name!r} needs experts and heads of a multiple of 4: E={w.E}, hd={w.hd}")
    return {
        FIRST: {},
        "the same again": {},
        "gate: sigmoid, bias, groups": {**_SIGMOID, "n_group": w.E // 2, "topk_group": w.E // 4},
        "a shared expert behind a sigmoid": {"shared_expert_intermediate_size": w.ff, "shared_expert_gate": True},
        f"a window of {w.P} and sinks": {"sliding_window": w.P, "attention_sinks": True},
        "attention from a latent": {
            "qk_norm": "none",
            "head_dim": w.hd + w.hd // 2,
            "v_head_dim": w.hd,
            "qk_rope_head_dim": w.hd // 2,
            "kv_lora_rank": w.KV * w.hd,
        },
        "gated delta rule": {
            "layer_types": ("linear_attention",),
            **{"linear_num_key_heads": w.KV, "linear_num_value_heads": w.H},
            **{"linear_key_head_dim": w.hd, "linear_value_head_dim": w.hd},
        },
        "experts with biases and a clamp": {"expert_bias": True, "swiglu_limit": 7.0},
    }


def programs(w: Workload, fields: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Callable[[], Any]]]:
    """The model of a row, and a function for each phase that runs it once."""
    sizes = {"vocab_size": w.V, "num_hidden_layers": 1, "hidden_size": w.d, "intermediate_size": w.ff}
    sizes |= {"num_attention_heads": w.H, "num_key_value_heads": w.KV, "head_dim": w.hd}
    sizes |= {"num_experts": w.E, "num_experts_per_tok": w.k, "moe_intermediate_size": w.ff}
    model, rng = Model(ModelConfig(**{**sizes, **fields})), np.random.default_rng(0)
    shapes = model.shapes()
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * w.d**-0.5, x.dtype), shapes)
    tokens = jnp.asarray(rng.integers(0, w.V, (w.rows, w.P + w.C)), jnp.int32)
    weights = jnp.asarray(rng.standard_normal((w.rows, w.P + w.C, w.d)), jnp.float32)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(model.apply(params, tokens, rows="padded").hidden * weights)

    def decode(params: Any) -> Any:
        layers = model.for_decoding(model.unstack(params), w.rows, w.C)

        def step(i: jax.Array, carry: Any) -> Any:
            cache, fed = carry
            out = model.apply(layers, fed, positions=jnp.full_like(fed, w.P + i), cache=cache)
            return out.cache, (out.hidden[:, :, 0] > 0).astype(jnp.int32)

        return jax.lax.fori_loop(0, w.C, step, (model.empty_cache(w.rows, w.P + w.C), tokens[:, :1]))[1]

    train, sample = jax.jit(jax.grad(loss)), jax.jit(decode)
    return model.config, {"train": functools.partial(train, params), "decode": functools.partial(sample, params)}


def measure(w: Workload, repeats: int) -> dict[str, dict[str, Any]]:
    """Active parameters and the CPU seconds of each turn by row, behind a first one that compiles."""
    rows = {name: programs(w, fields) for name, fields in changes(w).items()}
    found: dict[str, dict[str, Any]] = {
        name: {"active_parameters": config.active_parameters, "train": [], "decode": []}
        for name, (config, _) in rows.items()
    }
    for turn in range(1 + repeats):
        for name, (_, phases) in rows.items():
            for phase, run in phases.items():
                start = time.process_time()
                jax.block_until_ready(run())
                taken = time.process_time() - start
                print(f"{turn} {name}: {phase} {taken:.4f} s", file=sys.stderr, flush=True)
                found[name][phase] += [taken] if turn else []
    return found


def table(found: Mapping[str, Mapping[str, Any]], w: Workload) -> str:
    """Markdown; x: CPU seconds in units of the first row's in the same turn, with the smallest and the largest."""
    head = ["one layer", "active parameters", *(f"{phase}, tokens / CPU s | x, range" for phase in _PHASES)]
    lines, first = [f"| {' | '.join(head)} |", "| -- " * 6 + "|"], found[FIRST]
    tokens = {"train": w.rows * (w.P + w.C), "decode": w.rows * w.C}
    for name, row in found.items():
        cells = [name, f"{row['active_parameters'] / first['active_parameters']:.2f}x"]
        for phase in _PHASES:
            cells += [f"{tokens[phase] / statistics.median(row[phase]):.0f}", _ratio(row[phase], first[phase])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(seconds: Sequence[float], of_first: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(seconds, of_first, strict=True)]
    return f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="S", help="S or a JSON file with the fields of a workload")
    parser.add_argument("--repeats", type=int, default=7, help="turns after the first")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core that all share")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})
    start_up.start_jax()
    try:
        workload = workloads.load(arguments.workload)
        found = measure(workload, arguments.repeats)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"workload": vars(workload), "rows": found}, indent=1) + "\n")
    print(table(found, workload))


if __name__ == "__main__":
    main()
