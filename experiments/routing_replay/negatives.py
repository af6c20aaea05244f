"""Is it the experts, or what a clip does to wrong answers? Arms that cut either sign, on a mixture and a dense model.

    python -m jaxrl_llm.sweep --sweep experiments/routing_replay/negatives.py:negatives --workdir runs/negatives
    python -m experiments.routing_replay.kept runs/negatives

VARIANTS has the variants and what each decides, in one line. `variant@part,part` is what has these parts of a condition
("negatives@dense", "negatives_runs@countdown,N = 32"); the whole goes on in its DIR. No seed is one of another sweep.

An arm that has a name of its own here is a recipe with other bounds. "negatives cut" cuts answers of A < 0 alone: of
GRPO tokens on either side of ratio 1, of GSPO answers below its bound, as ever. "positives cut" cuts tokens of A > 0
above 1. Bounds of 0.2 and 1000 are those that hardly cut, and that do not.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.routing_replay.sweep import ARMS, BRANCHED, CONFIG, COUNTDOWN, arms, clipped, seeds
from experiments.routing_replay.variants import Variants, variant_of
from jaxrl_llm.sweep import Branching, Sweep, chain, product

SMOLLM = "configs/smollm2_sums_grpo.py"
MODELS = {
    "mixture": {},
    # as wide as the experts that a token of the mixture uses
    "dense": {"model.num_experts": 0, "model.intermediate_size": 64},
}
TIGHT, ABOVE = 8e-9, 1.000001  # a ratio in float32 may not move below 1, and not above


def arm(name: str, objective: str = "grpo", **bounds: float) -> dict[str, Any]:
    fields = {f"objective.{field}": value for field, value in bounds.items()}
    return {"arm": name, "objective.name": objective, **fields}


BOTH_SIDES = {**clipped(1e-8)[0], "arm": "GRPO clip 1e-08, both sides", "objective.dual_clip": ABOVE}
WRONG_CUT = arm("GRPO, negatives cut", clip_low=TIGHT, clip_high=0.2, dual_clip=ABOVE)
RIGHT_CUT = arm("GRPO, positives cut", clip_low=0.2, clip_high=1e-8)
GSPO_WRONG_CUT = {**ARMS["GSPO"], "arm": "GSPO, negatives cut", "objective.clip_high": 1000.0}
SHARP_SAPO = arm("SAPO 4/16", "sapo", tau_pos=4.0, tau_neg=16.0)
RSPO, OPSM = arm("RSPO", "rspo"), arm("OPSM", "opsm")

EITHER = chain(arms("GRPO", "GSPO"), clipped(1e-8), [BOTH_SIDES, WRONG_CUT, GSPO_WRONG_CUT, SHARP_SAPO])
OF_MODEL = {"mixture": chain(EITHER, arms("GRPO+R2"), [RSPO]), "dense": EITHER}  # a dense model has no routing
DOSES = (ABOVE, 1.02, 1.1, 1.2, 1.5)
WHOLE = chain(arms("GRPO", "GSPO"), [BOTH_SIDES, WRONG_CUT])


def condition(*parts: str, **fields: Any) -> dict[str, Any]:
    """The parts of a condition's name, and its fields with __ for a dot."""
    return {"condition": ", ".join(parts), **{name.replace("__", "."): value for name, value in fields.items()}}


def branches(of_model: Mapping[str, Sequence[dict[str, Any]]], rates: Sequence[float], first: int, count: int) -> Sweep:
    """Branches of one rollout with the arms of each model, at each rate."""
    parts = [
        product(of_model[name], [condition(name, f"lr {rate:g}", optimizer__learning_rate=rate)], [model])
        for name, model in MODELS.items()
        for rate in rates
    ]
    runs = product(chain(*parts), [BRANCHED], seeds(first, count))
    return Sweep("", runs, baseline="GRPO", config=CONFIG, minutes=2.5, branching=Branching(first=1, every=3))


def negatives() -> Sweep:
    return branches(OF_MODEL, (2e-4, 4e-4), 300, 40)


def negatives_dose() -> Sweep:
    doses = [arm(f"dual clip {dose:g}", clip_low=TIGHT, clip_high=0.2, dual_clip=dose) for dose in DOSES]
    every = chain(arms("GRPO", "GSPO"), doses, [arm("dual clip off", clip_low=TIGHT, clip_high=0.2)])
    return branches(dict.fromkeys(MODELS, every), (4e-4,), 340, 20)


