"""How far is a vLLM server from the trainer at equal weights? Log-probs and experts of the same answers.

    python -m experiments.mismatch.measure --vllm .venv-vllm --seeds 5

starts a server of each dtype and adds a line to results/measured.jsonl for every seed, model, sampler and trainer; what
is there already is not measured again. protocol.md has the hypotheses, `python -m experiments.mismatch.tables` the
tables.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.models import Model, save_pretrained, upcycled
from jaxrl_llm.models.scoring import score
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.gaps import differ
from jaxrl_llm.training.warm_start import warm_start

RESULTS = Path(__file__).parent / "results" / "measured.jsonl"
MODELS = ("mixture", "upcycled")
SAMPLERS = ("vLLM float32", "vLLM bfloat16", "own bfloat16")
TRAINERS = ("float32", "bfloat16")
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
_SETTING = {"rollout.prompts": 16, "model.intermediate_size": 32}  # dense layers as wide as an expert
_REDRAWN, _TRAINED = 0.5, 40  # of the upcycled model: share of hidden units, steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", default=".venv-vllm", help="the environment with vLLM (make vllm)")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    engines: dict[str, Any] = {}
    try:
        for model in MODELS:
            for seed in range(given.seeds):
                _measure(engines, given.vllm, model, seed)
    finally:
        for engine in engines.values():
            engine.close()


def _measure(engines: dict[str, Any], vllm: str, name: str, seed: int) -> None:
    """Add the lines of a model and a seed; engines: the servers that run, which every model of these sizes shares."""
    known = {(row["model"], row["seed"], row["sampler"]) for row in read(RESULTS)}
    missing = [sampler for sampler in SAMPLERS if (name, seed, sampler) not in known]
    if not missing:
        return
    run, params = _trained(name, seed)
    batch = next(run.source.stream())
    for sampler in missing:
        kind, dtype = sampler.split()
        if kind == "own":
            own: Any = _run({"rollout.engine": "jax", "rollout.launch": "", "rollout.dtype": dtype}, seed).source
            engine = dataclasses.replace(own.engine, model=run.model)
        else:
            if sampler not in engines:
                started: Any = _run({"rollout.launch": vllm, "rollout.dtype": dtype}, seed).source
                engines[sampler] = started.engine
            engine = engines[sampler]
        held, moved = engine.take_weights(params, seed)
        uids, key = batch["draw"].astype(np.uint32), jax.random.key(seed)
        t = engine.generate(held, batch["tokens"], batch["lengths"], uids, key)
        with RESULTS.open("a") as lines:
            for trainer in TRAINERS:
                where = {"model": name, "seed": seed, "sampler": sampler, "trainer": trainer}
                config = dataclasses.replace(run.model.config, dtype=trainer)
                row = where | compared(Model(config, run.model.mesh), params, t)
                if "rollout/handshake" in moved:
                    row["handshake"] = moved["rollout/handshake"]
                print(json.dumps(row), file=lines)
                print(row, flush=True)


def _run(fields: dict[str, Any], seed: int) -> Run:
    given = _SETTING | {"seed": seed, "warm_start.seed": seed} | fields
    config = loading.load(loading.find("sort_vllm"), [(name, str(value)) for name, value in given.items()])
    return build(validate(config))


def _trained(name: str, seed: int) -> tuple[Run, Any]:
    """A run of the model, and the parameters that it starts from."""
    run = _run({}, seed)
    if name == "mixture":
        return run, run.start(print).policy.plain(run.model)
    dense = _run({"model.num_experts": 0}, seed)
    config, params = upcycled(
        dense.model.config,
        dense.start(print).policy.plain(dense.model),
        experts=8,
        chosen=2,
        redraw=_REDRAWN,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(params, config, Path(folder))
        more = dataclasses.replace(run.settings.warm_start, steps=_TRAINED)
        return run, warm_start(run.model, run.settings.task, more, pretrained=folder)


@functools.partial(jax.jit, static_argnums=0)
def _scored(model: Model, params: Any, t: Rollout, routing: Any) -> Any:
    found = score(model, params, t.tokens, t.segment_ids, routing=routing)
    return found.logprobs, found.routing


def compared(model: Model, params: Any, t: Rollout) -> dict[str, Any]:
    """The outcomes of the protocol for answers that were sampled with these parameters."""
    assert t.routes.sampled is not None
    mask, held = np.asarray(t.loss_mask), np.asarray(t.segment_ids) != 0
    logprobs, routing = _scored(model, params, t, None)
    d = np.asarray(logprobs - t.sampler_logprobs, np.float64)[mask]
    replayed = np.asarray(_scored(model, params, t, t.routes.sampled)[0] - t.sampler_logprobs)[mask]
    share, both = (np.asarray(x) for x in differ(t.routes.sampled, routing))
    both = both & held[None]
    return {
        "tokens": int(mask.sum()),
        "k3": float(np.mean(k3(jnp.asarray(d, jnp.float32)))),
        "k3_replayed": float(np.mean(k3(jnp.asarray(replayed)))),
        "mean": float(d.mean()),
        "mean_size": float(np.abs(d).mean()),
        "above_ln2": int((np.abs(d) > np.log(2)).sum()),
        "quantiles": np.quantile(np.abs(d), QUANTILES).tolist(),
        "flips_by_layer": [float(one[where].mean()) for one, where in zip(share, both, strict=True)],
    }


def read(path: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
