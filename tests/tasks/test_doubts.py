"""Data that can be read and still give wrong results: what is warned of, by name, and what is refused."""

import json

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import Prompting, Task

GOOD = [(f"{n} + 1 =", str(n + 1)) for n in range(20)]


def jsonl(folder, train, test=None, **options):
    for name, pairs in (("train", train), ("test", test or [("0 + 0 =", "0")])):
        lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return tasks.make("jsonl", path=f"{folder}/train.jsonl", test_path=f"{folder}/test.jsonl", **options)


def doubts(task, answer_length, **options):
    return tasks.survey(task, answer_length, **options).doubts


ODD = "of 22 right answers of jsonl"
NUMERIC = {"verifier": "numeric"}
CASES = {  # rows to train on, options, {name of the warning: what it says}
    "good": ([], NUMERIC, {}),
    "a word for a number": ([("11 + 1 =", "twelve")], NUMERIC, {"answers_unrewarded": f"1 {ODD} get no reward"}),
    "null": ([("11 + 1 =", None)], {}, {"answers_missing": f"1 {ODD} are empty or null; name the field"}),
    "null, under a rule of the user's own": (
        [("11 + 1 =", None)],
        {"verifier": "tests.tasks.verifiers_for_tests:length"},
        {"answers_missing": f"1 {ODD}"},
    ),
    "empty": ([("11 + 1 =", " ")], {}, {"answers_missing": f"1 {ODD}"}),
    "NaN": ([("11 + 1 =", float("nan"))], {}, {"answers_missing": f"1 {ODD}"}),
    "at the bound": ([("11 + 1 =", "1234567")], {}, {}),
    "over it": ([("11 + 1 =", "12345678")], {}, {"answers_too_long": f"1 {ODD} have more than 8 tokens with EOS"}),
    "over it, under a rule of the user's own": (
        [("11 + 1 =", "12345678")],
        {"verifier": "tests.tasks.verifiers_for_tests:length"},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_doubtful_answers_are_counted_and_the_first_is_shown(case, tmp_path):
    rows, options, expected = CASES[case]
    found = doubts(jsonl(tmp_path, [*GOOD, *rows], **options), 8)
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert text in found[name]
        assert "to '11 + 1 ='" in found[name]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([("1 + 1 =", "two"), ("3 =", "three")], NUMERIC),
        ([("1 + 1 =", None), ("3 =", None)], NUMERIC),
        ([("1 + 1 =", "123456789"), ("3 =", "")], {"verifier": "exact"}),
    ],
)
def test_where_no_answer_can_be_rewarded_the_task_is_refused(rows, options, tmp_path):
    with pytest.raises(ValueError, match=r"no answer can be rewarded: \d of 24 right answers of jsonl"):
        doubts(jsonl(tmp_path, rows, [*rows, *GOOD], **options), 8)
    assert doubts(jsonl(tmp_path, rows, rows, **options), 8, rewarded=False)  # supervised training may go on
    own = jsonl(tmp_path, rows, rows, verifier="tests.tasks.verifiers_for_tests:length")
    assert "answers_unrewarded" not in doubts(own, 8)  # it alone knows what it wants to see


def test_prompts_of_both_splits_are_counted(tmp_path):
    found = doubts(jsonl(tmp_path, GOOD, [*GOOD[:3], ("new", "1")]), 8)
    assert found.keys() == {"splits_overlap"}
    assert "3 of 4 test prompts of jsonl are train prompts too (the first: '0 + 1 =')" in found["splits_overlap"]
    assert doubts(tasks.make("jsonl", path=f"{tmp_path}/train.jsonl"), 8) == {}  # split by a hash of the prompt


def test_every_answer_of_gsm8k_is_read(tmp_path):
    for name, gold in (("train", "twelve"), ("test", "12")):
        rows = [{"question": f"{name} {n}?", "answer": f"#### {gold if n == 70 else n}"} for n in range(80)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = doubts(tasks.make("gsm8k", folder=str(tmp_path)), 64)
    assert found.keys() == {"answers_unrewarded"}
    assert "1 of 160 right answers of gsm8k" in found["answers_unrewarded"]
    assert "(the first: 'twelve' to 'train 70?')" in found["answers_unrewarded"]


def test_drawn_answers_are_held_to_the_bound_of_the_run():
    task = tasks.make("sort", digits=5)
    assert doubts(task, task.answer_length) == {}
    assert "256 of 256 right answers of sort have more than 4 tokens" in doubts(task, 4)["answers_too_long"]


def templated(text):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "?": 1}, unk_token="?"))
    chat = tasks.TextTokenizer(backend, (0,), text)
    task = tasks.make("sort", digits=5, tokenizer=chat, prompting=Prompting(chat=True))
    assert isinstance(task, Task)
    return task


def test_a_template_that_drops_the_prompt_is_refused_and_one_that_changes_it_is_named():
    pytest.importorskip("jinja2")
    shown = "user: {{ messages[0].content | trim }}\n"
    assert "prompt_altered" not in doubts(templated(shown), 64)
    with pytest.raises(
        ValueError, match=r"the chat template drops the prompt: '\d+=' and '\d+=' are both read as 'user'"
    ):
        doubts(templated("user"), 64)
    half = templated("{{ messages[0].content[:3] }}")
    assert "the chat template changes the prompt '" in doubts(half, 64)["prompt_altered"]


@pytest.mark.slow  # starts worker processes
def test_mathematics_is_asked_in_the_form_that_its_verifier_reads(tmp_path):
    pytest.importorskip("math_verify")
    rows = [("a", "\\frac{1}{2}"), ("b", "$x^2$"), ("c", "12"), *GOOD] * 4
    assert doubts(jsonl(tmp_path, rows, rows[:1], verifier="math"), 64).keys() == {"splits_overlap"}
    assert "of 47 right" in doubts(jsonl(tmp_path, rows, verifier="math"), 1, rewarded=False)["answers_too_long"]
