"""Whole runs of episodes: the checks of a run hold over turns, and how a step is cut changes nothing."""

import dataclasses
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys

import jax
import msgpack
import numpy as np
import pytest

from jaxrl_llm import evaluation, generate, tasks
from jaxrl_llm.ground.array_typing import shapes_for_arrays
from jaxrl_llm.plan.programs import programs
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run import assembly, trainer
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.tasks.environments import guess
from jaxrl_llm.tasks.environments.guess import Guessing
from jaxrl_llm.training.episode_rollouts import EpisodeRollouts
from tests.reference.page_commands import ROOT
from tests.reference.tiny_run import (
    assert_parts_are_the_whole,
    final_state,
    make_config,
    metrics,
    samples,
    train,
    write_config,
)

pytestmark = pytest.mark.slow
SORT = tasks.make("sort")


def turns(folder, **changes):
    """Guess with ranges of 15 numbers, that a warm start of seconds learns enough for several turns."""
    fields = {"task.options": {"numbers": 15, "turns": 4, "train_size": 512, "test_size": 64}, "steps": 2}
    fields |= {"warm_start.steps": 150, "warm_start.learning_rate": 1e-2, "rollout.prompts": 8, "rollout.group_size": 4}
    return make_config(folder, "turns", **(fields | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("turns")


@functools.cache
def rows_of(folder, name, **changes):
    config = turns(folder, **dict(changes))
    train(folder / name, config)
    return [row for row in metrics(folder / name) if row["step"]]


def test_episodes_have_several_turns_and_dialogues(folder):
    first = rows_of(folder, "plain")[0]
    assert first["rollout/turns_mean"] > 1.5
    assert first["check/old_sampler_mean"] < 1e-5
    assert first["rollout/episode_length_mean"] > 9 + first["rollout/length_mean"]
    assert any("\n> " in row["answer"] for row in samples(folder / "plain") if "answer" in row)


@shapes_for_arrays()
def test_the_programs_of_turns_are_counted_before_a_run(folder):
    """What is compiled ahead is what a run compiles: rows of whole episodes, over devices too."""
    for shape in ((1, 1, 1, 1), (2, 2, 1, 1)):
        run = assembly.build(validate(turns(folder, **{"mesh.shape": shape})))
        found = programs(run, ["rollout", "update", "evaluation"])
        assert [one.name for one in found] == ["rollout"] * 3 + ["update"] + ["evaluation"] * 3
        rollout = found[2].traced.out_info
        assert rollout.tokens.shape == (32, 9 + 4 * 3 + 3)
        assert rollout.routes.sampled.experts.shape == (run.model.config.num_moe_layers, 32, 24, 2)
        assert found[1].traced.lower().compile().memory_analysis().temp_size_in_bytes > 0


def test_generate_shows_an_episode_as_a_dialogue(folder, capsys):
    """Greedy, it is the episode that the last evaluation played for this prompt."""
    rows_of(folder, "plain")
    write_config(folder / "plain", turns(folder))
    (last,) = [row for row in samples(folder / "plain") if "greedy" in row and row["step"] == 2][:1]
    assert generate.main(["--workdir", str(folder / "plain"), "--episode", "0", "--greedy"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{last['prompt']}\n{last['greedy']}\nreward {last['reward']:g}")
    assert "\n> " in said
    assert generate.main(["--workdir", str(folder / "plain"), "--episode", "64"]) == 2
    assert "--episode=64 is out of range; give --episode between 0 and 63" in capsys.readouterr().err


def test_an_evaluation_records_every_episode_in_verifiers_form(folder, capsys):
    """Eight prompts with two drawn episodes and a greedy one; what is written is what was evaluated."""
    rows_of(folder, "plain")
    write_config(folder / "plain", turns(folder))
    given = ["--workdir", str(folder / "plain"), "--prompts", "8", "--samples", "2", "--k", "1", "--show", "0"]
    result = {}
    for name in ("none", "traces.msgpack"):
        file = folder / name
        recorded = [] if name == "none" else ["--record", str(file)]
        assert evaluation.main([*given, *recorded, "--json", str(folder / "result.json")]) == 0
        result[name] = json.loads((folder / "result.json").read_text())
    assert result["none"] == result["traces.msgpack"]
    with (folder / "traces.msgpack").open("rb") as file:
        whole = list(msgpack.Unpacker(file))
    assert [one["group"]["id"] for one in whole] == [*"0011223344556677", *"01234567"]
    drawn = [one["traces"][0]["rewards"]["environment"]["score"] for one in whole[:16]]
    assert np.mean(drawn) == pytest.approx(result["none"]["eval/reward"])
    for one in whole:
        nodes = one["traces"][0]["nodes"]
        assert [len(node["token_ids"]) for node in nodes] == [node["routed_experts"]["shape"][0] for node in nodes]
        assert [node["sampled"] for node in nodes] == [bool(k % 2) for k in range(len(nodes))]
    for wrong, said in (("episodes.txt", "must end in .jsonl or .msgpack"), ("no/such.jsonl", "there is no folder")):
        assert evaluation.main([*given, "--record", str(folder / wrong)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replayed_routes_are_the_recorded_ones(folder, mode):
    """Float32: at equal parameters no expert flips, and what is replayed lacks no token."""
    first = rows_of(folder, mode, **{"replay.mode": mode})[0]
    assert first["check/unrecorded"] == 0
    assert first["routing/flips_numeric"] == 0
    assert first["routing/flips_sampler_old"] == 0
    assert first["check/current_old_mean"] < 1e-7


def test_exact_numerics_agree_to_the_bit(folder):
    for row in rows_of(folder, "exact", **{"model.numerics": "exact", "replay.mode": "R3"}):
        assert row["check/sampler_equal"] == 1


@pytest.mark.parametrize("changes", [{"updates.micro_batch_rows": 2}, {"updates.layout": "packed"}])
def test_a_cut_of_the_minibatch_changes_no_gradient(folder, changes):
    """Four rows a minibatch are two micro-batches, or share rows."""
    fields = {"updates.minibatches": 8, "updates.layout": "padded"}
    whole, cut = (rows_of(folder, f"cut{more}", **(fields | more))[0] for more in ({}, changes))
    for name in ("grad/norm", "loss/policy", "rollout/length_mean", "reward/mean"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("recipe", ["gspo", "ppo"])
def test_other_recipes_train_on_episodes(folder, recipe):
    critic = {"critic.kind": "head"} if recipe == "ppo" else {}
    row = rows_of(folder, recipe, **{"objective.name": recipe} | critic)[1]
    assert row["grad/norm"] > 0
    assert row["update/not_finite"] == 0


def test_routers_logits_are_replayed_over_turns(folder):
    """Replayed logits give the sampler's own gates: at equal parameters nothing changes, and no token lacks them."""
    first = rows_of(folder, "logits", **{"replay.mode": "R3", "replay.what": "logits"})[0]
    assert first["rollout/turns_mean"] > 1.5
    assert first["check/unrecorded"] == 0
    assert first["routing/flips_numeric"] == 0
    assert first["check/current_old_mean"] < 1e-6


def test_flips_and_the_parts_of_the_ratio_are_of_answers_alone(folder):
    """The decomposition of a whole rollout of episodes; without a change of parameters nothing flips."""
    rows = rows_of(
        folder, "parts", **{"log.diagnostics_every": 1, "optimizer.learning_rate": 1e-2, "replay.mode": "R2"}
    )
    assert rows[0]["routing/flips_sampler_old"] == 0
    for row in rows:
        assert row["routing/log_ratio_var"] > 0
        assert 0 < row["routing/flips_fresh"] < 1
        assert row["routing/flipped_tokens"] > 0
        assert 0 <= row["routing/part_p50"] <= row["routing/part_p99"]


def test_episodes_share_their_prompt(folder):
    """A group's prompt once and its episodes behind it, observations in them: the gradient of padded rows."""
    dense = {"model.num_experts": 0, "updates.shuffle": "groups", "updates.minibatches": 2, "warm_start.steps": 100}
    one, other = (rows_of(folder, layout, **dense | {"updates.layout": layout})[0] for layout in ("padded", "shared"))
    assert one["rollout/turns_mean"] > 1.2
    for name in ("grad/norm", "loss/policy", "reward/mean"):
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7)


class Judging:
    """The verifier of `sort` as an environment of one turn."""

    def init(self, row):
        self.row = row

    def step(self, answer):
        known = tasks.UNKNOWN not in answer
        return "", SORT.verify(self.row["prompt"], answer, self.row["answer"], self.row) if known else 0.0, True

    def close(self):
        pass


def test_an_environment_of_one_turn_is_the_run_without_it(tmp_path):
    """Bit for bit: the same rows, and the same parameters."""
    config = make_config(tmp_path, steps=2, **{"replay.mode": "R3"})
    train(tmp_path / "plain", config)
    run = assembly.build(validate(config))
    fields = {field.name: getattr(run.source, field.name) for field in dataclasses.fields(run.source)}
    fields["task"] = dataclasses.replace(run.source.task, environment=Judging)
    with RunLog(tmp_path / "judged", 2, stream=io.StringIO()) as log:
        trainer.train(dataclasses.replace(run, source=EpisodeRollouts(**fields)), log, config_hash(config))
    (_, ours), (_, theirs) = (final_state(tmp_path / name, config) for name in ("judged", "plain"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    more = {"rollout/turns_mean", "rollout/episode_length_mean"}
    for row, expected in zip(metrics(tmp_path / "judged"), metrics(tmp_path / "plain"), strict=True):
        assert {name: value for name, value in row.items() if name not in more} == expected


def announced(init, **fields):
    """The task `guess` whose environment begins as `init` says."""

    class Announced(Guessing):
        def init(self, row):
            super().init(row)
            return init(row)

    made = guess.guess

    @functools.wraps(made)
    def announcing(**options):
        return dataclasses.replace(made(**options), environment=Announced, **fields)

    return announcing


def test_an_environment_that_begins_with_the_rows_prompt_is_the_run_without(folder, monkeypatch):
    """Bit for bit."""
    rows_of(folder, "plain")
    monkeypatch.setattr(guess, "guess", announced(lambda row: row["prompt"]))
    train(folder / "said", turns(folder))
    (_, ours), (_, theirs) = (final_state(folder / name, turns(folder)) for name in ("said", "plain"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert metrics(folder / "said") == metrics(folder / "plain")
    assert samples(folder / "said") == samples(folder / "plain")


def test_first_messages_are_what_a_run_reads(folder, monkeypatch, capsys):
    """Warm start, rollouts, evaluation, samples, `generate` and a record begin with them, without the row's letters."""
    monkeypatch.setattr(guess, "guess", announced(lambda row: row["prompt"][3:]))
    row = rows_of(folder, "begun", **{"replay.mode": "R3"})[0]
    assert row["check/old_sampler_mean"] < 1e-5
    assert row["check/unrecorded"] == 0
    assert row["reward/verifier_errors"] == 0
    assert row["rollout/turns_mean"] > 1.5  # a warm start on the prompts of the rows would not know these
    read = [one["prompt"] for one in samples(folder / "begun")]
    assert all(re.fullmatch(r"\d\d-\d\d:", text) for text in read)
    write_config(folder / "begun", turns(folder, **{"replay.mode": "R3"}))
    assert generate.main(["--workdir", str(folder / "begun"), "--episode", "0", "--greedy"]) == 0
    (last,) = [one for one in samples(folder / "begun") if "greedy" in one and one["step"] == 2][:1]
    assert capsys.readouterr().out.startswith(f"{last['prompt']}\n{last['greedy']}\nreward {last['reward']:g}")
    given = ["--workdir", str(folder / "begun"), "--prompts", "2", "--samples", "1", "--k", "1", "--show", "0"]
    assert evaluation.main([*given, "--record", str(folder / "begun.jsonl")]) == 0
    for line in (folder / "begun.jsonl").read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        said, data = trace["nodes"][0], trace["task"]["data"]
        assert said["token_ids"] == tasks.make("guess").tokenizer.encode(said["message"]["content"])
        assert data["row"]["given_to_init"]["prompt"][3:] == data["prompt"] == said["message"]["content"]


class Killed(Guessing):
    """Kills the process that trains, after so many answers."""

    left = -1

    def step(self, answer):
        Killed.left -= 1
        if not Killed.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(answer)


def kills(workdir, config, at, answers):
    """The run that a process of its own begins, and does not end: after so many answers of the rollout of a step."""
    key = EpisodeRollouts._key

    def armed(self, step):
        Killed.left = answers if step == at else Killed.left
        return key(self, step)

    guess.Guessing, EpisodeRollouts._key = Killed, armed
    train(workdir, config)


def killed(code):
    """Run in a process of its own what ends by SIGKILL."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import tests.conftest; {code}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]


KILLED = {"checkpoint.every": 1, "warm_start.steps": 100}


def test_a_sigkill_in_the_middle_of_a_turn_begins_the_step_again(tmp_path):
    config = turns(tmp_path, **KILLED)
    train(tmp_path / "whole", config)
    place = repr(str(tmp_path))
    killed(
        f"import tests.run.test_turns_run as t; t.kills({place} + '/killed', t.turns({place}, **t.KILLED), 2, 40)"
    )  # of 32 first turns
    assert [row["step"] for row in metrics(tmp_path / "killed")] == [0, 1]
    train(tmp_path / "killed", config)
    (step, ours), (last, theirs) = (final_state(tmp_path / name, config) for name in ("killed", "whole"))
    assert step == last == 2
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_rollouts_of_episodes_ahead_resume_as_they_were(tmp_path):
    """With a lag; the environments hear again what was in flight."""
    lagged = {"rollout.lag": 1, "objective.correction": "tis", "replay.mode": "R3", "warm_start.steps": 20}
    assert_parts_are_the_whole(tmp_path, lambda steps: turns(tmp_path, **lagged | {"steps": steps}))
    ages = [row["rollout/age_max"] for row in metrics(tmp_path / "parts") if row["step"]]
    assert ages == [0, 1, 1]
    rewards = [[row["reward/mean"] for row in metrics(tmp_path / name) if row["step"]] for name in ("parts", "whole")]
    assert rewards[0] == rewards[1]


def test_a_run_of_episodes_resumes_as_it_was(tmp_path):
    assert_parts_are_the_whole(tmp_path, lambda steps: turns(tmp_path, **{"steps": steps, "replay.mode": "R3"}))


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
@pytest.mark.parametrize("shape", [(4, 1, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2)])
def test_on_a_mesh_sampler_and_trainer_agree_over_turns(folder, shape):
    """Rows, slices of parameters, experts and heads over four devices."""
    row = rows_of(folder, f"mesh{shape}", **{"mesh.shape": shape, "replay.mode": "R3"})[0]
    assert row["rollout/turns_mean"] > 1.5
    assert row["check/unrecorded"] == 0
    assert row["check/old_sampler_mean"] < 1e-5
    assert row["check/current_old_mean"] < 1e-6