def negatives_masked() -> Sweep:
    return branches(dict.fromkeys(MODELS, chain(arms("GRPO", "GSPO"), [WRONG_CUT, OPSM])), (4e-4,), 360, 20)


# Rollouts of a branch, and where it is evaluated on the way.
LONG = Branching(first=1, every=8, rollouts=16, evaluate=(1, 2, 4, 8))
DRIFT = 0.05  # what a stopped arm may drift in a rollout


def negatives_rollouts() -> Sweep:
    stops = {"all updates": 0.0, f"stopped at KL {DRIFT:g}": DRIFT}
    parts = [
        product([condition(name, told, updates__stop_at_kl=bound)], [model])
        for name, model in MODELS.items()
        for told, bound in stops.items()
    ]
    setting = {**BRANCHED, "steps": 18, "log.diagnostics_every": 1}
    runs = product(chain(WHOLE, [RIGHT_CUT]), chain(*parts), [setting], seeds(400, 10))
    return Sweep("", runs, baseline="GRPO", config=CONFIG, minutes=5, branching=LONG)


# Eight updates drift as far as 32 do at twice the rate.
WHOLE_RATES = {8: (2e-4, 4e-4, 6e-4, 8e-4, 1e-3), 32: (2e-4, 4e-4, 6e-4)}


def negatives_runs(first: int = 500, count: int = 10) -> Sweep:
    """The tuned rate is the one found for sorting; an arm that was not tuned has GRPO's."""
    tuned = json.loads(Path(__file__).with_name("tuned.json").read_text())
    runs = []
    for task, config in {"sorting": CONFIG, "countdown": COUNTDOWN}.items():
        for n, run in itertools.product((8, 32), WHOLE):
            own = tuned[f"N = {n}"].get(run["arm"], tuned[f"N = {n}"]["GRPO"])
            for rate, value in {"tuned": own, **{f"lr {rate:g}": rate for rate in WHOLE_RATES[n]}}.items():
                fields = {"updates__minibatches": n, "optimizer__learning_rate": value}
                runs += [
                    {**run, **condition(task, name, f"N = {n}", rate, **fields), **model, "config": config}
                    for name, model in MODELS.items()
                ]
    return Sweep("", product(runs, [{"steps": 30}], seeds(first, count)), baseline="GRPO", minutes=0.7)


def negatives_again() -> Sweep:
    return negatives_runs(510, 20)


def negatives_real() -> Sweep:
    """A published dense model; N = 8, the most that eight prompts in whole groups give."""
    rates = [condition(f"lr {rate:g}", optimizer__learning_rate=rate) for rate in (5e-6, 2e-5)]
    runs = product(WHOLE, rates, [{"updates.minibatches": 8}], [{"seed": seed} for seed in range(600, 610)])
    return Sweep("", runs, baseline="GRPO", config=SMOLLM, minutes=7)


def negatives_smoke() -> Sweep:
    parts = [product(OF_MODEL[name], [condition(name)], [model]) for name, model in MODELS.items()]
    branching = Branching(first=0, every=1, rollouts=2, evaluate=(1,))
    runs = product(chain(*parts), [{"steps": 1}], seeds(290, 1))
    return Sweep("", runs, baseline="GRPO", config=f"{CONFIG}:smoke", minutes=1, branching=branching)


VARIANTS: Variants = {
    "negatives": (negatives, "Is cutting A < 0 alone above GSPO after one rollout, without experts as with them?"),
    "negatives_dose": (negatives_dose, "Does a rollout's gain follow the gradient kept for A < 0?"),
    "negatives_masked": (negatives_masked, "Does OPSM, which masks wrong answers that drifted, gain in one rollout?"),
    "negatives_rollouts": (negatives_rollouts, "After how many rollouts does the order of arms turn, and by drift?"),
    "negatives_runs": (negatives_runs, "Does GSPO end whole runs above the arms that one rollout prefers?"),
    "negatives_again": (negatives_again, "Do the whole runs' results hold on seeds of a batch of its own?"),
    "negatives_real": (negatives_real, "Is the order of whole runs that of a published model on sums?"),
    "negatives_smoke": (negatives_smoke, "Does every arm run? Two rollouts of a tiny model"),
}


def get_sweep(variant: str = "negatives") -> Sweep:
    return variant_of(VARIANTS, variant)
