import dataclasses
import json
import subprocess
import sys
import threading

import filelock
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import drawn_splits
from tests.reference.slowly import first_quick

SMALL = {"train_size": 24, "test_size": 8}

# The first train and test example of every task with its default options, drawn once from numpy's PCG64 with seed 0.
# They may change only together with the task or with the version of the data set.
FIRST = {
    "addition": (("850+636=", "6841"), ("503+606=", "9011")),
    "countdown": (("16,20,26:62=", "16+26+20"), ("2,17,17:68=", "(17+17)*2")),
    "modular": (("(82-61)%97=", "21"), ("(54+90)%97=", "47")),
    "sort": (("8652300018=", "0001235688"), ("9969801809=", "0016889999")),
    "subtraction": (("850-636=", "412"), ("394-857=", "-364")),
}


@pytest.mark.parametrize("name", FIRST)
def test_splits_are_deterministic(name):
    drawn = drawn_splits.generate(tasks.make(name, **SMALL))
    first = tuple(
        (drawn[split].examples[0]["prompt"], drawn[split].examples[0]["answer"]) for split in ("train", "test")
    )
    assert first == FIRST[name]
    assert drawn == drawn_splits.generate(tasks.make(name, **SMALL))


@pytest.mark.parametrize(
    "name",
    first_quick(1, ["modular", "addition", "sort", "subtraction", "countdown"]),
)
def test_no_prompt_is_in_both_splits_at_any_size(name):
    large = drawn_splits.generate(tasks.make(name, train_size=2000, test_size=200))
    small = drawn_splits.generate(tasks.make(name, **SMALL))
    train = [example["prompt"] for example in large["train"].examples]
    test = [example["prompt"] for example in large["test"].examples]
    assert (len(set(train)), len(set(test))) == (2000, 200)
    assert not set(train) & {*test, *(example["prompt"] for example in small["test"].examples)}
    assert [example["uid"] for example in large["train"].examples] == list(range(2000))


def test_a_space_that_is_too_small_is_an_error_with_the_size_that_fits():
    with pytest.raises(ValueError, match=r"train_size=100 is more than task 'sort' with \{'digits': 2\}") as error:
        drawn_splits.generate(tasks.make("sort", digits=2, train_size=100, test_size=4))
    found = int(str(error.value).split(" different")[0].rsplit(" ", 1)[1])
    assert 80 <= found <= 96  # seven eighths of 100 prompts, give or take the hash
    assert (
        len(drawn_splits.generate(tasks.make("sort", digits=2, train_size=found, test_size=4))["train"].examples)
        == found
    )


def test_the_name_of_the_data_follows_everything_that_changes_it():
    task = tasks.make("sort", **SMALL)
    assert tasks.data_name(task) == "sort-digits_10-train_24-test_8-9d53ea"  # as on the disks of users
    other_code = dataclasses.replace(task, sample=lambda rng: (f"{rng.integers(10**9)}=", ""))
    variants = [
        task,
        other_code,
        tasks.make("sort", digits=9, **SMALL),
        tasks.make("sort", train_size=25, test_size=8),
        tasks.make("modular", operators="+", **SMALL),
        tasks.make("modular", operators="-", **SMALL),
    ]
    assert len({tasks.data_name(variant) for variant in variants}) == len(variants)
    assert tasks.data_name(tasks.make("modular", operators="+-", **SMALL)).startswith(
        "modular-modulus_97-operators_plusminus-train_24-test_8-"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt_length": 4},
            r"drew an example .* the prompt '.*' has 11 tokens, over prompt_length=4; raise prompt_length",
        ),
        ({"answer_length": 10}, r"the answer '.*' has 11 tokens with EOS, over answer_length=10; raise answer_length"),
        (
            {"verify": lambda prompt, answer, gold, row: 0.5},
            r"its own verify scores 0\.5, below solved=1\.0; correct sample or verify",
        ),
        ({"verify": lambda *_: "good"}, "task 'sort': verify returned 'good'; return a number"),
        ({"tokenizer": tasks.CharTokenizer("0123456789")}, "character '=' at position 10"),
    ],
)
def test_a_task_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        drawn_splits.generate(dataclasses.replace(tasks.make("sort", **SMALL), **change))


def test_data_on_disk_is_the_generated_data(data_dir, capfd):
    task = tasks.make("countdown", **SMALL)
    drawn = drawn_splits.generate(task)
    for split in ("train", "test"):
        assert list(tasks.examples(task, split, data_dir)) == drawn[split].examples
    assert capfd.readouterr() == ("", "")  # TFDS keeps quiet


def test_a_data_dir_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data_dir='.*file' cannot be written.*name a writable folder"):
        tasks.examples(tasks.make("sort", **SMALL), "train", tmp_path / "file")


def test_the_default_data_dir_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tasks.default_data_dir() == tmp_path / "jaxrl_llm" / "data"
    tasks.examples(tasks.make("sort", **SMALL), "test")
    assert (tmp_path / "jaxrl_llm" / "data" / "jaxrl_llm").is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tasks.default_data_dir() == tmp_path / ".cache" / "jaxrl_llm" / "data"


def test_a_writer_waits_for_the_other_one(tmp_path):
    task = tasks.make("sort", **SMALL)
    folder = tmp_path / "jaxrl_llm" / tasks.data_name(task)
    folder.mkdir(parents=True)
    writer = threading.Thread(target=tasks.examples, args=(task, "train", tmp_path))
    with filelock.FileLock(folder / "lock"):
        writer.start()
        writer.join(timeout=0.5)
        assert writer.is_alive()
        assert [path.name for path in folder.iterdir()] == ["lock"]
    writer.join()
    assert (folder / "1.2.0" / "dataset_info.json").exists()


WRITE_AT_ONCE = """
import pathlib, sys, time
import jaxrl_llm.tasks.builder
from jaxrl_llm import tasks
task, folder = tasks.make("sort", train_size=24, test_size=8), pathlib.Path(sys.argv[1])
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.001)
print(tasks.examples(task, "train", folder)[23]["prompt"])
"""


@pytest.mark.slow
def test_several_processes_may_write_at_once(tmp_path):
    command = [sys.executable, "-c", WRITE_AT_ONCE, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    (tmp_path / "go").touch()
    last = drawn_splits.generate(tasks.make("sort", **SMALL))["train"].examples[23]["prompt"]
    assert [writer.communicate()[0] for writer in writers] == [f"{last}\n"] * 2
    assert not list(tmp_path.rglob("*incomplete*"))


def test_a_data_set_names_no_module_to_import(tmp_path, monkeypatch):
    """TFDS would import the module of an unknown feature."""
    task = tasks.make("sort", train_size=8, test_size=4)
    before = tasks.all_prompts(task, data_dir=tmp_path)
    (features,) = tmp_path.rglob("features.json")
    features.write_text(json.dumps(json.loads(features.read_text()) | {"pythonClassName": "of_others.Feature"}))
    (tmp_path / "of_others.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert tasks.all_prompts(task, data_dir=tmp_path)["prompt"] == before["prompt"]
