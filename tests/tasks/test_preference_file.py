"""Preference pairs from JSONL: every usual form, and for every bad line its number and the remedy, or a count."""

import json

import pytest

from jaxrl_llm.tasks import CharTokenizer
from jaxrl_llm.tasks.preference import PairEncoder, all_pairs, read_pairs
from jaxrl_llm.tasks.splits import is_test

LETTERS = CharTokenizer("".join(chr(code) for code in range(32, 127)) + "\n")
ENCODER = PairEncoder(LETTERS, prompt_length=40, answer_length=12)
GOOD = {"prompt": "3+4=", "chosen": "7", "rejected": "8"}


def written(folder, *rows):
    """A file of these rows; bytes stand as they are."""
    path = folder / "pairs.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


def shout(messages):
    """A chat template."""
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def texts(pair):
    return pair["prompt"], pair["chosen"], pair["rejected"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD, ("3+4=", "7", "8")),
        ({"chosen": "3+4=7", "rejected": "3+4=77"}, ("3+4=", "7", "77")),
        (  # the answers begin with the same word, which is none of the prompt; the space goes with them
            {"chosen": "Human: hi\n\nAssistant: hello", "rejected": "Human: hi\n\nAssistant: help"},
            ("Human: hi\n\nAssistant:", " hello", " help"),
        ),
        (
            {"prompt": [user("3+4?")], "chosen": [assistant("7")], "rejected": [assistant("8")]},
            ("<user>3+4?<assistant>", "7", "8"),
        ),
        (
            {"chosen": [user("3+4?"), assistant("7")], "rejected": [user("3+4?"), assistant("8")]},
            ("<user>3+4?<assistant>", "7", "8"),
        ),
        (  # a string prompt next to whole chats, which have it too
            {"prompt": "3+4?", "chosen": [user("3+4?"), assistant("7")], "rejected": [user("3+4?"), assistant("8")]},
            ("<user>3+4?<assistant>", "7", "8"),
        ),
        (
            {"prompt": "3+4?", "chosen": [assistant("7")], "rejected": [assistant("8")]},
            ("<user>3+4?<assistant>", "7", "8"),
        ),
        (
            {
                "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
                "rejected": [user("a"), assistant("b"), user("c"), assistant("e")],
            },
            ("<user>a<assistant>b<user>c<assistant>", "d", "e"),
        ),
    ],
    ids=[
        "strings",
        "common-text",
        "common-words",
        "chat",
        "common-chat",
        "text-and-chats",
        "text-and-answers",
        "turns",
    ],
)
def test_every_usual_form(row, expected, tmp_path):
    got = read_pairs(written(tmp_path, row, GOOD | {"prompt": "a="}, GOOD | {"prompt": "b="}), ENCODER, render=shout)
    pair = next(pair for pair in (*got.train, *got.test) if pair["uid"] == 1)
    assert texts(pair) == expected
    assert got.skipped == {}


def test_margins_other_fields_and_empty_lines(tmp_path):
    path = written(tmp_path, {**GOOD, "margin": 2, "id": "x"}, b"", b"  \r", {**GOOD, "prompt": "5+5="})
    got = read_pairs(path, ENCODER)
    assert [(pair["uid"], pair["margin"]) for pair in (*got.train, *got.test)] == [(1, 2.0), (4, 0.0)]


def test_the_prompt_decides_the_split(tmp_path):
    """One prompt in eight is held out; the second pair of a prompt goes with the first, and order does not matter."""
    rows = [{**GOOD, "prompt": f"{i}+1=", "chosen": answer} for i in range(200) for answer in ("7", "9")]
    got = read_pairs(written(tmp_path, *rows), ENCODER)
    train, test = ({pair["prompt"] for pair in part} for part in (got.train, got.test))
    assert not train & test
    assert len(got.test) == 2 * len(test)
    assert test == {pair["prompt"] for pair in (*got.train, *got.test) if is_test(pair["prompt"])}  # as for a task
    assert 12 <= len(test) <= 40
    again = read_pairs(written(tmp_path, *rows[::-1]), ENCODER)
    assert {pair["prompt"] for pair in again.test} == test


def test_pairs_about_the_train_split_of_a_task_have_some_held_out(tmp_path):
    prompts = [prompt for i in range(400) if not is_test(prompt := f"{i}+1=")]
    got = read_pairs(written(tmp_path, *({**GOOD, "prompt": prompt} for prompt in prompts)), ENCODER)
    assert len(got.test) > len(prompts) / 16


