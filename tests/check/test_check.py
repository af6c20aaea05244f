"""A check before a run: faults that are planted, and the row in which each of them is seen."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import tasks
from jaxrl_llm.check import __main__ as check
from jaxrl_llm.check import data_rows, elsewhere, rehearsal, rehearsal_rows
from jaxrl_llm.check.doubts import examples
from jaxrl_llm.check.findings import LOOK, OK, STOP, Finding, table
from jaxrl_llm.check.fits import fits
from jaxrl_llm.check.rehearsal import other_shapes, rehearse
from jaxrl_llm.config import start_up
from jaxrl_llm.models import scoring
from jaxrl_llm.plan.chips import CHIPS
from jaxrl_llm.plan.table import measured, trace_run
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import Prompting, verifiers
from jaxrl_llm.training.rollouts import Rollouts
from tests.reference import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of the shapes of other tests, so that most of its programs are there."""
    changes = {"warm_start.steps": 0, "task.verify_truncated": True}
    return assembly.build(validate(tiny_run.make_config(tmp_path_factory.mktemp("check"), **changes)))


@pytest.fixture(scope="module")
def judged(run):
    """(the rows of a rehearsal), with what they need beside it."""
    asked, predicted = data_rows.examples_of(run), fits(run)
    return lambda r: {row.check: row for row in rehearsal_rows.rows(run, r, asked, predicted)}


@pytest.fixture(scope="module")
def rehearsed(run):
    return rehearse(run, lambda text: None)


def test_a_sound_run_has_nothing_to_stop_for(run, rehearsed, judged):
    rows = [*data_rows.rows(run, data_rows.examples_of(run)), *judged(rehearsed).values()]
    found = {row.check: row.verdict for row in rows}
    assert STOP not in found.values(), table(rows)
    assert [found[name] for name in ("batch shape", "update", "sampler", "routing", "memory")] == [OK] * 5
    assert set(rehearsed.shapes) == {"1 row at a time", "packed"}  # a mixture has no shared prompts
    assert len(rehearsed.sampler_flips) == run.model.config.num_moe_layers
    assert len(rehearsed.answers) == 128
    answer = rehearsed.answers[0]
    assert sorted(answer["prompt"].rstrip("=")) == list(answer["right"])  # the task sorts
    assert rehearsed.memory is None or rehearsed.memory >= 0
    assert min(rehearsed.seconds.values()) > 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda batch: batch.replace(sampler_logprobs=batch.sampler_logprobs + 0.05 * batch.loss_mask),
        lambda batch: batch.replace(sampler_logprobs=batch.sampler_logprobs.astype(jnp.bfloat16).astype(jnp.float32)),
    ],
    ids=["off by 0.05 nats", "of a head in bfloat16"],
)
def test_a_sampler_that_does_not_agree_is_seen(run, monkeypatch, fault):
    drawn = Rollouts.next

    def planted(*arguments):
        sound = drawn(*arguments)
        return dataclasses.replace(sound, rollout=fault(sound.rollout))

    monkeypatch.setattr(Rollouts, "next", planted)
    r = rehearse(run, lambda text: None)
    found = rehearsal_rows.sampler(run.settings, r)
    assert (found.verdict, found.check) == (STOP, "sampler")
    declared = dataclasses.replace(run.settings.rollout, dtype="bfloat16")  # then rounding is what was asked for
    found = rehearsal_rows.sampler(dataclasses.replace(run.settings, rollout=declared), r)
    assert (found.verdict, "rollout.dtype=bfloat16" in found.remedy) == (LOOK, True)


def test_a_layout_that_computes_something_else_is_seen(run, monkeypatch):
    """Planted: in the other shapes the first token of every row is taken for padding."""
    cut = rehearsal.epochs_of

    def without_first(layout):
        return layout.replace(segment_ids=np.where(np.arange(layout.index.shape[2]) == 0, 0, layout.segment_ids))

    def planted(*given, **named):
        return [[without_first(layout) for layout in epoch] for epoch in cut(*given, **named)]

    monkeypatch.setattr(rehearsal, "epochs_of", planted)
    found = rehearsal_rows.batch_shape(rehearse(run, lambda text: None))
    assert found.verdict in (LOOK, STOP)
    assert found.remedy


