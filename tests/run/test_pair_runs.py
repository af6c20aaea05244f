"""Whole runs on pairs and on given answers: reward model, DPO and supervised training by the one trainer."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm import evaluation, generate
from jaxrl_llm.main import main
from jaxrl_llm.objectives.calibration import calibrate
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain, write_json
from jaxrl_llm.report import write
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import config_hash, validate
from tests.reference import tiny_run
from tests.reference.metrics_doc import documented

pytestmark = pytest.mark.slow  # whole runs; tests/training and tests/objectives have their parts

STEPS = 4
SIZES = {"rollout.prompts": 16, "evaluation.prompts": 16, "steps": STEPS, "checkpoint.every": 2, "evaluation.every": 2}


def make(folder, name, **changes):
    own = {"rollout.group_size": 1 if name == "sft" else 2, "warm_start.steps": 0 if name == "sft" else 50}
    return tiny_run.make_config(folder, name, **(own | SIZES | changes))


@pytest.fixture(scope="module")
def dpo(folder, tmp_path_factory):
    """(config, DIR, last evaluation) of a run from the first step to the last."""
    config, workdir = make(folder, "dpo"), tmp_path_factory.mktemp("dpo")
    return config, workdir, plain(tiny_run.train(workdir, config)[0])


@pytest.fixture(scope="module")
def rewards(folder, tmp_path_factory):
    config, workdir = make(folder, "reward_model", steps=2), tmp_path_factory.mktemp("rewards")
    tiny_run.train(workdir, config)
    record(workdir, config)
    return config, workdir


def record(workdir, config):
    """config.json, which the command line writes."""
    write_json(
        workdir / "config.json",
        {"format": FORMAT, "config": plain(config.to_dict()), "config_hash": config_hash(config)},
    )


def test_dpo_starts_at_its_reference_and_leaves_it(dpo):
    """log pi = log pi_ref at first: every margin is 0 and the loss log 2; then margins and log-probs move."""
    rows = tiny_run.metrics(dpo[1])
    assert {key for row in rows for key in row} - {"step"} <= documented(), "add them to the documentation"
    assert rows[1]["loss/pairs"] == pytest.approx(np.log(2), abs=1e-5)
    assert abs(rows[1]["pairs/margin"]) < 1e-5
    assert rows[0]["eval/brier"] == pytest.approx(0.25, abs=1e-5)
    assert abs(rows[4]["eval/pair_margin"]) > 1e-3
    assert rows[4]["eval/logprob_chosen"] != rows[0]["eval/logprob_chosen"]
    assert {"eval/greedy", "eval/pass_at_1", "eval/logprob_chosen"} <= rows[0].keys()
    assert not {"pairs/incomplete", "update/skipped"} & {key for row in rows[1:] for key in row if row[key]}
    assert "time/rollout_s" not in rows[1]


@pytest.mark.parametrize(
    "lost", [pytest.param(False, id="kept", marks=pytest.mark.slow), pytest.param(True, id="lost")]
)
def test_a_run_on_pairs_resumes_bit_for_bit(dpo, folder, tmp_path, lost):
    """Stopped after step 2; also where the log-probs of the start were lost and are computed again."""
    config, whole, found = dpo
    tiny_run.train(tmp_path, make(folder, "dpo", steps=2))
    kept = np.load(tmp_path / "reference" / "train.npy")
    if lost:
        shutil.rmtree(tmp_path / "reference")
    assert plain(tiny_run.train(tmp_path, config)[0]) == found
    np.testing.assert_array_equal(np.load(tmp_path / "reference" / "train.npy"), kept)
    (_, state), (_, wanted) = (tiny_run.final_state(workdir, config) for workdir in (tmp_path, whole))
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert tiny_run.metrics(tmp_path) == tiny_run.metrics(whole)


def test_the_reward_models_dir_is_a_dir_like_any_other(rewards, capsys):
    """Its parameters end in a head; the command evaluates its held-out pairs, the report draws them."""
    config, workdir = rewards
    step, saved = tiny_run.final_state(workdir, config)
    assert (step, saved.params["value_head"]["kernel"].shape) == (2, (config.model.hidden_size,))
    assert np.abs(saved.params["value_head"]["kernel"]).max() > 0
    last = tiny_run.metrics(workdir)[-1]
    assert "eval/greedy" not in last
    assert evaluation.main(["--workdir", str(workdir)]) == 0
    assert "held-out pairs ordered right" in capsys.readouterr().out
    told = json.loads((workdir / "evaluation.jsonl").read_text().splitlines()[-1])
    assert {key: told[key] for key in last if key.startswith("eval/")} == {
        key: value for key, value in last.items() if key.startswith("eval/")
    }
    assert sum(told["eval/reliability_pairs"]) == 16
    write.write_report(workdir)
    assert (workdir / "figures" / "reliability.png").exists()
    assert "answers are right" not in (workdir / "report.md").read_text()  # it gave none


def test_training_pairs_are_refused_before_anything_is_evaluated(rewards, capsys):
    assert evaluation.main(["--workdir", str(rewards[1]), "--split=train"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--split=train: pairs" in printed.err


def test_the_evaluation_is_that_of_the_rewards(rewards):
    config, workdir = rewards
    run = assembly.build(validate(config))
    state = run.blank().restored(tiny_run.final_state(workdir, config)[1])
    metrics, rows = run.source.evaluate(state)
    margins = np.array([row["reward_chosen"] - row["reward_rejected"] for row in rows])
    assert len(margins) == config.log.samples
    assert metrics["eval/pair_margin"] != 0
    every = dataclasses.replace(run.source, samples=16).evaluate(state)[1]
    found = calibrate(np.array([row["reward_chosen"] - row["reward_rejected"] for row in every]))
    assert (metrics["eval/pair_accuracy"], metrics["eval/brier"]) == pytest.approx((found.accuracy, found.brier))


def test_a_reward_model_answers_nothing(rewards, capsys):
    assert generate.main(["--workdir", str(rewards[1]), "--prompt", "123="]) == 2
    assert "holds a reward model, which judges answers and gives none" in capsys.readouterr().err


@pytest.mark.slow
def test_supervised_training_is_the_warm_start(folder, tmp_path):
    """The same data, loss, step and optimizer: the very same parameters."""
    config = make(folder, "sft", steps=50, **{"rollout.prompts": 64, "evaluation.every": 50, "checkpoint.every": 50})
    config.optimizer.learning_rate = config.warm_start.learning_rate
    tiny_run.train(tmp_path, config)
    losses = [row["loss/policy"] for row in tiny_run.metrics(tmp_path)[1:]]
    assert losses[-1] < 0.7 * losses[0]
    _, saved = tiny_run.final_state(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, saved.params, tiny_run.start_of(make(folder, "dpo")))


def test_supervised_training_on_the_chosen_answers_of_a_file(folder, tmp_path):
    """Each prompt n has the answer n: those are the rows, masks begin after the prompt, and the rejected stay out."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n:02}=", "chosen": f"{n:02}", "rejected": "9"} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = assembly.build(validate(make(folder, "sft", **{"preference.file": str(path)})))
    assert run.data.startswith(f"the chosen answers of {len(run.source.data.splits.train)} pairs of {path}, ")
    batch = run.source.next(run.source.stream(), 1, jax.eval_shape(run.blank)).rollout
    assert len(batch.tokens) == 16
    for tokens, held, mask in zip(*map(np.asarray, (batch.tokens, batch.segment_ids, batch.loss_mask)), strict=True):
        text = run.settings.task.tokenizer.decode(tokens[: held.sum() - 1].tolist())
        assert (text[:2], text[3:], mask.sum()) == (text[3:], text[:2], 3)
    np.testing.assert_array_equal(batch.advantages, np.asarray(batch.loss_mask, np.float32))


