"""Cost of a sampler that chooses other experts to GRPO, and which remedy helps: `choices`, `control`, `strong`.

    python -m experiments.routing_replay.samplers runs/choices [--pack OUT.tar.xz]

Accuracy in `choices` is held out and sampled, at the end of a run, by the trainer's router or by the sampler's. The
latter has no number of its own where it differs by rounding alone. Differences are paired by seed: samplers share its
warm start and prompts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.routing_replay import pooled
from experiments.routing_replay.pooled import Pooled
from experiments.routing_replay.table_parts import Table, command, gain, interval, mean, same_states, start_of
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import paired_difference

EXACT = "exact"
ROUTERS = {"trainer's": "eval/pass_at_1", "sampler's": "eval/sampler_pass_at_1"}
SECOND = 805  # the first seed of the second half


def cost(study: Study, arm: str = "GRPO") -> list[Pooled]:
    """The arm with each sampler minus GRPO with the exact one, where the same of the router learns; labels: what the
    latter gains, sampler, evaluating router."""
    rows = []
    for sampler in study.conditions:
        learns = sampler[: sampler.index(", ") + 2] if sampler.startswith("router") else ""
        if sampler == f"{learns}{EXACT}":
            continue
        runs = study.select("GRPO", f"{learns}{EXACT}")
        exact = _ends(runs, "eval/pass_at_1")
        gains = interval(paired_difference([exact[run.seed] for run in runs], [start_of(run) for run in runs]))
        for router, key in ROUTERS.items():
            rows.append(_paired([gains, sampler, router], _ends(study.select(arm, sampler), key), exact))
    return [row for row in rows if row is not None]


def won_back(study: Study) -> list[Pooled]:
    """Every remedy minus GRPO with the same sampler; labels: sampler, router of the evaluation, remedy."""
    rows = [
        _paired([sampler, router, arm], *(_ends(study.select(one, sampler), key) for one in (arm, "GRPO")))
        for sampler in study.conditions
        for router, key in ROUTERS.items()
        for arm in study.arms[1:]
    ]
    return [row for row in rows if row is not None]


def gaps(study: Study) -> Table:
    """Sampler, arm, runs, experts that differ, k3 over the run (its share of GRPO's), accuracy at the end by router."""
    rows = []
    for sampler in study.conditions:
        whole = mean(study.select("GRPO", sampler), "kl/sampler")
        for arm in study.arms:
            runs = [run for run in study.select(arm, sampler) if run.ended]
            if not runs:
                continue
            k3, flips = (mean(runs, key) for key in ("kl/sampler", "routing/flips_sampler_old"))
            of = f" ({100 * k3 / whole:.2g} %)" if arm != "GRPO" and whole > 1e-9 else ""
            ends = [list(_ends(runs, key).values()) for key in ROUTERS.values()]
            told = [f"{np.mean(end):.3f}" if end else "" for end in ends]
            rows.append([sampler, arm, str(len(runs)), f"{100 * flips:.2f} %", f"{k3:.1e}{of}", *told])
    return rows


def harm(strong: Study, exact: Study) -> Table:
    """Noise; GRPO with it minus without, by trajectory: accuracy after 4 to 12 rollouts, and gain in four more.

    Over the states that both have.
    """
    quiet = exact.select("GRPO", "N = 4, no noise")
    return [
        [
            noise,
            interval(same_states(strong.select("GRPO", noise), quiet, start_of, first=1)),
            interval(same_states(strong.select("GRPO", noise), quiet, gain)),
        ]
        for noise in strong.conditions
    ]


def residual(study: Study) -> Table:
    """Noise, k3 between sampler and trainer under GRPO and under R3, and the share that R3 leaves."""
    rows = []
    for noise in study.conditions:
        gap, left = (mean(study.select(arm, noise), "kl/sampler") for arm in ("GRPO", "GRPO+R3"))
        if gap > 1e-9:  # rounding
            rows.append([noise, f"{gap:.2g}", f"{left:.2g}", f"{100 * left / gap:.0f} %"])
    return rows


def _ends(runs: Sequence[Run], key: str) -> Mapping[str, float]:
    """At the end, by seed; a run that diverged counts as 0, one without the number is left out."""
    having = [run for run in runs if run.series(key)[0].size]
    return {run.seed: 0.0 if run.diverged else run.average(key, last=1) for run in having}


def _paired(labels: Sequence[str], ours: Mapping[str, float], theirs: Mapping[str, float]) -> Pooled | None:
    """Over the seeds that both have, in two halves; None where fewer than two are."""
    both = [seed for seed in theirs if seed in ours]
    if len(both) < 2:
        return None
    halves: dict[str, list[float]] = {}
    for seed in both:
        half = f"seeds {'below' if int(seed) < SECOND else 'from'} {SECOND}"
        halves.setdefault(half, []).append(ours[seed] - theirs[seed])
    return pooled.pooled(labels, {half: np.array(own) for half, own in halves.items()})


def main() -> None:
    command(lambda study, _: [gaps(study), pooled.table(cost(study)), pooled.table(won_back(study))])


if __name__ == "__main__":
    main()
