"""Tasks of text: files of one's own, GSM8K as published, reasoning-gym, and what stands around a prompt."""

import dataclasses
import json
import sys
import time
import urllib.request

import pytest

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import tasks
from jaxrl_llm.tasks import Prompting, drawn_splits, reasoning, verifiers
from jaxrl_llm.tasks.reasoning import evaluate_no_code
from jaxrl_llm.tasks.splits import is_test

ROWS = [{"question": f"What is {n} + {n}? é", "gold": 2 * n, "level": n % 3} for n in range(60)]
FIELDS = {"prompt_field": "question", "answer_field": "gold"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "own.jsonl", ROWS)


def test_a_file_of_ones_own(file, tmp_path, capfd):
    task = tasks.make("jsonl", path=file, verifier="numeric", **FIELDS)
    whole = {split: list(tasks.examples(task, split, tmp_path)) for split in ("train", "test")}
    assert {example["prompt"] for split in whole.values() for example in split} == {row["question"] for row in ROWS}
    assert all(is_test(example["prompt"]) == (split == "test") for split in whole for example in whole[split])
    first = whole["train"][0]
    row = ROWS[[row["question"] for row in ROWS].index(first["prompt"])]
    assert first == {"uid": 0, "prompt": row["question"], "answer": str(row["gold"]), "row": {"level": row["level"]}}
    batch = next(tasks.prompts(task, "train", seed=0, batch_size=4, data_dir=tmp_path))
    texts = [task.tokenizer.decode(ids[:n].tolist()) for ids, n in zip(batch["tokens"], batch["lengths"], strict=True)]
    assert texts == batch["prompt"]
    given = zip(batch["prompt"], batch["answer"], batch["answer"], batch["row"], strict=True)
    assert [task.verify(*fields) for fields in given] == [1.0] * 4
    assert capfd.readouterr().err == ""


def test_splits_of_ones_own_stay_and_sizes_are_read(file, tmp_path):
    test = write(tmp_path / "test.jsonl", ROWS[:7])
    task = tasks.make("jsonl", path=file, test_path=test, **FIELDS)
    assert len(tasks.examples(task, "train", tmp_path)) == 60
    assert [example["prompt"] for example in tasks.examples(task, "test", tmp_path)] == [
        r["question"] for r in ROWS[:7]
    ]
    few = tasks.make("jsonl", path=file, test_path=test, train_size=5, **FIELDS)
    assert (len(tasks.examples(few, "train", tmp_path)), len(tasks.examples(few, "test", tmp_path))) == (5, 7)


def test_long_prompts_are_dropped_counted_and_reported(file, tmp_path, capfd):
    """'What is 9 + 9? é' has 17 bytes, two more from 10 on."""
    task = tasks.make("jsonl", path=file, test_path=file, prompt_length=17, **FIELDS)
    assert len(tasks.examples(task, "train", tmp_path)) == 10
    message = "jsonl: dropped 50 of 60 train prompts, which are longer than prompt_length=17 tokens"
    assert message in capfd.readouterr().err
    posed = tasks.make("jsonl", path=file, prompt_length=17, prompting=Prompting("Q: {prompt}"), **FIELDS)
    with pytest.raises(ValueError, match=r"empty train split: the shortest of its .* prompts has 20 tokens.*raise"):
        drawn_splits.generate(posed)


