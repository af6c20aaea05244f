"""Data as people have them: tables, folders of files, conversations, and what is said of them."""

import datetime

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.check import split_table
from jaxrl_llm.check.doubts import survey
from jaxrl_llm.tasks import Prompting, drawn_splits, messages, splits
from tests.reference.data_forms import FILES, written

ROWS = [{"prompt": f"{n} + 1 = é", "answer": n + 1, "level": n % 3, "tags": ["a", None]} for n in range(20)]
TRAIN, TEST = ROWS[:14], ROWS[14:]


def read(path, **options):
    drawn = tasks.make("jsonl", path=str(path), **options).source.read()
    return {split: list(draws) for split, draws in drawn.items()}


@pytest.mark.parametrize("form", FILES)
def test_every_kind_of_file_gives_the_same_rows(form, tmp_path):
    FILES["rows.jsonl"](tmp_path / "plain.jsonl", ROWS)
    FILES[form](tmp_path / form, ROWS)
    assert read(tmp_path / form) == read(tmp_path / "plain.jsonl")
    assert sum(map(len, read(tmp_path / form).values())) == 20
    kept = [tasks.make("jsonl", path=str(tmp_path / name)).source.fingerprint() for name in (form, "plain.jsonl")]
    assert (kept[0] == kept[1]) == (form == "rows.jsonl")


