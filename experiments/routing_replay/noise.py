"""How much router noise makes which share of the experts differ, or which k3: the doses of the positive controls.

    python -m experiments.routing_replay.noise [--seeds 0 1 2] [--levels 0.01 0.02 ...]
    python -m experiments.routing_replay.noise --gates exact --of k3 --doses 1.5e-3 1e-2 1e-1 [--field bias]

Of every seed the warm-started policy of `configs/routing_replay.py` samples one rollout with each noise, or bias of
experts, and scores it with the trainer's router. Prints a Markdown table, means over seeds, and the level that gives
each dose of what `--of` names, by default 1, 3 and 10 % of differing experts, interpolated between neighbouring levels
on logarithmic axes. With `--gates exact` the choice of experts alone is moved.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.routing_replay import get_config
from jaxrl_llm.models import Router
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run import settings
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.training.gaps import differ
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainState

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
DOSES = (0.01, 0.03, 0.1)
COLUMNS = ("experts", "routers", "tokens", "mean gap", "k3")


def start(seed: int) -> tuple[Run, TrainState]:
    """The run of a seed and its state before the first update, as in the sweeps: the seed is the warm start's too."""
    config: Any = get_config()
    config.seed = config.warm_start.seed = seed
    config.updates.minibatches = 1  # how a rollout is cut changes no score
    config.replay.mode = "R2"  # so that it is scored before the update, whose own forward would serve otherwise
    run = build(settings.validate(config))
    return run, run.start(print)


def sampled_and_scored(run: Run, state: TrainState, router: Router) -> Rollout:
    """The first rollout of a run, sampled with this router and scored with the exact one."""
    source = run.source
    assert isinstance(source, Rollouts)
    assert isinstance(source.engine, Engine)
    noisy = dataclasses.replace(source, engine=dataclasses.replace(source.engine, router=router))
    rollout = noisy.judged(noisy.sample(noisy.stream(), 1, state)).rollout
    scored = noisy.scorer.score(state, None, rollout, noisy.layouts(rollout, 1)[0])
    return noisy.scorer.experience(scored)[0]


@jax.jit
def measured(batch: Rollout) -> dict[str, Any]:
    """Shares of the experts, of the routers (a layer at a token) and of the tokens where sampler and trainer differ,
    over prompts and answers; mean |log pi_old - log mu| and its k3 over answers."""
    assert batch.routes.sampled is not None
    assert batch.routes.scored is not None
    assert batch.old_logprobs is not None
    assert batch.sampler_logprobs is not None
    share, both = differ(batch.routes.sampled, batch.routes.scored)
    gap = batch.old_logprobs - batch.sampler_logprobs
    return {
        "experts": jnp.mean(share, where=both),
        "routers": jnp.mean(share > 0, where=both),
        "tokens": jnp.mean(jnp.any((share > 0) & both, axis=0), where=jnp.any(both, axis=0)),
        "mean gap": jnp.mean(jnp.abs(gap), where=batch.loss_mask),
        "k3": jnp.mean(jnp.expm1(gap) - gap, where=batch.loss_mask),
    }


def noise_of(dose: float, levels: Sequence[float], shares: Sequence[float]) -> float:
    """The noise at which this share of the experts differs; NaN outside the measured shares."""
    return float(np.exp(np.interp(np.log(dose), np.log(shares), np.log(levels), left=np.nan, right=np.nan)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", type=float, nargs="+", default=list(LEVELS))
    parser.add_argument("--field", choices=("noise", "bias"), default="noise", help="what the levels are of")
    parser.add_argument("--gates", choices=("same", "exact"), default="same", help="exact: the choice alone is moved")
    parser.add_argument("--of", choices=("experts", "k3"), default="experts", help="what the doses are of")
    parser.add_argument("--doses", type=float, nargs="+", default=list(DOSES))
    given = parser.parse_args()
    levels = sorted(given.levels)
    starts = [start(seed) for seed in given.seeds]
    routers = [Router(**{given.field: level, "gates": given.gates}) for level in levels]
    rows = [[jax.device_get(measured(sampled_and_scored(*one, router))) for one in starts] for router in routers]
    print(f"\n| router {given.field} | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for noise, seeds in zip(levels, rows, strict=True):
        means = {name: float(np.mean([row[name] for row in seeds])) for name in COLUMNS}
        low, high = (100 * float(pick([row["experts"] for row in seeds])) for pick in (min, max))
        cells = [f"{100 * means['experts']:.2f} % ({low:.2f} to {high:.2f})"]
        cells += [f"{100 * means[name]:.1f} %" for name in ("routers", "tokens")]
        cells += [f"{means[name]:.1e}" for name in ("mean gap", "k3")]
        print(f"| {noise:g} | {' | '.join(cells)} |")
    found = [float(np.mean([row[given.of] for row in seeds])) for seeds in rows]
    print("\n" + ", ".join(f"{given.of} {dose:g}: {noise_of(dose, levels, found):.3g}" for dose in given.doses))


if __name__ == "__main__":
    main()
