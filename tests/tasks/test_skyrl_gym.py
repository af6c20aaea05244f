"""Environments of skyrl-gym, as they are, on rows in SkyRL's form; and what an environment may not do here."""

import dataclasses
import functools
import json
import sqlite3
import sys
from types import ModuleType

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.environments.environment import Step
from jaxrl_llm.tasks.environments.reading import begun, opened
from jaxrl_llm.tasks.environments.skyrl_gym_episodes import SkyRLEpisode
from tests.tasks.test_environments import CHATML, chatting


def rows_of(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def begins_with(prompt):
    """What `init` says to a row with this prompt: the same."""
    return Step([{"role": "user", "content": prompt}], done=False)


def row(gold, **more):
    asked = [{"role": "user", "content": f"Which is {gold}?"}]
    return {"prompt": asked, "reward_spec": {"method": "rule", "ground_truth": gold}, **more}


@pytest.mark.slow
def test_gsm8k_multi_turn(tmp_path):
    """A wrong number in the right form earns .2 over the number of turns, each time; the first #### of an answer counts
    as it is spelled."""
    pytest.importorskip("skyrl_gym")
    path = rows_of(tmp_path, *(row(str(i), extra_info={"index": i}) for i in range(40)))
    task = tasks.make("skyrl_gym", path=path, turns=4)
    (one, *_) = tasks.examples(task, "train", tmp_path / "data")
    own = opened(task)
    given = {**one["row"], "prompt": one["prompt"], "answer": one["answer"]}
    assert own("init", {0: given, 1: given}) == dict.fromkeys((0, 1), begins_with(one["prompt"]))
    wrong, none = own("step", {0: "#### -1", 1: "I do not know"}).values()
    assert (wrong.reward, none.reward, wrong.done) == (0.2 / 4, 0.0, False)
    assert wrong.observation[0]["role"] == "user"
    assert "tentative numeric answer" in wrong.observation[0]["content"]
    right = one["answer"]
    assert own("step", {0: f"#### {right}.0"})[0].reward == 0.2 / 4
    assert own("step", {0: f"#### -1, no, #### {right}"})[0].reward == 0.2 / 4
    last = own("step", {0: "no", 1: f"#### {right}"})
    assert last == {0: Step([], 0.0, True), 1: Step([], 1.0, True)}
    assert own("close", {0: None, 1: None}) == {0: Step(), 1: Step()}


@pytest.mark.slow
def test_text2sql(tmp_path):
    """Queries are answered by sqlite, change nothing, and the result of the solution's is compared."""
    pytest.importorskip("skyrl_gym")
    place = tmp_path / "data" / "spider" / "database" / "shop"
    place.mkdir(parents=True)
    with sqlite3.connect(place / "shop.sqlite") as file:
        file.executescript("create table price (thing text, cost int); insert into price values ('pear', 41)")
    gold = "select cost from price"
    path = rows_of(tmp_path, *(row(gold, db_id="shop", data="spider", n=i) for i in range(2)))
    task = tasks.make("skyrl_gym", env="text2sql", path=path, settings={"db_path": str(tmp_path / "data")}, turns=3)
    own = opened(task)
    begun = {**row(gold, db_id="shop", data="spider"), "prompt": "How much?", "answer": gold}

    def played(*answers):
        assert own("init", {0: begun}) == {0: begins_with(begun["prompt"])}
        return [own("step", {0: answer})[0] for answer in answers]

    asked, solved = played(
        "<think>Look.</think><sql>select * from price</sql>", f"<think>So.</think><solution>{gold}</solution>"
    )
    assert "pear 41" in asked.observation[0]["content"]
    assert "You have 2 turns left" in asked.observation[0]["content"]
    assert (asked.reward, solved) == (0.0, Step([], 1.0, True))
    dropped, other = played(
        "<think>Drop.</think><sql>delete from price</sql>",
        "<think>Still.</think><solution>select 41</solution>",
    )
    assert (dropped.done, other.reward) == (False, 1.0)
    assert played("<think>Wrong.</think><solution>select 40</solution>")[0].reward == 0.0
    assert played("<solution>select 41</solution>")[0].reward == -1.0  # without thoughts
    assert "no such table" in played("<think>?</think><sql>select 1 from missing</sql>")[0].observation[0]["content"]
    assert [one.reward for one in played("a", "b", "c")] == [0.0, 0.0, -1.0]


@pytest.mark.slow
def test_an_unknown_environment_is_refused_with_those_that_are_there(tmp_path):
    pytest.importorskip("skyrl_gym")
    with pytest.raises(
        ValueError, match=r"env='gsm8k_multi' is unknown \(did you mean 'gsm8k_multi_turn'\?\); .*text2sql"
    ):
        tasks.make("skyrl_gym", env="gsm8k_multi")


def test_without_the_library_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym.envs.registration", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl_llm\[tasks\]'"):
        tasks.make("skyrl_gym")


