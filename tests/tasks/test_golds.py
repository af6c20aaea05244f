"""Right answers in the forms that published data give them, and that any of several is right."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import golds
from tests.reference.data_forms import FILES

VERL = {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}
USERS = "tests.tasks.verifiers_for_tests:length"
MAP = [("en", "four"), ("de", "vier")]


def draws(path, **options):
    drawn = tasks.make("jsonl", path=str(path), **options).source.read()
    return [*drawn["train"], *drawn["test"]]


def others(*texts):
    return {"other_right_answers": list(texts)} if texts else {}


@pytest.mark.parametrize("form", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    ("answer", "options", "right"),
    [
        (34, {}, ["34"]),
        (34.0, {}, ["34"]),  # pandas makes floats of whole numbers
        (-(2.0**53 - 1), {}, ["-9007199254740991"]),
        (1e23, {}, ["1e+23"]),  # of which a float does not hold every digit
        (0.5, {}, ["0.5"]),
        (True, {}, ["true", "True"]),
        (" 34\n", {}, [" 34\n"]),
        (["4", "four", "4"], {}, ["4", "four"]),
        ([4, 4.5], {}, ["4", "4.5"]),
        (["", "4", None], {}, ["4"]),
        ([], {}, [""]),
        (VERL, {"answer_field": "answer.ground_truth"}, ["34"]),
        (json.dumps(VERL), {"answer_field": "answer.ground_truth"}, ["34"]),
        ({"en": "four", "de": "vier"}, {"answer_field": "answer.de"}, ["vier"]),
        ({"value": {"aliases": ["NYC", "New York"]}}, {"answer_field": "answer.value.aliases"}, ["NYC", "New York"]),
        ([{"text": "4"}, {"text": "5"}], {"answer_field": "answer.1.text"}, ["5"]),
        (json.dumps([1, 2]), {}, ["[1, 2]"]),  # a text is one answer, whatever it holds
        ('{"a": 1}', {"verifier": "exact"}, ['{"a": 1}']),
        (VERL, {"verifier": USERS}, [json.dumps(VERL)]),
        ([{"input": "1", "output": "2"}], {"verifier": USERS}, ['[{"input": "1", "output": "2"}]']),
    ],
)
def test_a_right_answer_in_every_form(form, answer, options, right, tmp_path):
    FILES[form](tmp_path / form, [{"prompt": "a", "answer": answer}])
    ((prompt, gold, row),) = draws(tmp_path / form, **options)
    assert (prompt, gold) == ("a", right[0])
    assert {name: value for name, value in row.items() if name != "answer"} == others(*right[1:])


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        (VERL, {}, "name a field in it: answer.ground_truth or answer.style"),
        ({"a": {"b": "1"}, "c": "2"}, {}, "name a field in it: answer.a.b or answer.c"),
        ([VERL], {"verifier": "numeric"}, "name a field in it: answer.0.ground_truth or answer.0.style"),
        ([[1, 2], [3]], {}, "name a field in it: answer.0"),
        (json.dumps(VERL), {"verifier": "numeric"}, "name a field in it: answer.ground_truth or answer.style"),
        (VERL, {"answer_field": "answer.truth"}, "has no field 'answer.truth', only prompt, answer.ground_truth, ans"),
        ([1], {"answer_field": "answer.1"}, "has no field 'answer.1', only prompt, answer; name the right one"),
        ("34", {"answer_field": "answer.x"}, "has no field 'answer.x'"),
    ],
)
def test_an_object_is_refused_with_the_names_of_its_fields(answer, options, message, tmp_path):
    FILES["rows.jsonl"](tmp_path / "x.jsonl", [{"prompt": "a", "answer": answer}])
    with pytest.raises(ValueError, match=r"x\.jsonl:1") as raised:
        draws(tmp_path / "x.jsonl", **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_prompts_and_answers_lie_in_objects_and_the_row_keeps_them(tmp_path):
    asked = [{"role": "user", "content": "1 + 1 ="}]
    row = {"extra": {"messages": asked}, "choices": [{"text": "2"}], "a.b": "whole name"}
    FILES["rows.parquet"](tmp_path / "x.parquet", [row])
    found = draws(tmp_path / "x.parquet", prompt_field="extra.messages", answer_field="choices.0.text")
    assert found == [("1 + 1 =", "2", row)]
    assert draws(tmp_path / "x.parquet", prompt_field="extra.messages", answer_field="a.b")[0][1] == "whole name"
    answered = row | {"messages": [*asked, {"role": "assistant", "content": "3"}]}
    FILES["rows.jsonl"](tmp_path / "x.jsonl", [answered])
    assert [draws(tmp_path / "x.jsonl", answer_field=field)[0][1] for field in ("choices.0.text", "gold")] == ["2", "3"]


def test_maps_and_texts_in_bytes_of_a_table_are_read(tmp_path):
    columns = {"prompt": [b"a", b"b"], "answer": pa.array([MAP, MAP[:1]], pa.map_(pa.string(), pa.string()))}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = draws(tmp_path / "x.parquet", answer_field="answer.en")
    assert sorted((prompt, gold) for prompt, gold, _ in found) == [("a", "four"), ("b", "four")]
    with pytest.raises(ValueError, match=r"x\.parquet:2 has no field 'answer\.de', only prompt, answer\.en; name"):
        draws(tmp_path / "x.parquet", answer_field="answer.de")


@pytest.mark.parametrize(("verifier", "wrong"), [("exact", "7"), ("numeric", "it is 7")])
def test_any_of_several_answers_is_right(verifier, wrong, tmp_path):
    FILES["rows.jsonl"](tmp_path / "train.jsonl", [{"prompt": "a", "answer": ["5", "6"]}])
    FILES["rows.jsonl"](tmp_path / "test.jsonl", [{"prompt": "b", "answer": "5"}])
    task = tasks.make("jsonl", path=str(tmp_path), verifier=verifier)
    (several,), (one,) = (tasks.examples(task, split, tmp_path) for split in ("train", "test"))

    def rewards(example):
        prompt, gold, row = example["prompt"], example["answer"], example["row"]
        return [task.verify(prompt, answer, gold, row) for answer in ("5", " 6 ", wrong)]

    assert (rewards(several), rewards(one)) == ([1, 1, 0], [1, 0, 0])
    given = next(tasks.supervised(task, "train", seed=0, batch_size=1, data_dir=tmp_path))
    assert task.tokenizer.decode(given["tokens"][given["loss_mask"]].tolist()) == "5"  # supervised training has one


def test_the_best_reward_over_the_right_answers_counts():
    def share(prompt, answer, gold, row):
        return sum(a == b for a, b in zip(answer, gold, strict=False)) / len(gold)

    rule = golds.AnyRight(share)
    assert rule("", "abxx", "abcd", {}) == 0.5
    assert rule("", "abxx", "abcd", others("xxxx", "abxd")) == 0.75