LAYOUTS = {
    "files": {"train.jsonl": TRAIN, "test.jsonl": TEST},
    "a hub's": {"README.md": "#", "data/train-00000-of-00001.parquet": TRAIN, "data/test-00000-of-00001.parquet": TEST},
    "shards": {"train-0-of-2.parquet": TRAIN[:5], "train-1-of-2.parquet": TRAIN[5:], "dev.parquet": TEST},
    "save_to_disk": {
        "dataset_dict.json": '{"splits": ["train", "test"]}',
        "train/data-00000-of-00001.arrow": TRAIN,
        "train/cache-0a.arrow": ROWS,
        "train/state.json": "{}",
        "test/data-00000-of-00001.arrow": TEST,
    },
    "validation": {"train.jsonl": TRAIN, "validation.jsonl": TEST},
    "test before validation": {"train.jsonl": TRAIN, "validation.jsonl": ROWS, "test.jsonl": TEST},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_names_in_a_folder_say_which_split_a_file_is_of(layout, tmp_path):
    found = read(written(tmp_path / "a test of names", LAYOUTS[layout]))
    assert [prompt for prompt, *_ in found["train"]] == [row["prompt"] for row in TRAIN]
    assert [prompt for prompt, *_ in found["test"]] == [row["prompt"] for row in TEST]


def test_without_names_a_hash_decides_and_a_path_to_a_test_split_goes_first(tmp_path):
    folder = written(tmp_path / "x", {"data-0.arrow": ROWS[:9], "data-1.arrow": ROWS[9:]})
    found = read(folder)
    assert len(found["train"]) + len(found["test"]) == 20
    assert all(splits.is_test(prompt) == (split == "test") for split in found for prompt, *_ in found[split])
    assert len(read(folder, test_path=written(tmp_path / "y", {"test.jsonl": TEST}))["train"]) == 20
    moved = tasks.make("jsonl", path=written(tmp_path / "z", {"train-0.arrow": ROWS[:9], "train-1.arrow": ROWS[9:]}))
    before = moved.source.fingerprint()
    (tmp_path / "z" / "train-1.arrow").rename(tmp_path / "z" / "test-1.arrow")
    assert moved.source.fingerprint() != before  # other splits of the same content


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.md": "#"}, r"holds no \.jsonl, \.parquet, \.arrow file; give a file, or a folder with train\.jsonl"),
        ({"test.jsonl": TEST}, r"holds files of the test split alone; name the one to train on train\.jsonl"),
        ({"main/train.arrow": TRAIN, "other/train.arrow": TRAIN}, r"more than one data set: main/train\.arrow"),
        ({"train.jsonl": TRAIN, "train.parquet": TRAIN}, r"train\.jsonl and train\.parquet; give the folder of one"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_one_data_set(files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path / "data", files))


def test_what_json_has_no_form_for_is_text(tmp_path):
    row = {"prompt": "a", "answer": "b", "when": datetime.date(2024, 5, 6), "image": b"\xff\xd8"}
    FILES["rows.parquet"](tmp_path / "train.parquet", [row])
    draw = next(iter(tasks.make("jsonl", path=str(tmp_path)).source.read()["train"]), None)
    draw = draw or next(iter(tasks.make("jsonl", path=str(tmp_path)).source.read()["test"]))
    assert draw == ("a", "b", {"when": "2024-05-06", "image": "2 bytes"})


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_table_that_is_none_is_named(name, tmp_path):
    (tmp_path / name).write_bytes(b"PAR1 or not")
    with pytest.raises(ValueError, match=rf"{name} is no {name[2:]} file, or is damaged \(.*\); write it again"):
        read(tmp_path / name)


SYSTEM, USER, ANSWER, MORE = (
    {"role": role, "content": text}
    for role, text in (("system", "Short."), ("user", "1 + 1 ="), ("assistant", "2"), ("user", "and 1 more?"))
)


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"messages": [USER, ANSWER]}, {}, ("1 + 1 =", "2", {})),
        ({"messages": [SYSTEM, USER, ANSWER]}, {}, ("1 + 1 =", "2", {messages.EARLIER: [SYSTEM]})),
        ({"messages": [USER, ANSWER], "answer": 3, "level": 1}, {}, ("1 + 1 =", "3", {"level": 1})),
        (
            {"messages": [USER, ANSWER], "answer": 3},
            {"prompt_field": "messages", "answer_field": "messages"},
            ("1 + 1 =", "2", {"answer": 3}),
        ),
        (
            {"prompt": [USER, ANSWER, MORE], "gold": "3"},
            {"answer_field": "gold"},
            ("and 1 more?", "3", {messages.EARLIER: [USER, ANSWER]}),
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, {"answer_field": "completion"}, ("1 + 1 =", "2", {})),
    ],
)
def test_conversations(row, options, expected, tmp_path):
    for form in ("rows.jsonl", "rows.parquet"):
        FILES[form](tmp_path / form, [row])
        drawn = read(tmp_path / form, **options)
        assert [*drawn["train"], *drawn["test"]] == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER]}, r":1 has no field 'answer', only messages"),
        ({"messages": [ANSWER]}, r"the last message, before any answer, must be one of the user"),
        ({"messages": []}, r"field 'messages': the last message"),
        ({"messages": [{"role": "user", "content": None}]}, r"holds \{'role': 'user', 'content': None\}, no message"),
        ({"messages": ["hi"]}, r"holds 'hi', no message \{\"role\": \"\.\.\.\""),
    ],
)
def test_conversations_that_are_refused(row, message, tmp_path):
    FILES["rows.jsonl"](tmp_path / "x.jsonl", [row])
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x.jsonl")


@pytest.fixture(scope="module")
def chat():
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'jaxrl_llm[hf]'")
    pieces = ["<e>", *"0123456789 +=?:\n", *"abcdefghijklmnopqrstuvwxyzS."]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    return tasks.TextTokenizer(backend, (0,), template)


