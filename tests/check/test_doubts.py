"""Data that can be read and still give wrong results: what is warned of, by name, and what is refused."""

import json

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.check.doubts import _of_splits, survey
from jaxrl_llm.tasks import Prompting, Task
from jaxrl_llm.tasks.messages import EARLIER

GOOD = [(f"{n} + 1 =", str(n + 1)) for n in range(20)]


def jsonl(folder, train, test=None, **options):
    for name, pairs in (("train", train), ("test", test or [("0 + 0 =", "0")])):
        lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return tasks.make("jsonl", path=f"{folder}/train.jsonl", test_path=f"{folder}/test.jsonl", **options)


def doubts(task, answer_length, **options):
    return survey(task, answer_length, **options).doubts


ODD = "of 22 right answers of jsonl"
NUMERIC = {"verifier": "numeric"}
CASES = {  # rows to train on, options, {name of the warning: what it says}
    "good": ([], NUMERIC, {}),
    "a word for a number": ([("31 + 1 =", "twelve")], NUMERIC, {"answers_not_numbers": f"1 {ODD} are no number"}),
    "null": ([("31 + 1 =", None)], {}, {"answers_missing": f"1 {ODD} are empty or null; name the field"}),
    "null, under a rule of the user's own": (
        [("31 + 1 =", None)],
        {"verifier": "tests.tasks.verifiers_for_tests:length"},
        {"answers_missing": f"1 {ODD}"},
    ),
    "empty": ([("31 + 1 =", " ")], {}, {"answers_missing": f"1 {ODD}"}),
    "NaN": ([("31 + 1 =", float("nan"))], {}, {"answers_missing": f"1 {ODD}"}),
    "at the bound": ([("31 + 1 =", "1234567")], {}, {}),
    "over it": ([("31 + 1 =", "12345678")], {}, {"answers_too_long": f"1 {ODD} have more than 8 tokens with EOS"}),
    "over it, under a rule of the user's own": (
        [("31 + 1 =", "12345678")],
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
        assert "to '31 + 1 ='" in found[name]


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
    assert found.keys() == {"answers_not_numbers"}
    assert "1 of 160 right answers of gsm8k" in found["answers_not_numbers"]
    assert "(the first: 'twelve' to 'train 70?')" in found["answers_not_numbers"]


def test_drawn_answers_are_held_to_the_bound_of_the_run():
    task = tasks.make("sort", digits=5)
    assert doubts(task, task.answer_length) == {}
    assert "256 of 256 right answers of sort have more than 4 tokens" in doubts(task, 4)["answers_too_long"]


NOT_NUMBERS = ["12, 13", "3:30", "x^3 + 1", "\\frac{\\sqrt{3}}{2}", "[0, 7)"]


def rows_of(answers):
    return [(f"question {n}", answer) for n, answer in enumerate(answers)]


@pytest.mark.parametrize("answer", NOT_NUMBERS)
def test_a_right_answer_that_is_no_number_is_a_doubt_under_numeric(answer, tmp_path):
    found = doubts(jsonl(tmp_path, [*GOOD, ("a", answer)], **NUMERIC), 64)
    assert found.keys() == {"answers_not_numbers"}
    assert "1 of 22 right answers of jsonl are no number" in found["answers_not_numbers"]
    assert f"(the first: {answer!r} to 'a')" in found["answers_not_numbers"]
    assert doubts(jsonl(tmp_path, [*GOOD, ("a", answer)]), 64) == {}  # exact reads any text


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (["1, 5", "2, 5", "3, 6", "4, 7"], "2 of 12 times"),  # each of four is given to the three others
        (["1, 5", "2, 5", "2,  5"], "2 of 2 times"),  # the same answer twice but for a space
        (["1, 5", "2, 6", "3, 7", "4, 8"], ""),
        # A row gets the answers of the next three: the last three of a hundred get 1 + 2 + 3 of the other hundred.
        ([f"{n}, {n // 100}" for n in range(200)], "588 of 600 times"),
        ([f"{n}, {n // 1050}" for n in range(1100)], "3000 of 3000 times"),  # of the first thousand
    ],
)
def test_right_answers_of_other_rows_show_that_wrong_answers_are_rewarded(answers, told, tmp_path, monkeypatch):
    """A verifier that reads the end alone finds every right answer right, and others too."""

    def ends_alike(prompt, answer, gold, row):
        return float(answer.rpartition(",")[2] == gold.rpartition(",")[2])

    ends_alike.__module__ = "jaxrl_llm.tasks.verifiers.named_verifiers"
    monkeypatch.setattr(f"{ends_alike.__module__}.exact", ends_alike)
    found = doubts(jsonl(tmp_path, rows_of(answers)), 64).get("wrong_answers_rewarded", "")
    assert found.startswith(told)
    assert ("rewards the right answer of another row ('2, 5' where '1, 5' is right)" in found) == ("2, 5" in answers)


def test_a_prompt_with_two_right_answers_is_a_doubt_that_names_the_rows(tmp_path):
    twice = [*GOOD, ("3 + 1 =", "5"), ("4 + 1 =", "5.0"), ("5 + 1 =", ["7", "6"])]
    found = doubts(jsonl(tmp_path, [*twice, ("6 + 1 =", "8")], **NUMERIC), 8)
    assert found.keys() == {"answers_disagree"}
    assert found["answers_disagree"].startswith("2 of 24 rows of jsonl repeat a prompt with another right answer")
    assert "(the first: '3 + 1 =' has '4' in row 4 of train, '5' in row 21)" in found["answers_disagree"]
    strict = doubts(jsonl(tmp_path, twice), 8)["answers_disagree"]
    assert strict.startswith("2 of 23 rows")  # to `exact` 5.0 is another answer than 5
    own = doubts(jsonl(tmp_path, twice, verifier="tests.tasks.verifiers_for_tests:length"), 8)["answers_disagree"]
    assert own.startswith("2 of 23 rows")  # by their texts
    assert "answers_disagree" not in doubts(jsonl(tmp_path, twice), 8, rewarded=False)  # which of them is learnt from


def test_one_of_several_right_answers_is_enough(tmp_path):
    rows = [*GOOD, ("a", ["twelve", "12"]), ("b", ["123456789", "1"]), ("c", ["", "2"])]
    assert doubts(jsonl(tmp_path, rows, **NUMERIC), 8) == {}
    assert (
        "1 of 22 right" in doubts(jsonl(tmp_path, [*GOOD, ("a", ["one", "two"])], **NUMERIC), 8)["answers_not_numbers"]
    )


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


def test_a_question_after_other_turns_is_another_prompt():
    task, turns = tasks.make("addition"), [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    after, alone = ("1 =", "1", {EARLIER: turns}), ("1 =", "1", {})
    assert _of_splits(task, [after], [alone]) == _of_splits(task, [alone], [after]) == {}
    assert "1 of 2 test prompts of addition" in _of_splits(task, [after], [alone, after])["splits_overlap"]


@pytest.mark.slow  # starts worker processes
def test_mathematics_is_asked_in_the_form_that_its_verifier_reads(tmp_path):
    pytest.importorskip("math_verify")
    rows = [("a", "\\frac{1}{2}"), ("b", "$x^2$"), ("c", "12"), *GOOD] * 4
    assert doubts(jsonl(tmp_path, rows, rows[:1], verifier="math"), 64).keys() == {"splits_overlap"}
    assert "of 47 right" in doubts(jsonl(tmp_path, rows, verifier="math"), 1, rewarded=False)["answers_too_long"]
