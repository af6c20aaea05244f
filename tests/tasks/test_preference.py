"""Pairs of the synthetic tasks: what is preferred to what, label noise, and streams with an exact state."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.preference import CORRUPTIONS, PairEncoder, PairRules, all_pairs, make_pairs, pair_stream, pairs

SIZE = 96
SIZES = {"train_size": SIZE, "test_size": 8}
TASKS = {
    "sort": tasks.make("sort", digits=6, **SIZES),
    "addition": tasks.make("addition", **SIZES),
    "countdown": tasks.make("countdown", **SIZES),
}
ROOMY = {name: dataclasses.replace(task, answer_length=task.answer_length + 2) for name, task in TASKS.items()}


def made(task, rules, data_dir, split="train"):
    source = pairs(task, rules, split, data_dir=data_dir)
    return [source[i] for i in range(len(source))]


def verified(task, pair, answer):
    return task.verify(pair["prompt"], answer, "", {})  # these tasks know what is right from the prompt


def is_subsequence(short, long):
    rest = iter(long)
    return all(character in rest for character in short)


@pytest.mark.parametrize("name", TASKS)
def test_right_is_preferred_to_wrong(name, data_dir):
    task = TASKS[name]
    got = made(task, PairRules(), data_dir)
    assert [pair["uid"] for pair in got] == list(range(SIZE))
    for pair in got:
        assert verified(task, pair, pair["chosen"]) == 1
        assert verified(task, pair, pair["rejected"]) == 0
        assert 0 < len(pair["rejected"]) < task.answer_length
        assert pair["margin"] == 0
    assert [pair["prompt"] for pair in got] == [row["prompt"] for row in tasks.examples(task, "train", data_dir)]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corruption_does_what_its_name_says(corruption, data_dir):
    for pair in made(ROOMY["countdown"], PairRules(corruption=corruption), data_dir):
        right, wrong = pair["chosen"], pair["rejected"]
        assert {
            "replace": len(right) == len(wrong) and sum(a != b for a, b in zip(right, wrong, strict=False)) == 1,
            "drop": len(wrong) == len(right) - 1 and is_subsequence(wrong, right),
            "repeat": len(wrong) == len(right) + 1 and is_subsequence(right, wrong),
            "swap": sorted(wrong) == sorted(right) and sum(a != b for a, b in zip(right, wrong, strict=False)) == 2,
        }[corruption], (right, wrong)


@pytest.mark.parametrize(("name", "reward"), [("countdown", 1.0), ("sort", 0.0), ("addition", 0.0)])
def test_shorter_is_preferred_at_equal_correctness(name, reward, data_dir):
    """Brackets leave an expression right; sums and sorted digits have one right spelling, so both are wrong."""
    task = ROOMY[name]
    for pair in made(task, PairRules(equal_share=1.0), data_dir):
        assert len(pair["chosen"]) < len(pair["rejected"]) < task.answer_length
        assert [verified(task, pair, pair[side]) for side in ("chosen", "rejected")] == [reward] * 2


@pytest.mark.slow
def test_shares_are_met_and_noise_is_nested(data_dir):
    """40 % noise swaps the pairs that 20 % swaps, and more; nothing else changes."""
    task = dataclasses.replace(TASKS["sort"], train_size=1000)
    clean, some, more = (made(task, PairRules(label_noise=noise), data_dir) for noise in (0.0, 0.2, 0.4))
    swapped = [
        {pair["uid"] for pair, noisy in zip(clean, other, strict=True) if pair["chosen"] == noisy["rejected"]}
        for other in (some, more)
    ]
    assert swapped[0] < swapped[1]
    assert [len(x) / 1000 for x in swapped] == pytest.approx([0.2, 0.4], abs=0.04)
    for pair, noisy in zip(clean, some, strict=True):
        assert {pair["chosen"], pair["rejected"]} == {noisy["chosen"], noisy["rejected"]}
    mixed = made(task, PairRules(equal_share=0.3), data_dir)
    alike = [verified(task, pair, pair["chosen"]) == 0 for pair in mixed]
    assert np.mean(alike) == pytest.approx(0.3, abs=0.05)


def test_the_same_on_every_machine_and_at_every_size(data_dir):
    """A pair depends on its example alone; another seed gives other pairs, the test split other prompts."""
    task, rules = TASKS["addition"], PairRules(corruption="replace", label_noise=0.3)
    got = made(task, rules, data_dir)
    assert got[2] == {
        "uid": 2,
        "prompt": "307+40=",
        "chosen": got[2]["chosen"],
        "rejected": got[2]["rejected"],
        "margin": 0,
    }
    larger = made(dataclasses.replace(task, train_size=2 * SIZE), rules, data_dir)
    assert larger[:SIZE] == got
    assert made(task, dataclasses.replace(rules, seed=1), data_dir) != got
    held_out = made(task, rules, data_dir, "test")
    assert not {pair["prompt"] for pair in held_out} & {pair["prompt"] for pair in got}


def test_data_of_other_rules_is_never_read(data_dir):
    folders = {
        made(ROOMY["sort"], rules, data_dir)[0]["rejected"]
        for rules in (PairRules(corruption="drop"), PairRules(corruption="repeat"))
    }
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corruption": "dorp"}, "preference.corruption='dorp' is unknown .did you mean 'drop'"),
        ({"label_noise": 1.5}, "preference.label_noise=1.5 is out of range"),
        ({"equal_share": -0.1}, "preference.equal_share=-0.1 is out of range"),
        ({"seed": -1}, "preference.seed=-1 is out of range"),
    ],
)
def test_bad_rules(fields, message):
    with pytest.raises(ValueError, match=message):
        PairRules(**fields)


def test_a_corruption_that_cannot_be_wrong_says_what_to_do():
    """Swapping neighbours of '33' leaves it right; sorting one digit has no longer wrong answer within its bound."""
    task = tasks.make("sort", digits=2)
    example = tasks.Example(uid=0, prompt="33=", answer="33", row={})
    with pytest.raises(ValueError, match=r"corruption='swap' makes no wrong answer of '33' to '33='.*set preference"):
        list(make_pairs(task, PairRules(corruption="swap"), [example], "train"))
    task = tasks.make("sort", digits=1)
    example = tasks.Example(uid=0, prompt="3=", answer="3", row={})
    with pytest.raises(ValueError, match=r"no longer answer to '3='.*answer_length"):
        list(make_pairs(task, PairRules("replace", equal_share=1.0), [example, {**example, "answer": "4"}], "train"))


def test_rows_of_a_batch(data_dir):
    """'307+40=' has 7 tokens, an answer and its EOS follow; rows 2i and 2i + 1 are a pair."""
    task = ROOMY["addition"]
    source = pairs(task, PairRules(corruption="repeat"), data_dir=data_dir)
    batch = all_pairs(source, PairEncoder.of(task), limit=3)
    assert batch["tokens"].shape == (6, task.prompt_length + task.answer_length)
    assert (batch["prompt"][2], batch["chosen"][2]) == ("307+40=", "743")
    assert batch["tokens"][4].tolist() == [5, 2, 9, 12, 6, 2, 13, 9, 6, 5, 1] + [0] * 4
    assert batch["loss_mask"][4].tolist() == [False] * 7 + [True] * 4 + [False] * 4
    assert batch["segment_ids"][4].tolist() == [1] * 11 + [0] * 4
    assert batch["loss_mask"][5].tolist() == [False] * 7 + [True] * 5 + [False] * 3  # one character more
    assert batch["tokens"][5, :7].tolist() == batch["tokens"][4, :7].tolist()
    assert task.tokenizer.decode(batch["tokens"][5, 7:].tolist()) == batch["rejected"][2]
    assert {key: batch[key].dtype.name for key in ("uid", "draw", "tokens", "segment_ids", "margins")} == {
        "uid": "int64",
        "draw": "int64",
        "tokens": "int32",
        "segment_ids": "int32",
        "margins": "float32",
    }


@pytest.mark.parametrize("done", [0, 1, 4, 7])  # 20 of 96 pairs a batch: the seam of two epochs lies in the fifth
def test_a_stream_goes_on_where_it_was(done, data_dir):
    task = TASKS["sort"]
    source, encoder = pairs(task, PairRules(), data_dir=data_dir), PairEncoder.of(TASKS["sort"])
    stream = pair_stream(source, encoder, seed=3, batch_size=20)
    before = [next(stream) for _ in range(done)]
    state = stream.get_state()
    following = [next(stream) for _ in range(3)]
    draws = np.concatenate([batch["draw"] for batch in (*before, *following)])
    np.testing.assert_array_equal(draws, np.arange(20 * (done + 3)))
    other = pair_stream(source, encoder, seed=3, batch_size=20)
    other.set_state(state)
    for batch in following:
        again = next(other)
        for key, x in batch.items():
            np.testing.assert_array_equal(again[key], x)


def test_every_epoch_has_every_pair_in_another_order(data_dir):
    task = TASKS["sort"]
    stream = pair_stream(pairs(task, PairRules(), data_dir=data_dir), PairEncoder.of(task), seed=0, batch_size=SIZE)
    first, second = next(stream)["uid"], next(stream)["uid"]
    assert sorted(first) == sorted(second) == list(range(SIZE))
    assert first.tolist() != second.tolist()
