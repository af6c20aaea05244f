"""Sampler against trainer in bfloat16: log-probs, router logits and near-ties of routers, under the XLA_FLAGS given.

python -m experiments.numerics.excess_precision --json OUT.jsonl [--seeds 2]

adds a line for each model and seed; XLA_FLAGS=--xla_allow_excess_precision=false gives the other half of the page's
table. The time of a step of these workloads, with the flag and without it, turn by turn on one core:

python -m experiments.numerics.excess_precision --time S,H --json OUT.json [--repeats 3]
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.numerics.sources import in_gradient, model_of, parameters, sample
from experiments.performance import bench
from experiments.performance import workload as workloads
from jaxrl_llm.config import start_up
from jaxrl_llm.models import Model, score
from jaxrl_llm.objectives.divergences import k3

MODELS: dict[str, dict[str, Any]] = {
    "mixture": {},
    "mixture, blocks": {"experts_implementation": "blocks"},
    "dense": {"experts": 0},
}
QUANTILES = (0.5, 0.9, 0.99)
FLAG = "--xla_allow_excess_precision=false"


@functools.partial(jax.jit, static_argnums=0)
def _scored(model: Model, params: Any, tokens: Any, segment_ids: Any) -> Any:
    out = score(model, params, tokens, segment_ids, router_logits=True)
    return out.logprobs, out.routing


def measured(model: Model, seed: int) -> dict[str, Any]:
    """Shares of equal log-probs (with the sampler; of the forward in a gradient with the trainer), k3, and of each
    layer's routers: the share of experts that differ, quantiles of the largest difference of a token's logits, the
    share of ties of the last chosen and the first other expert, and the median of their distance."""
    params = parameters(model, seed)
    of = sample(model, params, seed, 0, record_router_logits=bool(model.config.num_experts))
    logprobs, routing = _scored(model, params, of.tokens, of.segment_ids)
    mask = np.asarray(of.loss_mask)
    again = in_gradient(model, params, of.tokens, of.segment_ids)[0][0]
    d = np.asarray(logprobs - of.sampler_logprobs)[mask]
    found = {
        "tokens": int(mask.sum()),
        "equal": float(np.mean(d == 0)),
        "gradient_equal": float(np.mean(np.asarray(again == logprobs)[mask])),
        "k3": float(np.mean(np.asarray(k3(jnp.asarray(d))))),
    }
    if routing is None:
        return found
    sampled = of.routes.sampled
    ours, theirs = (np.asarray(x.experts) for x in (routing, sampled))
    known = (ours[..., 0] != 255) & (theirs[..., 0] != 255)
    changed = 1 - (ours[..., :, None] == theirs[..., None, :]).any(-1).mean(-1)
    apart = np.abs(np.asarray(routing.logits) - np.asarray(sampled.logits)).max(-1)
    ranked = -np.sort(-np.asarray(sampled.logits), axis=-1)
    margin = ranked[..., ours.shape[-1] - 1] - ranked[..., ours.shape[-1]]
    layers = [
        {
            "changed": float(changed[layer][here].mean()),
            "logits_apart": np.quantile(apart[layer][here], QUANTILES).tolist(),
            "ties": float(np.mean(margin[layer][here] == 0)),
            "margin": float(np.median(margin[layer][here])),
        }
        for layer, here in enumerate(known)
    ]
    return found | {"changed": float(changed[known].mean()), "layers": layers}


def timed(workload: str, repeats: int) -> dict[str, dict[str, Any]]:
    """CPU seconds of the rollout and the update of a step in bfloat16, fast, by flag."""
    line = [sys.executable, "-m", "experiments.performance.ours", "--dtype", "bfloat16"]
    of = workloads.load(workload)
    systems = {flags: (of, ["env", f"XLA_FLAGS={flags}", *line]) for flags in ("", FLAG)}
    return bench.measure(systems, repeats, max(os.sched_getaffinity(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--time", help="workloads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.time:
        found = {name: timed(name, arguments.repeats) for name in arguments.time.split(",")}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    start_up.start_jax()
    for name, fields in MODELS.items():
        for seed in range(arguments.seeds):
            row = {"xla_flags": os.environ.get("XLA_FLAGS", ""), "model": name, "seed": seed}
            row |= measured(model_of("bfloat16", "fast", **fields), seed)
            with arguments.json.open("a") as lines:
                print(json.dumps(row), file=lines)
            print({key: value for key, value in row.items() if key != "layers"}, flush=True)


if __name__ == "__main__":
    main()