def test_other_content_is_other_data(file, tmp_path):
    task = tasks.make("jsonl", path=file, **FIELDS)
    names = {tasks.data_name(task), tasks.data_name(dataclasses.replace(task, prompt_length=99))}
    names.add(tasks.data_name(tasks.make("jsonl", path=file, prompting=Prompting("{prompt}!"), **FIELDS)))
    names.add(tasks.data_name(dataclasses.replace(task, tokenizer=tasks.CharTokenizer("01"))))
    write(tmp_path / "own.jsonl", ROWS[1:])
    names.add(tasks.data_name(tasks.make("jsonl", path=file, **FIELDS)))
    assert len(names) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', r":2 has no field 'gold', only question; name the right one"),
        (
            '{"question": 3, "gold": "a"}',
            r":2 cannot be read \(field 'question' must be text or a list of messages",
        ),
        ('{"question": "", "gold": "a"}', r":2 cannot be read \(field 'question' asks nothing\)"),
        ("[1]", r":2 cannot be read \(it is no JSON object\)"),
        ("{", r":2 cannot be read \(.*\); correct or remove the line"),
        ('{"question": "\\ud83d", "gold": "a"}', r":2 cannot be read \(.*surrogates"),
        (
            '{"question": "\udcff", "gold": "a"}',
            r":2 cannot be read \(byte 0xff at column 15 is not UTF-8; save the file",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(f"{json.dumps(ROWS[0])}\n{line}\n".encode(errors="surrogateescape"))
    task = tasks.make("jsonl", path=str(tmp_path / "x.jsonl"), **FIELDS)
    with pytest.raises(ValueError, match=message):
        drawn_splits.generate(task)


def test_a_file_without_rows_is_named(tmp_path):
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty train split: it has no row; .*x\.jsonl"):
        drawn_splits.generate(tasks.make("jsonl", path=str(tmp_path / "x.jsonl"), **FIELDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"jsonl\.path is empty; set task\.options\.path"),
        ({"path": "x", "verifier": "numerc"}, r"verifier='numerc' is unknown \(did you mean 'numeric'\?\)"),
        ({"path": "x", "verifier": "no.such:function"}, r"verifier='no\.such:function' cannot be imported"),
        ({"path": "x", "verifier": "nowhere.py:function"}, r"cannot be imported"),
        ({"path": "x", "verifier": "json:dumbs"}, r"json has no function 'dumbs'"),
    ],
)
def test_bad_options_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        tasks.make("jsonl", **options)
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read"):
        tasks.data_name(tasks.make("jsonl", path="none.jsonl"))


def test_a_verifier_of_ones_own_file(file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def close_enough(prompt, answer, gold, row):\n    return -abs(int(answer) - int(gold)) * 1.5 + row['level']\n"
    )
    task = tasks.make("jsonl", path=file, verifier=f"{tmp_path}/mine.py:close_enough", **FIELDS)
    verdicts = verifiers.submit(task, [("", "12", "10", {"level": 2}), ("", "x", "10", {"level": 2})]).result()
    assert [verdict.reward for verdict in verdicts] == [-1.0, 0.0]
    assert verdicts[1].error.startswith("ValueError: invalid literal for int()")


@pytest.fixture
def published(tmp_path):
    """Rows of the form that GSM8K is published in."""
    row = {
        "question": "Ann has 1,000 apples and buys 500. How many?",
        "answer": "Ann has 1000+500=<<1000+500=1500>>1500 apples.\n#### 1,500",
    }
    write(tmp_path / "train.jsonl", [row, {"question": "One?", "answer": "#### -1"}])
    write(tmp_path / "test.jsonl", [row])
    return tmp_path


def test_gsm8k_reads_what_is_published(published):
    task = tasks.make("gsm8k", folder=str(published))
    drawn = drawn_splits.generate(task)
    assert drawn["train"].examples[0] == {
        "uid": 0,
        "prompt": "Ann has 1,000 apples and buys 500. How many?",
        "answer": "1500",
        "row": {"solution": "Ann has 1000+500=1500 apples."},
    }
    assert [example["answer"] for example in drawn["train"].examples] == ["1500", "-1"]
    assert len(drawn["test"].examples) == 1  # the same question: the data set's own splits stay
    assert task.verify("", "So 1000 + 500 is 1,500.", "1500", {}) == 1.0
    assert task.verify("", "1,500 or 1,501", "1500", {}) == 0.0
    write(published / "test.jsonl", [{"question": "?", "answer": "42"}])
    with pytest.raises(ValueError, match=r"test\.jsonl:1 cannot be read \(its answer has no ####\)"):
        drawn_splits.generate(task)


