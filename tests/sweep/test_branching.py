"""Branches are what runs would do from the same state; they resume bit for bit, and what they share is checked."""

import contextlib
import io
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.config import loading
from jaxrl_llm.records.checkpointing import steps_of
from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.report.comparisons import compare
from jaxrl_llm.report.outcome_figures import differences_by_condition
from jaxrl_llm.report.read import load
from jaxrl_llm.report.write import write_report
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.sweep import Branching, Sweep, branching, each, product
from jaxrl_llm.sweep.__main__ import BRANCHING, _write_plan
from jaxrl_llm.sweep.forks import plan
from jaxrl_llm.sweep.planned import command
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RolloutStream
from jaxrl_llm.training.state import TrainState, make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_run
from tests.reference.synthetic_runs import study_of
from tests.reference.tiny_training import UPDATES
from tests.training.test_collect import MIXED, OFF, PLAIN, PROMPTS, TASK, Prompts, Script, weighting
from tests.training.test_in_flight import HOW

CONFIG = "configs/grpo.py:smoke"
STEPS = 3
R2 = {"replay.mode": "R2"}
TWO_KEPT = {"checkpoint.keep": 2}


def fields(folder, **changes):
    """What `tiny_run.make_config` sets, as fields of a command line."""
    default = loading.flat(loading.load(loading.find(CONFIG)).to_dict())
    tiny = {"checkpoint.every": 1, "evaluation.every": 1, "log.diagnostics_every": 1, "steps": STEPS} | changes
    config = loading.flat(tiny_run.make_config(folder, **tiny).to_dict())
    return {name: str(value) for name, value in config.items() if value != default.get(name)}


def planned(folder, arms, *, first=0, every=1, rollouts=1, evaluate=(), **changes):
    own, numbers = fields(folder, **changes), Branching(first, every, rollouts, evaluate).numbers()
    branches = numbers | {"arms": {a: own | f for a, f in arms.items()}}
    return plan(CONFIG, list(own.items()), json.dumps(branches))


def take(workdir, plan):
    """Run or resume the branches of a DIR; returns the rows of branches.jsonl."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(RunLog(workdir, plan.parent.settings.steps, stream=io.StringIO()))
        log.write_config({"config_hash": plan.identity, "arms": {arm: own.config for arm, own in plan.arms.items()}})
        log.result(branching.Trajectory(plan).run(log))
    return read_rows(workdir / "branches.jsonl")


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """(DIR, rows) of GRPO and GRPO+R2 from the states after 0, 1 and 2 rollouts."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, take(workdir, planned(folder, {"GRPO": {}, "GRPO+R2": R2}, **TWO_KEPT))


def of(rows, arm):
    return [row for row in rows if row["arm"] == arm]


def test_the_baselines_branches_are_the_run_itself(straight, folder, tmp_path):
    """Every number that the trainer logs of a rollout, and both evaluations, from the same settings."""
    changes = {"checkpoint.every": 1, "evaluation.every": 1, "log.diagnostics_every": 1, "steps": STEPS}
    tiny_run.train(tmp_path, tiny_run.make_config(folder, **changes))
    expected = tiny_run.metrics(tmp_path)
    _, rows = straight
    assert [row["state"] for row in of(rows, "")] == list(range(STEPS))
    for state in range(STEPS):
        start, end = of(rows, "")[state], of(rows, "GRPO")[state]
        assert {key: start[key] for key in start if key.startswith("eval/")} == {
            key: value for key, value in expected[state].items() if key.startswith("eval/")
        }
        logged = expected[state + 1]
        assert set(logged) - set(end) <= {
            "optimizer/learning_rate",
            "routing/flips_numeric",
            "routing/flips_old_current_by_update",
        }
        shared = (set(logged) & set(end)) - {"step"}
        assert len(shared) > 40
        # check/current_old is of the first update in a run's log and over all updates in a branch
        assert {key: end[key] for key in shared if not key.startswith("check/current")} == {
            key: logged[key] for key in shared if not key.startswith("check/current")
        }