def test_the_chat_template_writes_what_was_said_before(chat, tmp_path):
    rows = [{"messages": [SYSTEM, USER, ANSWER, MORE, {"role": "assistant", "content": "3"}]}] * 3
    rows += [{"prompt": [USER], "answer": "2"}]
    FILES["rows.jsonl"](
        tmp_path / "train.jsonl", [row | {"prompt": row.get("prompt") or row["messages"]} for row in rows]
    )
    FILES["rows.jsonl"](tmp_path / "test.jsonl", [{"prompt": [MORE], "answer": "3"}])
    prompting = Prompting(template="{prompt} now", chat=True, system="be kind")
    task = tasks.make("jsonl", path=str(tmp_path), tokenizer=chat, prompting=prompting)
    batch = tasks.all_prompts(task, "train", data_dir=tmp_path)
    texts = [chat.decode(ids[:n].tolist()) for ids, n in zip(batch["tokens"], batch["lengths"], strict=True)]
    assert set(texts) == {
        "system:Short.\nuser:1 + 1 =\nassistant:2\nuser:and 1 more? now\n",
        "system:be kind\nuser:1 + 1 = now\n",
    }
    given = next(tasks.supervised(task, "train", seed=0, batch_size=4, data_dir=tmp_path))
    assert sorted(given["loss_mask"].sum(1)) == [2, 2, 2, 2]  # a digit and its end
    found = survey(task, 8)
    assert found.splits["train"]["repeated"] == 2
    assert (found.splits["test"]["shared"], found.doubts) == (0, {})  # the same words after other messages
    plain = tasks.make("jsonl", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"'and 1 more\?' follows other messages, .* set task\.chat=True"):
        drawn_splits.generate(plain)


def test_pairs_are_not_made_of_conversations(tmp_path):
    from jaxrl_llm.tasks.preference.pair_rules import PairRules, make_pairs

    example = {"uid": 0, "prompt": "1 + 1 =", "answer": "2", "row": {messages.EARLIER: [SYSTEM]}}
    with pytest.raises(ValueError, match=r"unlike '1 \+ 1 ='; set preference\.file"):
        next(make_pairs(tasks.make("sort"), PairRules(), [example], "train"))


def test_what_the_data_are_said_before_training(tmp_path, monkeypatch):
    train = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(30)]
    train += [train[3], {"prompt": "x" * 40, "answer": "a number"}]
    test = [train[0], {"prompt": "2 + 2 =", "answer": "four"}, {"prompt": "3 + 3 =", "answer": "6"}]
    folder = written(tmp_path, {"train.jsonl": train, "test.jsonl": test})
    task = tasks.make("jsonl", path=folder, verifier="numeric", prompt_length=32, answer_length=8)
    found = survey(task, 8).splits
    assert found["train"] == {
        "rows": 32, "complete": True, "measured": 32,
        "prompt_median": 8, "prompt_longest": 40, "prompt_bound": 32, "prompts_dropped": 1,
        "answer_median": 3, "answer_longest": 9, "answer_bound": 8,
        "repeated": 1, "shared": 0, "reached": 1 - 1 / 32,
    }  # fmt: skip
    assert {name: found["test"][name] for name in ("rows", "shared", "repeated")} == {
        "rows": 3,
        "shared": 1,
        "repeated": 0,
    }
    assert found["test"]["reached"] == pytest.approx(2 / 3)
    lines = split_table.table(found)
    assert max(map(len, lines)) <= 69
    assert [line.split()[-2:] for line in lines] == [
        ["train", "test"], ["32", "3"], ["7,", "32"], ["5,", "8"], ["1", "0"], ["1", "0"], ["too", "1"], ["66.7", "%"],
    ]  # fmt: skip
    assert lines[2].split()[-6:] == ["8,", "40,", "32", "7,", "7,", "32"]
    monkeypatch.setattr(split_table, "MEASURED", 8)
    monkeypatch.setattr("jaxrl_llm.check.doubts._READ", 30)
    lines = survey(task, 8).table()
    assert "30 or more" in lines[1]
    assert lines[-1] == "(tokens and drops: of 8 of train, evenly chosen)"
    assert survey(tasks.make("sort"), 16).table() == []  # what a task draws is known
    own = tasks.make("jsonl", path=folder, verifier="tests.tasks.verifiers_for_tests:length")
    assert not any("found right" in line for line in survey(own, 8).table())