def test_gsm8k_without_a_network_says_what_to_do_at_once(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = tasks.make("gsm8k")  # nothing is asked for before data are read
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot be downloaded .*no network.*train\.jsonl and test\.jsonl .* folder"):
        tasks.data_name(task)
    assert time.monotonic() - began < 1
    with pytest.raises(ValueError, match=r"nowhere/train\.jsonl cannot be read"):
        tasks.data_name(tasks.make("gsm8k", folder="nowhere"))


def test_gsm8k_is_downloaded_once(monkeypatch, published, tmp_path):
    asked = []

    def serve(url, timeout):
        asked.append(url)
        return open(published / url.rpartition("/")[2], "rb")

    monkeypatch.setattr(urllib.request, "urlopen", serve)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = tasks.make("gsm8k")
    assert [len(list(tasks.examples(task, split))) for split in ("train", "test")] == [2, 1]
    assert [url.rpartition("/")[2] for url in asked] == ["train.jsonl", "test.jsonl"]


@pytest.mark.slow
def test_reasoning_gym_by_name_and_settings():
    pytest.importorskip("reasoning_gym")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    task = tasks.make("reasoning_gym", settings=settings, train_size=40, test_size=8)
    drawn = drawn_splits.generate(task)
    assert drawn == drawn_splits.generate(tasks.make("reasoning_gym", settings=settings, train_size=40, test_size=8))
    assert [len(drawn[split].examples) for split in ("train", "test")] == [40, 8]
    examples = drawn["train"].examples[:3]
    assert all(example["prompt"].startswith("State the final answer") for example in examples)
    right = [(e["prompt"], f" {e['answer']} ", e["answer"], e["row"]) for e in examples]
    wrong = [(e["prompt"], "words", e["answer"], e["row"]) for e in examples]
    assert [verdict.reward for verdict in verifiers.submit(task, right + wrong).result()] == [1, 1, 1, 0, 0, 0]
    either = {**settings, "min_digits": 1}  # 67 to 69 characters
    short = tasks.make("reasoning_gym", settings=either, train_size=4, test_size=4, prompt_length=68)
    assert drawn_splits.generate(short)["train"].dropped + drawn_splits.generate(short)["test"].dropped > 0
    with pytest.raises(ValueError, match=r"reasoning_gym\.dataset='chain_sums' is unknown \(did you mean 'chain_sum'"):
        tasks.make("reasoning_gym", dataset="chain_sums")
    with pytest.raises(ValueError, match=r"reasoning_gym\.settings=.* do not fit 'chain_sum' \(.*terms_min"):
        tasks.make("reasoning_gym", settings={"terms_min": 2})


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return write_tokenizer(tmp_path_factory.mktemp("chat"), [row["question"] for row in ROWS], 300)


def test_a_drawn_task_is_put_to_a_published_model(chat_tokenizer, tmp_path):
    """Its prompts go through the model's tokenizer and chat template; the rows have no token to spare for digits."""
    prompting = Prompting("{prompt} Answer with {the number} only.", chat=True, system="Be brief.")
    plain = tasks.make("addition", digits=2, reverse=False)
    sizes = {"train_size": 64, "test_size": 16}
    task = tasks.make("addition", digits=2, reverse=False, tokenizer=chat_tokenizer, prompting=prompting, **sizes)
    batch = next(tasks.prompts(task, "test", seed=0, batch_size=16, data_dir=tmp_path))
    text = chat_tokenizer.backend.decode(batch["tokens"][0, : batch["lengths"][0]].tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        f"{batch['prompt'][0]} Answer with {{the number}} only.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert batch["lengths"].max() <= batch["tokens"].shape[1] == task.prompt_length
    assert task.prompt_length == plain.prompt_length + len(task.ids_of_prompt(""))
    rows = next(tasks.supervised(task, "test", seed=0, batch_size=16, data_dir=tmp_path))
    learnt = [ids[mask].tolist() for ids, mask in zip(rows["tokens"], rows["loss_mask"], strict=True)]
    assert learnt == [[*chat_tokenizer.encode(answer), 2] for answer in batch["answer"]]  # the end of turn is learnt


def test_plain_text_starts_as_the_tokenizer_starts_it(chat_tokenizer):
    started = dataclasses.replace(chat_tokenizer)
    object.__setattr__(started, "start_ids", [1])
    expected = [1, *chat_tokenizer.encode("1+1=2\n2+2=")]
    assert Prompting("1+1=2\n{prompt}").ids(started, "2+2=") == expected
    assert Prompting("<|im_start|>1+1=2\n{prompt}").ids(started, "2+2=") == expected  # not twice


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prompting("no place"), r"task\.template='no place' must hold \{prompt\} once"),
        (lambda: Prompting("{prompt}{prompt}"), "must hold {prompt} once"),
        (lambda: Prompting(system="x"), r"task\.system='x' is part of a chat; set task\.chat=True"),
        (lambda: Prompting(chat_options={"a": 1}), r"task\.chat_options=.* is part of a chat"),
        (lambda: tasks.make("sort", prompting=Prompting(chat=True)), r"needs a tokenizer with a chat template"),
        (lambda: tasks.make("sort", prompting=Prompting("Sort {prompt}")), r"character 'S' at position 0"),
    ],
)
def test_bad_prompting_is_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bytes_need_no_training():
    tokenizer = tasks.ByteTokenizer()
    text = "naïve 😀\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, 1, 70]) == text
    assert tokenizer.decode(ids[:8]) == "naïve " + tasks.UNKNOWN  # cut inside the character
    assert tokenizer.decode([50, 300, 0, 51]) == f"0{tasks.UNKNOWN}{tasks.UNKNOWN}1"
    assert isinstance(tokenizer, tasks.Tokenizer)


