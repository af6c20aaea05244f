"""How do the parts of the ratio scale? Layers, experts and the load-balance loss, measured at equal drift.

    python -m jaxrl_llm.sweep --sweep experiments/routing_replay/sizes.py:sizes --workdir runs/sizes
    python -m experiments.routing_replay.scale runs/sizes --figure OUT.png

VARIANTS has the variants and what each decides, in one line. `sizes@8 layers,top-8 of 64` is what has these parts of a
condition; the whole goes on in its DIR. The largest size, which the others predict, is a variant of its own, so that
the prediction can stand before it is run.

From each state of a trajectory the arms take one rollout with the updates that it takes to drift so far (KL to old), up
to 128; the farthest has a rate of its own, since clipped updates at the other's stop short of it. The samplers differ
from the trainer in float32 as real ones do, with R3 and without. One trajectory of every size comes before a second.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from experiments.routing_replay.sweep import BRANCHED, CONFIG, seeds
from experiments.routing_replay.variants import Variants, variant_of
from jaxrl_llm.sweep import Branching, Sweep, chain, product

DRIFTS = {0.005: 1e-4, 0.02: 1e-4, 0.1: 4e-4}  # KL to old, and the learning rate that goes so far
LAYERS = (4, 8, 16, 32)
EXPERTS = ((16, 4), (32, 4), (64, 8), (64, 2), (128, 8))  # and those that a token uses
BALANCE = (0.0, 1e-2)
LARGEST = (32, 128, 8)
# A deeper model needs a longer warm start; all stop at one accuracy.
EQUAL = {"warm_start.steps": 2000, "warm_start.target_pass_rate": 0.7}
UPDATES = {"updates.minibatches": 32, "updates.epochs": 4}
# What takes time here is compiling: with remat layers run in a loop of one. No accuracy is compared.
QUICK = {"model.remat": "block", "evaluation.prompts": 128, "evaluation.samples": 1}


def arms() -> list[dict[str, Any]]:
    """One arm a drift, the smallest first, and at that the samplers."""
    stops = [
        {"arm": f"KL {drift:g}", "updates.stop_at_kl": drift, "optimizer.learning_rate": rate}
        for drift, rate in DRIFTS.items()
    ]
    samplers = [
        {**stops[0], "arm": f"{dtype}{told}", "rollout.dtype": dtype, "replay.mode": replay}
        for dtype in ("bfloat16", "float8_e4m3")
        for replay, told in (("off", ""), ("R3", " + R3"))
    ]
    return chain(stops, samplers)


def sizes(settings: Iterable[tuple[int, int, int]], balance: Sequence[float] = BALANCE) -> Sweep:
    conditions = [
        {
            "condition": f"{layers} layers, top-{chosen} of {experts}, balance {coefficient:g}",
            "model.num_hidden_layers": layers,
            "model.num_experts": experts,
            "model.num_experts_per_tok": chosen,
            "updates.aux_coef": coefficient,
        }
        for layers, experts, chosen in settings
        for coefficient in balance
    ]
    shared = {**BRANCHED, **EQUAL, **UPDATES, **QUICK, "steps": 5, "log.diagnostics_every": 1}
    runs = product(arms(), conditions, [shared], seeds(700, 5))
    return Sweep("", runs, baseline=runs[0]["arm"], config=CONFIG, minutes=4, branching=Branching(first=1, every=2))


def smoke() -> Sweep:
    sweep = sizes([(2, 4, 2)], balance=(0.0,))
    tiny = {"warm_start.steps": 100, "warm_start.target_pass_rate": 0.0, "updates.minibatches": 2, "steps": 2}
    runs = [{**run, **tiny} for run in sweep.runs if run["seed"] == 700]
    return replace(sweep, runs=runs, config=f"{CONFIG}:smoke", minutes=2)


# `python -m jaxrl_llm.upcycle --from SMOLLM2.gguf --to runs/smollm2_8_experts --experts 8 --chosen 2 --redraw 0.5`
UPCYCLED = {
    "model.pretrained": "runs/smollm2_8_experts",
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 1536,
}
# Sums of one digit, of which there are 86; what is held out is no outcome.
FEW_SUMS = {"task.options.digits": 1, "task.options.train_size": 64, "task.options.test_size": 14}
FEW_SUMS |= {"evaluation.prompts": 14, "evaluation.samples": 4, "evaluation.every": 1000}


# Seeds of each learning rate; after text: from what `python -m experiments.routing_replay.passages` makes of UPCYCLED.
ANCHORS = (("", 2e-5, (720, 721, 722)), ("", 3e-6, (720,)), ("_text", 3e-6, (730, 731)), ("_text", 2e-5, (730,)))


def anchor() -> Sweep:
    """24 GB of memory, of which the checkpoint at the end takes a third."""
    start = {"steps": 120, "batch_size": 32, "learning_rate": 1e-4, "target_pass_rate": 0.3, "evaluate_every": 20}
    setting = {
        **FEW_SUMS,
        **{f"warm_start.{name}": value for name, value in start.items()},
        "steps": 3,
        "updates.minibatches": 8,
        "updates.micro_batch_rows": 8,
        "updates.layout": "packed",
        "log.diagnostics_every": 1,
    }
    runs = [
        {
            **UPCYCLED,
            "arm": "GRPO",
            "condition": f"{'after text, ' if after else ''}lr {rate:g}",
            "model.pretrained": UPCYCLED["model.pretrained"] + after,
            "optimizer.learning_rate": rate,
            "seed": seed,
        }
        for after, rate, seeds_of_rate in ANCHORS
        for seed in seeds_of_rate
    ]
    return Sweep("", product(runs, [setting]), baseline="GRPO", config="configs/smollm2_sums_grpo.py", minutes=15)


EVERY = [(layers, *experts) for layers in LAYERS for experts in EXPERTS]
VARIANTS: Variants = {
    "sizes": (
        lambda: sizes(size for size in EVERY if size != LARGEST),
        "How does routing's share of Var(log r) grow with depth, sparsity and drift?",
    ),
    "largest": (
        lambda: sizes([LARGEST]),
        "Does the share at 32 layers, top-8 of 128, fall where the others predict it?",
    ),
    "anchor": (anchor, "Does the share of real weights, SmolLM2 upcycled, fall where the line has it?"),
    "sizes_smoke": (smoke, "Do the arms of one drift and the samplers run? A tiny model"),
}


def get_sweep(variant: str = "sizes") -> Sweep:
    return variant_of(VARIANTS, variant)
