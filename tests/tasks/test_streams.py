import dataclasses
import json
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl_llm import tasks
from tests.reference.slowly import first_quick

SIZE = 24
TASK = tasks.make("sort", digits=2, train_size=SIZE, test_size=8)


def take(stream, batches):
    return [next(stream) for _ in range(batches)]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_a_batch_of_prompts(data_dir):
    batch = next(tasks.prompts(TASK, "train", seed=0, batch_size=SIZE, data_dir=data_dir))
    assert {key: batch[key].dtype.name for key in ("uid", "draw", "tokens", "lengths")} == {
        "uid": "int64",
        "draw": "int64",
        "tokens": "int32",
        "lengths": "int32",
    }
    assert sorted(batch["uid"]) == list(range(SIZE))  # one epoch: every example once
    assert list(batch["draw"]) == list(range(SIZE))
    row = list(batch["uid"]).index(0)
    assert (batch["prompt"][row], batch["answer"][row]) == ("30=", "03")
    assert batch["tokens"][row].tolist() == [5, 2, 12]  # "0" is 2, so "3" is 5; "=" comes after "9" and is 12
    assert batch["lengths"][row] == 3


def test_shorter_prompts_are_padded_on_the_right(data_dir):
    task = tasks.make("addition", train_size=SIZE, test_size=8)
    batch = next(tasks.prompts(task, "train", seed=0, batch_size=SIZE, data_dir=data_dir))
    row = batch["prompt"].index("307+40=")
    assert batch["tokens"][row].tolist() == [5, 2, 9, 12, 6, 2, 13, 0]
    assert batch["lengths"][row] == 7


def test_supervised_rows(data_dir):
    task = tasks.make("addition", train_size=SIZE, test_size=8)
    batch = next(tasks.supervised(task, "train", seed=0, batch_size=SIZE, data_dir=data_dir))
    row = list(batch["uid"]).index(2)  # "307+40=" -> "743", EOS; 8 + 5 places, 11 of them used
    assert batch["tokens"][row].tolist() == [5, 2, 9, 12, 6, 2, 13, 9, 6, 5, 1, 0, 0]
    assert batch["loss_mask"][row].tolist() == [False] * 7 + [True] * 4 + [False] * 2
    assert batch["segment_ids"][row].tolist() == [1] * 11 + [0] * 2
    assert {key: batch[key].dtype.name for key in ("tokens", "loss_mask", "segment_ids")} == {
        "tokens": "int32",
        "loss_mask": "bool",
        "segment_ids": "int32",
    }
    asked = tasks.prompts(task, "train", seed=0, batch_size=SIZE, data_dir=data_dir)
    np.testing.assert_array_equal(next(asked)["uid"], batch["uid"])  # the same seed gives the same order


def test_batches_of_one(data_dir):
    """Grain's endless stream of them has more batches than Python can count."""
    ones = take(tasks.prompts(TASK, "train", seed=3, batch_size=1, data_dir=data_dir), SIZE)
    whole = next(tasks.prompts(TASK, "train", seed=3, batch_size=SIZE, data_dir=data_dir))
    assert [uid for batch in ones for uid in batch["uid"]] == whole["uid"].tolist()


def test_order_depends_on_seed_and_epoch_and_batches_span_epochs(data_dir):
    draws = take(tasks.prompts(TASK, "train", seed=3, batch_size=10, data_dir=data_dir), 12)
    uids = np.concatenate([batch["uid"] for batch in draws])
    np.testing.assert_array_equal(np.concatenate([batch["draw"] for batch in draws]), np.arange(120))
    epochs = uids.reshape(5, SIZE)
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    other = next(tasks.prompts(TASK, "train", seed=4, batch_size=SIZE, data_dir=data_dir))
    assert tuple(other["uid"]) != tuple(epochs[0])


@pytest.mark.parametrize("source", [tasks.prompts, tasks.supervised])
@pytest.mark.parametrize(
    "done", first_quick(1, [5, 2, 0, 1, 3])
)  # 10 of 24 a batch: the middle, the seam and later epochs
def test_resume_is_exact(source, done, data_dir):
    def stream():
        return source(TASK, "train", seed=3, batch_size=10, data_dir=data_dir)

    straight = take(stream(), done + 4)
    first = stream()
    assert_same(take(first, done), straight[:done])
    state = json.loads(json.dumps(first.get_state()))
    resumed = stream()
    next(resumed)  # whatever it did before
    resumed.set_state(state)
    assert_same(take(resumed, 4), straight[done:])
    assert_same(take(first, 4), straight[done:])  # asking for the state moves nothing


def test_orbax_saves_and_restores_a_stream(data_dir, tmp_path):
    import grain

    def stream():
        return tasks.prompts(TASK, "train", seed=3, batch_size=10, data_dir=data_dir)

    first = stream()
    take(first, 3)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(0, args=ocp.args.Composite(prompts=grain.checkpoint.CheckpointSave(first)))
        manager.wait_until_finished()
        restored = stream()
        manager.restore(0, args=ocp.args.Composite(prompts=grain.checkpoint.CheckpointRestore(restored)))
    assert_same(take(restored, 4), take(first, 4))


def test_all_prompts_of_a_split(data_dir):
    whole = tasks.all_prompts(TASK, "test", data_dir=data_dir)
    assert whole["uid"].tolist() == list(range(8))
    few = tasks.all_prompts(TASK, "test", limit=3, data_dir=data_dir)
    assert_same([few], [{key: value[:3] for key, value in whole.items()}])
    assert len(tasks.all_prompts(TASK, "test", limit=100, data_dir=data_dir)["uid"]) == 8


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("valid", {"seed": 0, "batch_size": 4}, "split='valid' is unknown; use one of train, test"),
        ("train", {"seed": 0, "batch_size": 0}, "batch_size=0 must be at least 1"),
        ("train", {"seed": -1, "batch_size": 4}, "seed=-1 is out of range"),
        ("train", {"seed": 2**32, "batch_size": 4}, "seed=4294967296 is out of range"),
    ],
)
def test_bad_arguments_are_explained(split, options, message, data_dir):
    with pytest.raises(ValueError, match=message):
        tasks.prompts(TASK, split, data_dir=data_dir, **options)


def test_a_limit_below_one_is_an_error(data_dir):
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        tasks.all_prompts(TASK, limit=0, data_dir=data_dir)


@pytest.mark.parametrize("kind", ["prompt", "answer"])
def test_text_over_the_budget_is_an_error_with_the_remedy(kind, data_dir):
    tight = dataclasses.replace(TASK, **{f"{kind}_length": 2})
    tasks.examples(TASK, "train", data_dir)  # on disk already, so only the reader can notice
    source = tasks.prompts if kind == "prompt" else tasks.supervised
    with pytest.raises(ValueError, match=f"the {kind} '.*' has 3 tokens.*, over {kind}_length=2; raise {kind}_length"):
        next(source(tight, "train", seed=0, batch_size=2, data_dir=data_dir))


def test_importing_tasks_imports_no_reader():
    heavy = "[m for m in ('jax', 'grain', 'tensorflow_datasets', 'tensorflow') if m in sys.modules]"
    script = f"import sys, jaxrl_llm.tasks; print({heavy})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