def nothing(prompt, answer, gold, row):
    return 0.0


def test_a_verifier_that_gives_nothing_is_seen(run):
    task = dataclasses.replace(run.settings.task, verify=nothing)
    settings, source = (dataclasses.replace(one, task=task) for one in (run.settings, run.source))
    faulty = dataclasses.replace(run, settings=settings, source=source)
    rows, _ = check.checked(faulty, lambda text: None)
    rows = {row.check: row for row in rows}
    assert (rows["rewards"].verdict, rows["verifier"].verdict) == (LOOK, STOP)
    assert "100% of groups have equal ones" in rows["rewards"].seen
    assert "0 of 64 right answers get at least 1" in rows["verifier"].seen


GAP = {"gap_mean": 0.03, "gap_max": 0.5, "gap_share": 0.4, "gap_rest": 0.01, "gap_k3": 1e-3}
SPACED = {"reverse": False, "strict": False, "spaced": True}
FAULTS = {  # what a rehearsal shows, the row, its verdict, what it says
    "layout": ({"shapes": {"packed": GAP}}, "batch shape", LOOK, "packed 3.0e-02 (max 5.0e-01)"),
    "a wrong layout": ({"shapes": {"packed": GAP | {"gap_mean": 2.0}}}, "batch shape", STOP, "packed 2.0e+00"),
    "two passes": ({"row": {"check/current_old_mean": 0.1}}, "update", STOP, "1.00e-01 (bound 1e-04)"),
    "not finite": ({"row": {"update/not_finite": 1.0, "loss/total": math.nan}}, "update", STOP, "loss nan"),
    "rounded": ({"row": {"update/moved": 0.012}}, "update", LOOK, "moves 1.2% of the parameters (update/moved)"),
    "flips": ({"sampler_flips": [0.0, 0.05]}, "routing", LOOK, "by layer: 0.00% 5.00%"),
    "no record": ({"row": {"check/unrecorded": 3.0}}, "routing", STOP, "3 records are missing"),
    "cut off": ({"answers": {"ended": False}}, "answers", LOOK, "0 of 128 end by themselves"),
    "no text": ({"answers": {"answer": tasks.UNKNOWN}}, "texts", STOP, "128 of 128 answers hold ids"),
    "failing": ({"answers": {"verifier_error": "TypeError: x"}}, "rewards", STOP, "failed on 128, the first: TypeE"),
    "equal": ({"teaching": False}, "rewards", LOOK, "of 128 answers"),
    "memory": ({"memory": 2**62}, "memory", LOOK, "the process grew by"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_rehearsal_shows_is_judged(rehearsed, judged, fault):
    changes, row, verdict, says = FAULTS[fault]
    if "row" in changes:
        changes = {"row": {**rehearsed.row, **changes["row"]}}
    if "answers" in changes:
        changes = {"answers": [one | changes["answers"] for one in rehearsed.answers]}
    rows = judged(dataclasses.replace(rehearsed, **changes))
    assert rows[row].verdict == verdict, rows[row]
    assert says in rows[row].seen
    assert rows[row].remedy


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", OK), ("bfloat16", LOOK)])
def test_a_rehearsal_without_a_gradient_says_that_it_saw_no_rounding(run, rehearsed, dtype, verdict):
    model = dataclasses.replace(run.settings.model, param_dtype=dtype)
    r = dataclasses.replace(rehearsed, row=rehearsed.row | {"update/moved": math.nan})
    row = rehearsal_rows.update(dataclasses.replace(run.settings, model=model), r)
    assert (row.verdict, bool(row.remedy)) == (verdict, verdict == LOOK)


def test_answers_that_are_cut_off_stop_a_run_that_does_not_verify_them(run, rehearsed):
    strict = dataclasses.replace(run.settings, task=dataclasses.replace(run.settings.task, verify_truncated=False))
    r = dataclasses.replace(rehearsed, answers=[one | {"ended": False} for one in rehearsed.answers])
    assert rehearsal_rows.ends(strict, r).verdict == STOP
    assert "not verified, as it is cut off at" in rehearsal_rows.shown_answers(strict, r.answers)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with a tokenizer that has a chat template, and a task whose prompts are chats in it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = write_tokenizer(folder, [f"{n} + 1 = {n + 1}" for n in range(50)], 300)
    task = tasks.make("addition", tokenizer=tokenizer, prompting=Prompting(chat=True), **SPACED)
    return folder, task


def tokenized(task, **changes):
    return dataclasses.replace(task, tokenizer=dataclasses.replace(task.tokenizer, **changes))


def test_a_template_opens_the_turn_of_the_answer_and_ends_it(chats):
    _, task = chats
    assert data_rows.template(task).verdict == OK
    template = task.tokenizer.template
    unopened = tokenized(task, template=template.split("{% if add_generation_prompt")[0])
    found = data_rows.template(unopened)
    assert (found.verdict, "ends before the turn of its answer" in found.seen) == (STOP, True)
    other_end = tokenized(task, end_ids=(task.tokenizer.backend.token_to_id("<|endoftext|>"),))
    found = data_rows.template(other_end)
    assert found.verdict == STOP
    assert "ends an answer with '<|im_end|>', and sampling with '<|endoftext|>'" in found.seen
    silent = tokenized(task, template="{{ messages[0].content }}")
    assert data_rows.template(silent).verdict == LOOK
    assert data_rows.template(dataclasses.replace(task, prompting=Prompting())).verdict == OK


def test_a_template_that_drops_the_prompt_is_seen(run, chats):
    task = tokenized(chats[1], template="Hello{% if add_generation_prompt %}:{% endif %}")
    faulty = dataclasses.replace(run, settings=dataclasses.replace(run.settings, task=task))
    (found,) = data_rows.doubts(faulty)
    assert (found.check, found.verdict) == ("chat template", STOP)
    assert "drops the prompt" in found.seen
    assert found.remedy.startswith("correct chat_template.jinja")


def test_a_tokenizer_that_is_not_the_checkpoints_is_seen(run, chats, tmp_path):
    folder, task = chats
    asked = examples(task, "train", 512)

    def of(tokenizer):
        ours = dataclasses.replace(task, tokenizer=tokenizer)
        settings = dataclasses.replace(run.settings, task=ours, pretrained=str(folder))
        return data_rows.tokenizer_of(dataclasses.replace(run, settings=settings), asked)

    assert of(task.tokenizer).verdict == OK
    assert of(write_tokenizer(tmp_path, ["another text, of other words"] * 3, 300)).verdict == STOP
    assert of(dataclasses.replace(task.tokenizer, end_ids=task.tokenizer.end_ids[1:])).verdict == LOOK
    assert data_rows.tokenizer_of(run, asked) is None  # no checkpoint


def test_what_the_data_hold_is_judged(chats):
    _, task = chats
    rows = [("1 + 1 =", "2", {}), ("2 + 2 =<|im_end|>", "4", {})]
    found = data_rows.special_tokens(task, rows)
    assert (found.verdict, found.seen) == (LOOK, "1 of 2 prompts name one of 3: '<|im_end|>'")
    assert data_rows.special_tokens(task, rows[:1]).verdict == OK
    short = dataclasses.replace(task, prompt_length=len(task.ids_of_prompt(rows[0][0])))
    found = data_rows.prompt_lengths(short, rows)
    assert found.verdict == LOOK
    assert "1 dropped (50%)" in found.seen
    assert data_rows.right_answers(task, rows, best=0.0).verdict == OK


def test_a_right_answer_that_gets_nothing_stops_what_is_never_rewarded(chats):
    rows = [("1 + 1 =", "2", {}), ("2 + 2 =", "four", {})]
    numeric = dataclasses.replace(chats[1], verify=verifiers.numeric)
    assert data_rows.right_answers(numeric, rows, best=0.0).verdict == LOOK
    assert data_rows.right_answers(numeric, rows[1:], best=1.0).verdict == STOP  # a rule by name reads right answers
    own = dataclasses.replace(chats[1], verify=nothing)
    assert data_rows.right_answers(own, rows, best=0.0).verdict == STOP
    # It asks for another form, and some answers have it.
    assert data_rows.right_answers(own, rows, best=1.0).verdict == OK


def test_a_run_that_does_not_fit_is_not_rehearsed(run, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", None)
    monkeypatch.setattr("jaxrl_llm.check.fits.available_bytes", lambda mesh: 4)
    rows, answers = check.checked(run, print)
    assert (rows[-1].check, rows[-1].verdict, answers) == ("memory", STOP, "")
    assert rows[-1].remedy.startswith("spread them over more devices")


@pytest.mark.slow
def test_groups_in_a_row_score_as_padded_ones_where_the_head_reads_answers_alone(tmp_path, monkeypatch):
    """With a large vocabulary it reads as many tokens of a padded row as an answer has; a group's row holds several."""
    monkeypatch.setattr(scoring, "_ALL", 0)
    changes = {"model.num_experts": 0, "updates.layout": "padded", "updates.shuffle": "groups", "warm_start.steps": 0}
    found = rehearse(assembly.build(validate(tiny_run.make_config(tmp_path, **changes))), lambda text: None)
    assert found.shapes["shared"]["gap_max"] < 1e-4


def test_other_shapes_are_those_that_the_config_could_have(run):
    def shapes(**changes):
        updates = dataclasses.replace(run.settings.updates, **changes)
        return other_shapes(dataclasses.replace(run, settings=dataclasses.replace(run.settings, updates=updates)))

    assert {name: one.layout for name, one in shapes().items()} == {"1 row at a time": "padded", "packed": "packed"}
    assert set(shapes(layout="packed", micro_batch_rows=1)) == {"padded"}


@pytest.mark.parametrize(("fault", "code"), [({}, 0), ({"sampler": GAP}, 1)])
def test_the_command_prints_the_table_and_writes_nothing(run, rehearsed, monkeypatch, capsys, tmp_path, fault, code):
    hostile = [one | {"answer": "\x1b[2J\nx"} for one in rehearsed.answers]
    shown = dataclasses.replace(rehearsed, answers=hostile, **fault)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setattr(assembly, "build", lambda settings: run)
    monkeypatch.setattr(rehearsal, "rehearse", lambda run, note: shown)
    assert check.main(["--config=grpo:smoke", "--config.steps=2"]) == code
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert ("sampler          stop" in printed) == bool(code)
    assert f"{code} to stop for" in printed
    assert "answer   \\x1b[2J\\nx\n" in printed
    assert printed.count("reward   ") == 3
    assert list(tmp_path.iterdir()) == []


def test_a_row_wraps_and_cannot_steer_the_terminal():
    rows = [Finding("prompts", "word " * 30 + "\x1b[2J", LOOK, "do " * 40), Finding("memory", "x")]
    lines = table(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in table(rows)
    assert sum(line.startswith("prompts          look  ") for line in lines) == 1
    assert lines[-1] == "1 ok, 1 to look at, 0 to stop for"


@pytest.mark.parametrize(("rate", "verdict"), [(0.5, LOOK), (2.0, STOP)])
def test_what_a_run_warns_of_or_refuses_is_a_row(run, rate, verdict):
    optimizer = dataclasses.replace(run.settings.optimizer, learning_rate=rate)
    faulty = dataclasses.replace(run, settings=dataclasses.replace(run.settings, optimizer=optimizer))
    (found,) = data_rows.doubts(faulty)
    assert (found.check, found.verdict) == ("learning rate", verdict)
    assert found.seen.startswith(f"optimizer.learning_rate={rate:g}: ")


def test_chips_that_are_not_here(run, monkeypatch):
    """With a CPU as the chip: the same rows of the data, the same bytes as a check here; traced, only what stays; the
    seconds are those of a plan; what does not fit is said before anything is compiled."""
    monkeypatch.setattr(elsewhere, "topology_devices", lambda topology: (CHIPS["v5e"], jax.devices()[:1]))
    settings, said = run.settings, []
    found = {row.check: row for row in elsewhere.rows(settings, "v5e:1x1", said.append)}
    expected = data_rows.rows(run, data_rows.examples_of(run))
    assert [row for name, row in found.items() if name not in ("memory", "time ahead")] == expected
    here = fits(run)
    programs = {name: size for name, size in here.programs.items() if name != "evaluation"}
    there = dataclasses.replace(here, programs=programs, available=int(CHIPS["v5e"].memory), process=0)
    assert found["memory"] == Finding("memory", f"predicted {' '.join(there.lines())}")
    assert said == ["compiling rollout, score, update for v5e:1x1: maybe minutes"]

    traced = {row.check: row for row in elsewhere.rows(settings, "v5e:1x1", said.append, compiles=False)}
    assert traced["memory"].verdict == LOOK
    assert traced["memory"].seen == f"at least {' '.join(dataclasses.replace(there, programs={}).lines())}"
    assert traced["time ahead"] == found["time ahead"]
    steps = [measured(run, program, None, CHIPS["v5e"]) for program in trace_run(run, jax.devices()[:1])]
    seconds = sum(part.times * line.seconds for one in steps for part, line in one.parts)
    assert f"{settings.steps} steps of at least {seconds:.3g} s (prefill " in found["time ahead"].seen

    small = dataclasses.replace(CHIPS["v5e"], memory=1e4)
    monkeypatch.setattr(elsewhere, "topology_devices", lambda topology: (small, jax.devices()[:1]))
    row = elsewhere.rows(settings, "v5e:1x1", said.append)[-2]
    assert (row.check, row.verdict) == ("memory", STOP)
    assert "spread them over more devices with mesh.shape" in row.remedy
    assert len(said) == 1


def test_data_that_lie_elsewhere_are_one_row(run, monkeypatch):
    def missing(run):
        raise ValueError("GSM8K cannot be downloaded; set task.options.folder")

    monkeypatch.setattr(data_rows, "examples_of", missing)
    monkeypatch.setattr(elsewhere, "topology_devices", lambda topology: (CHIPS["v5e"], jax.devices()[:1]))
    data, *others = elsewhere.rows(run.settings, "v5e:1x1", print, compiles=False)
    assert data == Finding("data", "cannot be read here: GSM8K cannot be downloaded", LOOK, "set task.options.folder")
    assert [row.check for row in others] == ["memory", "time ahead"]


def test_a_trace_without_chips_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        check.main(["--config", "grpo:smoke", "--trace"])
    assert capsys.readouterr().err == "error: --trace is for chips that are named: --topology; see --help\n"


def test_a_machine_without_the_devices_is_told_of_chips(capsys):
    """Full-size mixtures need eight devices or more, of which the tests have four."""
    arguments = ["--config", "mixtures:glm_4_5_air", "--config.rollout.slots=64", "--config.mesh.shape=(1,-1,8,1)"]
    assert check.main(arguments) == 2
    line = "mesh.shape=(1, -1, 8, 1) needs 8 devices, 4 are visible, and a rehearsal takes all of them; for memory and "
    line += "time without them: python -m jaxrl_llm.check --config mixtures:glm_4_5_air --topology h100:8 --trace "
    assert capsys.readouterr().err == f"error: {line}--config.rollout.slots=64 '--config.mesh.shape=(1,-1,8,1)'\n"
