"""What `init` says first is read in the place of the row's prompt, by whoever reads prompts."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.check.data_rows import prompt_lengths
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episodes import converse
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Step, row_of
from jaxrl_llm.tasks.environments.reading import as_read, opened
from jaxrl_llm.tasks.messages import EARLIER, GIVEN
from jaxrl_llm.training.warm_start import WarmStartConfig, cached_in
from tests.reference.tiny_environments import Announcing, Counting
from tests.reference.tiny_rollout import tiny
from tests.tasks.test_environments import CHATML, Templated

LETTERS = tasks.CharTokenizer("abcdefghijklmn")
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}


def announced(*says, said=("b",), **fields):
    """A task whose rows, in this order, say what their environments begin with."""
    rows = [{"says": one, "place": i, DEMONSTRATION: [*said]} for i, one in enumerate(says)]
    draws = iter(["abc", "b", {**row}] for row in [*rows, *rows])

    def read():
        return {split: [tuple(next(draws)) for _ in rows] for split in ("train", "test")}

    fields = {"tokenizer": LETTERS, "turns": 2, "observation_length": 1, "environment": Announcing} | fields
    source = tasks.Source(read, lambda: repr(rows))
    return tasks.Task("begun", 4, 2, source=source, train_size=0, test_size=0, **fields)


def opened_with(task, folder):
    return tasks.all_prompts(task, "train", data_dir=folder)


class Silent:
    """Answers nothing but the end."""

    def __init__(self):
        self.asked = []

    def answered(self, wanted):
        self.asked.append([*wanted.values()])
        return {i: [1] for i in wanted}


def episodes_of(task, batch, group=2):
    engine = Engine(Model(tiny()), sampling=Sampling(), group_size=group, max_new_tokens=2, end_ids=(1,))
    silent = Silent()
    return silent, converse(silent.answered, engine, task, batch).episodes


@pytest.mark.parametrize("isolated", [False, True])
def test_first_messages_stand_in_the_place_of_the_prompt(tmp_path, isolated):
    task = announced("cd", [{"role": "user", "content": "e"}], None, "abc", isolated=isolated)
    batch = opened_with(task, tmp_path)
    assert batch["prompt"] == ["cd", "e", "abc", "abc"]
    assert [tokens[:n].tolist() for tokens, n in zip(batch["tokens"], batch["lengths"], strict=True)] == [
        LETTERS.encode(text) for text in batch["prompt"]
    ]
    assert [GIVEN in row for row in batch["row"]] == [True, True, False, False]  # what says the prompt changes nothing
    asked = zip(batch["prompt"], batch["row"], strict=True)
    given = [row_of({"prompt": prompt, "answer": "b", "row": row}) for prompt, row in asked]
    assert [(row["prompt"], row["place"], row["answer"]) for row in given] == [("abc", i, "b") for i in range(4)]
    silent, found = episodes_of(task, batch)
    assert silent.asked[0] == [LETTERS.encode(text) for text in batch["prompt"] for _ in range(2)]
    assert [one.error for one in found] == [""] * 8
    train = next(tasks.prompts(task, seed=0, batch_size=4, data_dir=tmp_path))
    assert sorted(train["prompt"]) == ["abc", "abc", "cd", "e"]


@pytest.mark.parametrize("isolated", [False, True])
def test_in_a_chat_they_are_encoded_as_the_messages_of_a_row(tmp_path, isolated):
    prompting = tasks.Prompting(template="Q: {prompt}", chat=True, system="own")
    fields = {"tokenizer": Templated(CHATML), "prompting": prompting, "isolated": isolated}
    said = [SYSTEM, USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    task = dataclasses.replace(announced(said, "w", None, **fields), prompt_length=99, observation_length=64)
    batch = opened_with(task, tmp_path)
    assert batch["prompt"] == ["v", "w", "abc"]
    assert [row.get(EARLIER) for row in batch["row"]] == [said[:-1], None, None]
    texts = ["<|system|>s<|end|>\n<|user|>u<|end|>\n<|assistant|>a<|end|>\n<|user|>Q: v<|end|>\n<|assistant|>"]
    texts += [f"<|system|>own<|end|>\n<|user|>Q: {text}<|end|>\n<|assistant|>" for text in ("w", "abc")]
    assert [tokens[:n].tolist() for tokens, n in zip(batch["tokens"], batch["lengths"], strict=True)] == [
        task.tokenizer.encode(text) for text in texts
    ]
    assert [one.error for one in episodes_of(task, batch)[1]] == [""] * 6


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (7, "ValueError: init returned 7; return a text, messages of which the last is one of the user, or None"),
        ("", "ValueError: init returned ''; return"),
        ([], "ValueError: init returned []; return"),
        ([USER, SYSTEM], "return a text, messages of which the last is one of the user"),
        ([[USER], {}], "TypeError: field 'init' holds"),
        (
            "abcde",
            "the prompt 'abcde' has 5 tokens, over prompt_length=4; raise prompt_length (in a run: rollout.max_p",
        ),
        ("z", "what init returned cannot be read: "),
        ([SYSTEM, USER], "set task.chat=True"),
        ("raise", "KeyError: 'no such thing'"),
        ("hang", "timeout"),
        ("differ", "and something else before; let it follow from the row alone"),
    ],
)
def test_an_environment_that_cannot_begin_ends_its_own_episodes(tmp_path, says, error):
    """With a reward of 0, which is counted; the other rows go on."""
    task = announced("cd", says, isolated=says == "hang", time_limit=0.3)
    batch = opened_with(task, tmp_path)
    assert batch["prompt"][0] == "cd"
    assert batch["prompt"][1] == "abc" or says == "differ"
    good, _, *others = episodes_of(task, batch)[1]
    assert good.error == ""
    wrong = [one for one in others if one.error]
    assert len(wrong) == (1 if says == "differ" else 2)  # every other `init` says the same
    for one in wrong:
        assert one.reward == 0.0
        assert error in one.error


def test_demonstrations_begin_with_first_messages(tmp_path):
    task = announced("cd", None, said=("b", "e", "c"))
    batch = next(tasks.supervised(task, seed=0, batch_size=2, data_dir=tmp_path))
    b, e, c, end = *LETTERS.encode("bec"), 1
    said, learnt = [b, end, e, c, end], [True, True, False, True, True]
    rows = {
        int(uid): (batch["tokens"][i].tolist(), batch["loss_mask"][i].tolist()) for i, uid in enumerate(batch["uid"])
    }
    for uid, text in enumerate(("cd", "abc")):
        begin = LETTERS.encode(text)
        rest = batch["tokens"].shape[1] - len(begin) - len(said)
        assert rows[uid] == (begin + said + [0] * rest, [False] * len(begin) + learnt + [False] * rest)
    with pytest.raises(ValueError, match="task 'begun' does not begin with 'abc': KeyError: 'no such thing'; mend it"):
        next(tasks.supervised(announced("raise"), seed=0, batch_size=1, data_dir=tmp_path / "other"))


def test_a_warm_start_on_other_first_messages_is_another(tmp_path):
    """The place in the cache; an environment that says nothing has that of the rows' prompts."""
    task, model = announced("cd", None), Model(tiny())

    def place(environment):
        own = dataclasses.replace(task, environment=environment)
        return cached_in(model, own, WarmStartConfig(cache_dir=str(tmp_path)), data_dir=str(tmp_path / "data"))

    class Other(Announcing):
        def init(self, row):
            return "e"

    class Prompt(Announcing):
        def init(self, row):
            return row["prompt"]

    assert place(Counting) == place(Prompt)
    assert len({place(each) for each in (Counting, Announcing, Other)}) == 3