class Faulty:
    """An environment that does what its answer says."""

    def __init__(self, **extras):
        self.extras = extras

    def init(self, prompt):
        return [{"role": "system", "content": self.extras.get("rules", "s")}, *prompt[1:]], {}

    def step(self, answer):
        said = {"observations": [{"role": "user", "content": "on"}], "reward": 1, "done": False, "metadata": {}}
        return said | {"rewrites": {"postprocessed_action": "b"}, "silent": {"observations": []}}.get(answer, {})

    def close(self):
        pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("rewrites", "faulty rewrites answers, but what was sampled stays as it was"),
        ("silent", "faulty observes nothing and goes on"),
    ],
)
def test_what_an_environment_may_not_do(monkeypatch, answer, message):
    library = ModuleType("skyrl_gym")
    library.make = lambda name, env_config, extras: Faulty(**extras)
    monkeypatch.setitem(sys.modules, "skyrl_gym", library)
    own = SkyRLEpisode("faulty", {}, 2)
    own.init({"prompt": "a", "answer": "b", "earlier_messages": [{"role": "system", "content": "s"}], "x": 1})
    with pytest.raises(ValueError, match=message):
        own.step(answer)


def test_an_environment_may_begin_with_other_messages(monkeypatch):
    """Its rules are read in the place of the row's; where it says the same, the row stays as it is."""
    library = ModuleType("skyrl_gym")
    library.make = lambda name, env_config, extras: Faulty(**extras)
    monkeypatch.setitem(sys.modules, "skyrl_gym", library)
    task = dataclasses.replace(chatting(CHATML), environment=functools.partial(SkyRLEpisode, "faulty", {}, 2))
    row = {"earlier_messages": [{"role": "system", "content": "s"}]}
    given = [
        Example(uid=i, prompt="a", answer="b", row=one) for i, one in enumerate([row, row | {"rules": "Be brief."}])
    ]
    (same, _), (other, _) = found = begun(task, given)
    assert [why for _, why in found] == ["", ""]
    assert same is given[0]
    assert (other["prompt"], other["row"]["earlier_messages"]) == ("a", [{"role": "system", "content": "Be brief."}])
    ids = task.ids_of_prompt(other["prompt"], other["row"])
    assert task.tokenizer.decode(ids).startswith("<|system|>Be brief.")


def test_the_rest_is_passed_on(monkeypatch):
    library = ModuleType("skyrl_gym")
    library.make = lambda name, env_config, extras: Faulty(**extras, path=env_config.path, name=name)
    monkeypatch.setitem(sys.modules, "skyrl_gym", library)
    own = SkyRLEpisode("faulty", {"path": "here"}, 2)
    own.init({"prompt": "a", "answer": "b", "earlier_messages": [], "reward_spec": {"ground_truth": "b"}})
    assert own._env.extras == {"reward_spec": {"ground_truth": "b"}, "max_turns": 2, "path": "here", "name": "faulty"}
    assert own.step("a") == ([{"role": "user", "content": "on"}], 1, False)
    own.close()