def test_arms_share_the_rollout_and_part_where_experts_change(straight):
    _, rows = straight
    pairs = list(zip(of(rows, "GRPO"), of(rows, "GRPO+R2"), strict=True))
    assert all(grpo["reward/mean"] == replay["reward/mean"] for grpo, replay in pairs)
    assert any(grpo["entropy"] != replay["entropy"] for grpo, replay in pairs)
    assert all(replay["check/unrecorded"] == 0 for _, replay in pairs)


def test_branches_go_on_below_a_damaged_checkpoint(straight, folder, tmp_path):
    """The last state is taken and saved again, and its rows are those of before."""
    whole, expected = straight
    workdir = shutil.copytree(whole, tmp_path / "copy")
    for path in (workdir / "checkpoints" / str(STEPS) / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert take(workdir, planned(folder, {"GRPO": {}, "GRPO+R2": R2}, **TWO_KEPT)) == expected
    assert (workdir / "damaged_checkpoints" / str(STEPS)).is_dir()
    assert steps_of(workdir) == [STEPS - 1, STEPS]


def test_arms_sample_once_and_go_on_behind_the_prompts_of_their_common_rollout():
    """An arm that weighs rewards otherwise samples by itself."""
    engine = Script(*HOW, answers=(MIXED,) * PROMPTS)
    learner = Learner(engine.model, objectives.make("grpo"), optax.sgd(1.0))
    scorer, sampled = Scorer(learner, ReplayConfig(), engine.group_size), {}
    state = make_state(engine.model, {}, learner.optimizer)
    rollouts, streams = [], [RolloutStream(Prompts()) for _ in range(3)]
    for stream, rewards in zip(streams, (PLAIN, PLAIN, weighting(length_weight=0.5)), strict=True):
        arm = branching._Shared(engine, scorer, TASK, None, 0, PROMPTS, UPDATES, OFF, rewards, sampled=sampled)
        rollouts.append(arm.sample(stream, 1, state))
    assert [stream.prompts.batches for stream in streams] == [1, 1, 1]
    assert rollouts[0] is rollouts[1] is not rollouts[2]


@pytest.mark.slow
def test_killed_branches_go_on_bit_for_bit(straight, folder, tmp_path):
    """Ended after two rollouts, with rows of a third state that no checkpoint knows and a half-written line."""
    _, expected = straight
    arms = {"GRPO": {}, "GRPO+R2": R2}
    assert take(tmp_path, planned(folder, arms, steps=2)) == expected[: len(expected) * 2 // 3]
    with open(tmp_path / "branches.jsonl", "a") as log:
        log.write('{"state": 2, "arm": "", "step": 0, "eval/greedy": 7}\n{"state": 2, "arm": "GR')
    assert take(tmp_path, planned(folder, arms)) == expected
    with pytest.raises(ValueError, match="holds the checkpoint of other branches"):
        take(tmp_path, planned(folder, arms, every=2))


@pytest.mark.slow
def test_branches_of_two_rollouts_are_runs_of_two_rollouts(straight, folder, tmp_path):
    """The first rollout is the one of the branch of one; the state after the first is branched from again."""
    _, one = straight
    rows = take(tmp_path, planned(folder, {"GRPO": {}, "GRPO+R2": R2}, rollouts=2, evaluate=(1,)))
    assert [(row["state"], row["step"]) for row in of(rows, "GRPO+R2")] == [
        (state, step) for state in range(3) for step in (1, 2)
    ]
    first = of(rows, "GRPO+R2")[0]
    assert first == of(one, "GRPO+R2")[0]  # evaluated on the way, too
    # of the baseline, the second rollout of the first branch is the first of the second: the same policy and keys
    again, second = of(rows, "GRPO")[1], of(rows, "GRPO")[2]
    assert {**second, "state": 0, "step": 2} == {key: again[key] for key in second}
    assert of(rows, "GRPO")[1]["eval/greedy"] == of(one, "GRPO")[1]["eval/greedy"]


def test_a_branch_is_evaluated_on_the_way_where_that_is_asked(monkeypatch):
    """What an evaluation finds is the number of rollouts so far."""
    taken, run = [], mock.Mock(Run)
    numbers = Branching(rollouts=4, evaluate=(1, 2)).numbers()
    assert numbers == {"first": 1, "every": 1, "rollouts": 4, "evaluate": [1, 2]}
    assert Branching.of(json.loads(json.dumps(numbers))) == Branching(rollouts=4, evaluate=(1, 2))
    assert "evaluate" not in Branching(rollouts=4).numbers()  # the hash of a DIR is made of these
    monkeypatch.setattr(branching, "_taken", lambda run, state, *_: taken.append(1) or (state, {}))
    monkeypatch.setattr(branching, "_sharing", lambda run, sampled: run)
    monkeypatch.setattr(branching, "_copy", lambda state: state)
    whole = SimpleNamespace(
        plan=SimpleNamespace(branching=Branching(rollouts=4, evaluate=(1, 2))),
        _evaluated=lambda state: {"eval/greedy": len(taken)},
    )
    rows = branching.Trajectory._branch(whole, run, mock.Mock(TrainState), None, 10, {})
    assert [row.get("eval/greedy") for row in rows] == [1, 2, None, 4]
    with pytest.raises(ValueError, match=r"branching.evaluate=\(5,\) must be numbers of rollouts from 1 to rollouts=4"):
        Branching(rollouts=4, evaluate=(5,))


def test_what_arms_share_is_checked(folder, tmp_path):
    with pytest.raises(ValueError, match=r"arm 'wide' sets model.hidden_size=64 where the trajectory has 32"):
        planned(folder, {"GRPO": {}, "wide": {"model.hidden_size": "64"}})
    with pytest.raises(ValueError, match=r"rollout.prompts=8 where .* has 16; .*make it a condition"):
        planned(folder, {"few": {"rollout.prompts": "8"}})
    with pytest.raises(
        ValueError, match=r"arm 'late': rollout.lag=2 trains on rollouts of states before .* set it to 0"
    ):
        planned(folder, {"GRPO": {}, "late": {"rollout.lag": "2"}})
    served = {"rollout.engine": "vllm", "rollout.servers": "('http://host:1',)"}
    with pytest.raises(ValueError, match=r"arm 'served': rollout.engine=vllm holds the weights of one .* to jax"):
        planned(folder, {"GRPO": {}, "served": served})
    whole = json.dumps(Branching(0, 1, 1, ()).numbers() | {"arms": {"GRPO": {}}})
    with pytest.raises(ValueError, match=r"the trajectory: task.name='guess' has several turns, .* of whole runs"):
        plan("configs/turns.py:guess_grpo_smoke", [("task.data_dir", str(folder))], whole)
    with pytest.raises(ValueError, match="must be JSON with first, every, rollouts and arms"):
        plan(CONFIG, [], '{"first": 1}')
    with pytest.raises(ValueError, match=r"branching\.every=0"):
        plan(CONFIG, [], '{"every": 0, "arms": {}}')
    with pytest.raises(ValueError, match="keeps another state than the trajectory"):
        take(tmp_path, planned(folder, {"free": {"optimizer.clip_norm": "0.0"}}))


def test_a_sweep_that_branches_plans_one_process_a_trajectory():
    arms = [{"arm": "A"}, {"arm": "A+R2", **R2}]
    runs = product(arms, each("condition", ["lr 1"]), each("seed", [0, 1]))
    sweep = Sweep("?", runs, baseline="A", config=CONFIG, branching=Branching(first=1, every=2))
    assert list(sweep.branching.states(6)) == [1, 3, 5]
    assert list(Branching(rollouts=3).states(5)) == [1, 2, 3, 4]
    trajectories = sweep.planned()
    assert [run.folder for run in trajectories] == ["lr_1/0", "lr_1/1"]
    assert trajectories[0].arms == ["A", "A+R2"]
    assert "'--branches={" in command(trajectories[0], "out", "jaxrl_llm.sweep.branching").replace('"', "")
    digest, steps, _ = BRANCHING.identify(CONFIG, trajectories[0].overrides)
    assert (len(digest), steps) == (16, 3)
    assert BRANCHING.identify(CONFIG, trajectories[1].overrides)[0] != digest
    with pytest.raises(ValueError, match=r"condition 'lr 1', seed 0 has no arm 'A' to branch from"):
        Sweep("?", [{"arm": "A", "seed": 0}, {"arm": "B", "condition": "lr 1", "seed": 0}], "A", branching=Branching())


def test_the_report_pairs_by_state_and_clusters_by_trajectory(tmp_path):
    """Two states in each of five trajectories, by hand: differences of 0, 0.1, ..., 0.4 a trajectory, mean 0.2."""
    trajectories = {}
    for seed in range(5):
        trajectories["", "", seed] = rows = []
        for state in (1, 2):
            gain = seed / 10 + (0.05 if state == 1 else -0.05)
            rows.append({"state": state, "arm": "", "step": 0, "eval/greedy": 0.3})
            rows.append({"state": state, "arm": "A", "step": 1, "eval/greedy": 0.4})
            rows.append({"state": state, "arm": "B", "step": 1, "eval/greedy": 0.4 + gain})
        if seed == 4:
            rows.append({"state": 3, "arm": "", "step": 0, "eval/greedy": 0.3})
            rows.append({"state": 3, "arm": "B", "step": 1, "failed": "step 4: the loss is not finite"})
    study_of(tmp_path, trajectories)
    (tmp_path / "4" / "result.json").unlink()
    study = load(tmp_path)
    (comparison,) = compare(study, "")
    assert (comparison.difference.n, comparison.difference.pairs) == (5, 10)
    assert comparison.difference.mean == pytest.approx(0.2)
    assert study.unfinished == ["trajectory, seed 4: not started, 3 states branched"]
    assert next(run for run in study.runs if run.branch == "3").diverged
    printed = write_report(tmp_path)
    assert "5 (10 pairs)" in printed
    assert "20 branches from 11 states of 5 trajectories." in printed
    assert "seed 4, branch 3: diverged" in printed


def test_the_report_over_conditions(tmp_path):
    """Long names are slanted; an arm that is missing from a condition leaves a gap."""
    conditions = [f"N = {n}, router noise {noise}" for n in (1, 4) for noise in (0, 1, 2)]
    start = {"state": 0, "arm": "", "step": 0, "eval/greedy": 0.3}
    trajectories = {
        ("", condition, seed): [start]
        + [
            {"state": 0, "arm": arm, "step": 1, "eval/greedy": 0.4 + 0.1 * (place + seed)}
            for place, arm in enumerate("ABC" if condition != conditions[0] else "AB")
        ]
        for condition in conditions
        for seed in (0, 1)
    }
    study = study_of(tmp_path, trajectories)
    write_report(tmp_path)
    assert "## Across conditions" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figures" / "differences_by_condition.png").exists()
    (ax,) = differences_by_condition(study).axes
    assert [label.get_text() for label in ax.get_xticklabels()] == conditions
    assert {label.get_rotation() for label in ax.get_xticklabels()} == {25}


def test_parts_of_a_sweep_that_share_a_dir_share_its_plan(tmp_path):
    """What has begun stays, with the same branching; a plan that cannot be read is replaced."""
    path = tmp_path / "sweep.json"

    def folders(condition, branching):
        sweep = Sweep("?", [{"arm": "A", "seed": 0, "condition": condition}], baseline="A", branching=branching)
        _write_plan(tmp_path, sweep, {run.folder: ("hash", 1) for run in sweep.planned()})
        (tmp_path / condition / "0").mkdir(parents=True, exist_ok=True)
        (tmp_path / condition / "0" / "config.json").write_text("{}")
        return [run["folder"] for run in json.loads(path.read_text())["runs"]]

    along = Branching(rollouts=4, evaluate=(1, 2))
    assert folders("a", along) == ["a/0"]
    assert folders("b", along) == ["a/0", "b/0"]
    assert folders("c", Branching()) == ["c/0"]
    path.write_text("{")
    assert folders("a", along) == ["a/0"]