def test_a_check_measures_first_messages():
    """A row whose prompt is short and whose first messages are too long."""
    task = announced("cd", "abcdefg")
    read = as_read(task, [("abc", "b", {"says": says}) for says in ("cd", "abcdefg")])
    assert [prompt for prompt, *_ in read] == ["cd", "abcdefg"]
    assert prompt_lengths(task, read).seen == "longest of 2: 7 tokens, bound 4; 1 dropped (50%)"


def test_episodes_of_one_rollout_do_not_hear_those_of_another():
    """An evaluation begins while episodes that a thread plays are open; equal numbers are other episodes."""
    task = announced("cd", isolated=True)
    one, other = opened(task), opened(task)
    for each in (one, other):
        each("init", {0: {"says": None}})
    assert one("step", {0: "b"})[0].observation == "b"
    assert other("step", {0: "b"})[0].observation == "b"  # the first answer that it hears
    other("close", {0: None})
    assert one("step", {0: "b"})[0].observation == "c"
    assert one("close", {0: None, 1: None}) == {0: Step(), 1: Step(error="the worker died")}


def test_many_rows_are_asked_by_few_processes(tmp_path):
    rows = np.array([f"{'bcd'[i % 3]}" for i in range(200)])
    batch = opened_with(announced(*rows.tolist(), isolated=True), tmp_path)
    assert batch["prompt"] == rows.tolist()