EVALUATED = [
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "puzzle24",
    "countdown",
    "simple_integration",
    "polynomial_multiplication",
]


@pytest.fixture
def no_code():
    """What `evaluate_no_code` changes, which is for a worker process, is as before afterwards."""
    sympy = pytest.importorskip("sympy")
    pytest.importorskip("reasoning_gym")
    modules = {name: module for name, module in sys.modules.items() if name.startswith("reasoning_gym")}
    parse, before = sympy.parse_expr, {name: dict(vars(module)) for name, module in modules.items()}
    evaluate_no_code()
    yield
    sympy.parse_expr = parse
    for name, module in modules.items():
        vars(module).clear()
        vars(module).update(before[name])


@pytest.mark.parametrize("name", EVALUATED)
def test_no_scorer_of_reasoning_gym_runs_an_answer(no_code, tmp_path, name):
    """These give it to `eval` or to sympy's parser. What they may read keeps its score."""
    dataset = sys.modules["reasoning_gym"].create_dataset(name, seed=0, size=1)
    mark = str(tmp_path / "ran")
    spelled = "exec(" + "+".join(f"chr({ord(c)})" for c in f"import pathlib; pathlib.Path({mark!r}).touch()") + ")"
    called = f"[__import__('pathlib').Path({mark!r}).touch()]"
    for answer in (called, called[1:-1], spelled):
        assert dataset.score_answer(answer, dataset[0]) < 0.1
    assert not (tmp_path / "ran").exists()
    assert dataset.score_answer(dataset[0]["answer"], dataset[0]) == 1.0


def test_a_worker_of_reasoning_gym_evaluates_no_code(monkeypatch):
    pytest.importorskip("reasoning_gym")
    called = []
    monkeypatch.setattr(reasoning, "evaluate_no_code", lambda: called.append(1))
    reasoning.ReasoningGymVerifier("chain_sum", "{}").load()
    assert called