BAD = {
    "empty": ('{"prompt": "1=", "chosen": "", "rejected": "2"}', "chosen has no text"),
    "equal": ('{"prompt": "1=", "chosen": "1", "rejected": "1"}', "both answers are"),
    "missing": ('{"prompt": "1=", "chosen": "1"}', "it has no 'rejected'"),
    "broken UTF-8": (b'{"prompt": "1=", "chosen": "\xff", "rejected": "2"}', "is not UTF-8"),
    "overlong": ('{"prompt": "1=", "chosen": "1", "rejected": "12345678"}', "over answer_length=4"),
}


@pytest.mark.parametrize(("config", "name"), [*(("dpo", name) for name in BAD), ("sft", "empty")])
def test_a_bad_line_ends_the_command_with_its_number(folder, tmp_path, capsys, config, name):
    line, message = BAD[name]
    path = tmp_path / "pairs.jsonl"
    good = "".join(json.dumps({"prompt": f"{n}=", "chosen": f"{n}", "rejected": "9"}) + "\n" for n in range(8))
    path.write_bytes(good.encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    fields = {"task.data_dir": folder / "data", "preference.file": path}
    arguments = [f"--config.{key}={value}" for key, value in fields.items()]
    assert main(["--config", f"{config}:smoke", "--workdir", str(tmp_path / "run"), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert f"{path}, line 9: " in said
    assert message in said
    assert "preference.bad_lines=skip" in said
    assert not (tmp_path / "run").exists()


def test_lines_that_are_left_out_are_counted(folder, tmp_path):
    """Own pairs with margins are trained on; what was skipped is said when the run opens."""
    rows = [{"prompt": f"{n:02}=", "chosen": "1", "rejected": "2", "margin": 0.5} for n in range(60)]
    rows.append({"prompt": "1=", "chosen": "1", "rejected": "1"})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"preference.file": str(path), "preference.bad_lines": "skip", "steps": 1}
    config = make(folder, "dpo", **changes)
    run = assembly.build(validate(config))
    assert "lines left out: equal 1" in run.data
    drawn = run.source.next(run.source.stream(), 1, jax.eval_shape(run.blank))
    np.testing.assert_array_equal(np.unique(drawn.rollout.margins), [0, 0.5])
    config.objective.name = "ipo"
    with pytest.raises(ValueError, match=r"has margins, which a squared loss \(ipo\) has no place for"):
        assembly.build(validate(config))


KINDS = {
    "reward model, LoRA": ("reward_model", {"lora.rank": 2}),
    "reward model, packed": (
        "reward_model",
        {"updates.layout": "packed", "updates.micro_batch_rows": 8, "updates.minibatches": 2},
    ),
    "DPO, shared": ("dpo", {"updates.layout": "shared", "model.num_experts": 0, "updates.epochs": 2}),
    "IPO, LoRA": ("dpo", {"lora.rank": 2, "objective.name": "ipo"}),
    "SimPO, two devices": ("dpo", {"objective.name": "simpo", "mesh.shape": (2, 1, 1, 1)}),
    "KL to the start": ("sft", {"objective.kl_coef": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(*kind, id=name, marks=[pytest.mark.long] * (name not in ("reward model, packed", "IPO, LoRA")))
        for name, kind in KINDS.items()
    ],
)
def test_other_kinds_of_run_resume_too(folder, tmp_path, name, changes):
    """Interrupted by its number of steps after 1, gone on to 3, and the same as the run without a break."""
    tiny_run.assert_parts_are_the_whole(tmp_path, functools.partial(make, folder, name, **changes))
