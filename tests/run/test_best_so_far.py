"""The best checkpoint of a run and its early end: which stays, who takes it, and what a kill or a resume changes."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.check import data_rows
from jaxrl_llm.check.findings import LOOK
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain, write_json
from jaxrl_llm.run import assembly, reopened, saves, trainer
from jaxrl_llm.run.best_so_far import Best, ended_early, evaluated_keys
from jaxrl_llm.run.blocks import CheckpointConfig
from jaxrl_llm.run.opening import finished
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.training.pending import Pending
from tests.reference import tiny_run

# After step 0, 1, ...: the best is that of step 2, and its equal is no better.
GREEDY = (0.4, 0.2, 0.5, 0.5, 0.1, 0.3, 0.45, 0.2, 0.1)
SHORT = {
    "steps": 8,
    "evaluation.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.best": "eval/greedy",
}
BOUNDS = {"dtype": "float32", "sampler_dtype": "float32", "truncated": False, "flipped": 0.0}


class Killed(Exception):
    pass


@pytest.fixture
def evaluated(monkeypatch):
    """Evaluations give what `GREEDY` says of their step."""

    def evaluate(run, state):
        step = int(state.updates) // run.settings.updates.updates_per_rollout
        return {"eval/greedy": GREEDY[step], "eval/reward": -GREEDY[step]}, []

    monkeypatch.setattr(trainer, "evaluate", evaluate)


def config_of(folder, **changes):
    return tiny_run.make_config(folder, **{"warm_start.steps": 0, "log.diagnostics_every": 0} | SHORT | changes)


def rows_of(workdir, name):
    return [row.get(name) for row in tiny_run.metrics(workdir)]


def test_the_best_checkpoint_stays_and_a_patience_ends_the_run(counted, folder, tmp_path, monkeypatch):
    """Three evaluations after that of step 2 are no better; the run goes on only where more patience is given."""
    config = config_of(folder, **{"checkpoint.early_stopping_patience": 3})
    found, said = tiny_run.train(tmp_path / "run", config)
    assert steps_of(tmp_path / "run") == [2, 5]
    assert "ended early: eval/greedy has not been better than 0.5 at step 2 for 3 evaluations" in said
    assert rows_of(tmp_path / "run", "eval/best") == [None, 0.2, 0.5, 0.5, 0.5, 0.5]
    assert rows_of(tmp_path / "run", "eval/best_step") == [None, 1, 2, 2, 2, 2]
    assert rows_of(tmp_path / "run", "eval/since_best") == [None, 0, 0, 1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "take_step", lambda *_: pytest.fail("it trains on"))
        assert tiny_run.train(tmp_path / "run", config)[0] == found

    write_json(tmp_path / "run" / "result.json", found)
    ends = [config.checkpoint.copy_and_resolve_references() for _ in range(2)]
    ends[1].early_stopping_patience = 4
    assert [ended_early(tmp_path / "run", CheckpointConfig.of(one.to_dict())) for one in ends] == [True, False]
    assert "run ended early: 5 rollouts, held-out greedy 0.300" in finished(
        tmp_path / "run", 8, CheckpointConfig.of(config.checkpoint.to_dict())
    )
    config.checkpoint.early_stopping_patience = 4
    tiny_run.train(tmp_path / "run", config)
    assert steps_of(tmp_path / "run") == [2, 6]


@jax.jit
def moved(trained, by):
    return jax.tree.map(lambda x: x + by.astype(x.dtype), trained)


@pytest.fixture
def counted(evaluated, monkeypatch):
    """A step adds the number of its first prompt to all parameters: nothing is sampled and nothing learnt."""

    def take_step(run, state, stream, step):
        trained = moved(state.trained, next(stream)["uid"][0])
        row = Pending(
            step, {"time/update_s": 0.0}, {}, [{"loss/total": M.Mean(jnp.float32(step), jnp.float32(1))}], [], BOUNDS
        )
        return state.replace(trained=trained, updates=state.updates + run.settings.updates.updates_per_rollout), row

    monkeypatch.setattr(trainer, "take_step", take_step)


def test_a_kill_between_evaluation_and_save_changes_nothing(counted, folder, tmp_path, monkeypatch):
    """Before each thing that is done there, for the best step and for the end of the patience: the resumed run is the
    one without a break."""
    config = config_of(folder, **{"checkpoint.early_stopping_patience": 3})
    whole, start, kills = tiny_run.train(tmp_path / "whole", config), tiny_run.start_of(config), []

    def dying(owner, name, at):
        goes_on = getattr(owner, name)

        def dies(self, *given, **named):
            if at in given and name not in kills:
                kills.append(name)
                getattr(self, "_checkpoints", self).wait()  # for the thread that a kill would end
                raise Killed
            return goes_on(self, *given, **named)

        monkeypatch.setattr(owner, name, dies)

    for place in (
        (saves.Saves, "judged", 2),
        (Checkpoints, "save", 2),
        (saves.Saves, "due", 5),
        (saves.Saves, "write", 5),
    ):
        dying(*place)
    for _ in range(4):
        with pytest.raises(Killed):
            tiny_run.train(tmp_path / "broken", config, start)
    assert tiny_run.train(tmp_path / "broken", config, start)[0] == whole[0]
    assert kills == ["judged", "save", "due", "write"]
    assert steps_of(tmp_path / "broken") == steps_of(tmp_path / "whole") == [2, 5]
    assert tiny_run.metrics(tmp_path / "broken") == tiny_run.metrics(tmp_path / "whole")
    lines = [(tmp_path / place / "metrics.jsonl").read_text().splitlines() for place in ("broken", "whole")]
    assert len(lines[0]) == len(lines[1])  # a row that is there twice is read once
    ours, theirs = (tiny_run.final_state(tmp_path / place, config)[1] for place in ("broken", "whole"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_best_is_saved_at_its_step_and_read_by_its_name(counted, folder, tmp_path):
    """No checkpoint is due before the end; the one of step 2 is written, and is the policy of a run that ends there."""
    config = config_of(folder, steps=3, **{"checkpoint.every": 100})
    tiny_run.train(tmp_path / "run", config)
    shorter = config_of(folder, steps=2)
    tiny_run.train(tmp_path / "two", shorter)
    record = {"format": FORMAT, "config": plain(config.to_dict()), "config_hash": config_hash(config)}
    write_json(tmp_path / "run" / "config.json", record)
    assert steps_of(tmp_path / "run") == [2, 3]
    _, step, state = reopened.restored(tmp_path / "run", "best")
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, state.saved(), tiny_run.final_state(tmp_path / "two", shorter)[1])


def test_a_run_without_a_best_has_none_to_give(folder, tmp_path):
    config = config_of(folder, **{"checkpoint.best": ""})
    tiny_run.untrained(tmp_path / "run", config)
    says = "run keeps no best checkpoint, which takes checkpoint.best and an evaluation; give --step=1"
    with pytest.raises(FileNotFoundError, match=re.escape(says)):
        reopened.restored(tmp_path / "run", "best")


def test_lower_is_better_and_what_is_not_finite_is_no_best():
    best = Best(CheckpointConfig(best="eval/brier", best_mode="min", early_stopping_patience=2))
    seen = []
    for step, value in enumerate([math.nan, 0.3, 0.4, math.nan, 0.2], start=1):
        best = best.after(step, {"eval/brier": value})
        seen.append((best.value, best.step, best.waited, best.ends))
    assert seen == [
        (None, None, 1, False), (0.3, 2, 0, False), (0.3, 2, 1, False), (0.3, 2, 2, True), (0.2, 5, 0, False)
    ]  # fmt: skip
    assert Best.resumed(best.config, best.saved()) == best
    other = dataclasses.replace(best.config, best="eval/pair_accuracy")
    assert Best.resumed(other, best.saved()) == Best(other)  # what is best by another metric is not known yet
    assert Best.resumed(other, None) == Best(other)
    higher = dataclasses.replace(best.config, best_mode="max")
    assert Best.resumed(higher, best.saved()) == Best(higher)  # the least of a metric is not its largest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"rollout.router_noise": 0.5, "rewards.functions": ("exact",)}),
        pytest.param("dpo", {"rollout.group_size": 2}, marks=pytest.mark.slow),
        pytest.param("reward_model", {"rollout.group_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_keys_that_may_be_best_are_those_of_an_evaluation(tmp_path, name, changes):
    config = tiny_run.make_config(tmp_path, name, **{"warm_start.steps": 0} | changes)
    run = assembly.build(validate(config))
    found, _ = trainer.evaluate(run.started(state := run.start(print), None), state)
    single = {key for key, value in found.items() if np.ndim(value) == 0} - {"eval/k"}
    assert set(evaluated_keys(run.settings)) == single


def test_a_typing_error_is_refused_before_the_start(folder):
    known = "eval/greedy, eval/greedy_reward, eval/reward, eval/pass_at_1, eval/pass_at_k"
    says = f"checkpoint.best='eval/gredy' is no metric of the run's evaluations; give {known}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        validate(config_of(folder, **{"checkpoint.best": "eval/gredy"}))
    with pytest.raises(ValueError, match=r"waits for no metric; set checkpoint\.best, for example to eval/greedy"):
        validate(config_of(folder, **{"checkpoint.best": "", "checkpoint.early_stopping_patience": 2}))


def test_check_says_what_stays_and_what_ends_the_run(folder):
    settings = validate(config_of(folder, **{"evaluation.every": 2, "checkpoint.early_stopping_patience": 3}))
    row = data_rows.best(settings)
    assert row.seen == (
        "the one with the highest eval/greedy stays beside the newest 1; 3 evaluations without a better one end the "
        "run, which has 4"
    )
    assert len(row.check) <= 16
    longer = dataclasses.replace(settings.checkpoint, early_stopping_patience=4)
    assert data_rows.best(dataclasses.replace(settings, checkpoint=longer)).verdict == LOOK
    assert data_rows.best(dataclasses.replace(settings, checkpoint=CheckpointConfig())) is None