BAD = {
    "missing field": (
        {"prompt": "a", "chosn": "b", "rejected": "c"},
        r"has no 'chosen' .did you mean 'chosn'\?.; give",
    ),
    "missing field, null": ({"prompt": "a", "chosen": "b", "rejected": None}, "it has no 'rejected'"),
    "missing field, no prompt": ({"chosen": "yes", "rejected": "no"}, "do not begin alike; give 'prompt'"),
    "missing field, no message": (
        {"chosen": [assistant("a")], "rejected": [assistant("b")]},
        "share no message; give 'prompt'",
    ),
    "empty": ({**GOOD, "rejected": " \n"}, "rejected has no text after the prompt; give it an answer"),
    "empty, prompt": ({**GOOD, "prompt": ""}, "it asks nothing; give it a prompt"),
    "empty, chat": ({"chosen": [user("a")], "rejected": [user("a"), assistant("b")]}, "chosen has no message after"),
    "equal": ({**GOOD, "rejected": "7"}, "both answers are '7'; give two different answers"),
    "not JSON, bytes": (b'{"chosen": "\xff"}', "byte 0xff at column 13 is not UTF-8; save the file as UTF-8"),
    "not JSON": (b'{"chosen": ', "Expecting value.*; write one JSON object"),
    "not JSON, list": (b"[1]", "it is no JSON object; write one JSON object"),
    "too long": (
        {**GOOD, "chosen": "7" * 12},
        "the chosen '777777777777' has 13 tokens with EOS, over answer_length=12",
    ),
    "too long, prompt": ({**GOOD, "prompt": "x" * 41}, "has 41 tokens, over prompt_length=40; raise prompt_length"),
    "unknown character": ({**GOOD, "chosen": "é"}, "character 'é' at position 0"),
    "wrong type": ({**GOOD, "chosen": 7}, "it has the types .*'chosen': 'int'.*; give all as strings"),
    "wrong type, margin": ({**GOOD, "margin": "big"}, "margin='big' is no finite number"),
    "wrong type, message": ({"chosen": ["a"], "rejected": [assistant("b")]}, "'chosen' holds 'a', no message"),
    "wrong type, roles": (
        {"prompt": "a", "chosen": [user("b")], "rejected": [assistant("c")]},
        r"chosen answers with the roles \['user'\]; end it with one assistant message",
    ),
    "wrong type, twice": (
        {"prompt": [user("a")], "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        "repeat the prompt; leave 'prompt' out",
    ),
    "chat": (
        {"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]},
        "it holds chat messages; use a tokenizer with a chat template",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_or_counted(name, tmp_path):
    row, message = BAD[name]
    render = None if name == "chat" else shout
    path = written(tmp_path, GOOD, {**GOOD, "prompt": "1+1="}, row, {**GOOD, "prompt": "2+2="})
    with pytest.raises(ValueError, match=f'line 3: .*{message}.*, or set bad="skip" .* to leave such lines out'):
        read_pairs(path, ENCODER, render=render)
    got = read_pairs(path, ENCODER, render=render, bad="skip")
    assert got.skipped == {name.split(",")[0]: 1}
    assert sorted(pair["uid"] for pair in (*got.train, *got.test)) == [1, 2, 4]


def test_a_file_without_a_good_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no pair to train on .skipped: equal 2"):
        read_pairs(written(tmp_path, {**GOOD, "rejected": "7"}, {**GOOD, "rejected": "7"}), ENCODER, bad="skip")
    with pytest.raises(ValueError, match=r"cannot be read.*name a JSONL file of preference pairs"):
        read_pairs(tmp_path / "nothing.jsonl", ENCODER)
    with pytest.raises(ValueError, match=r"bad='ignore' is unknown.*; use one of raise, skip"):
        read_pairs(written(tmp_path, GOOD), ENCODER, bad="ignore")


def test_a_file_becomes_a_batch(tmp_path):
    got = read_pairs(written(tmp_path, GOOD, {**GOOD, "prompt": "55+4=", "margin": 0.5}), ENCODER)
    batch = all_pairs(got.train, ENCODER)
    assert batch["tokens"].shape == (2 * len(got.train), 52)
    assert batch["loss_mask"].sum() == 4 * len(got.train)  # a digit and EOS, twice
