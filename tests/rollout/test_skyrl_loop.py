"""Episodes that SkyRL's own agent loop has played give the same tokens, masks and rewards here."""

import functools
import importlib.util
import json

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episodes import converse
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.environments.skyrl_gym_episodes import SkyRLEpisode
from jaxrl_llm.tasks.tokenizers.text_tokenizer import load_tokenizer
from tests.reference.published_tokenizers import PUBLISHED
from tests.reference.skyrl_loop import FILE
from tests.reference.tiny_rollout import tiny

LOOP = json.loads(FILE.read_text())


class Recorded:
    """Says what the environment said in SkyRL's loop."""

    def init(self, row):
        self.steps = iter(row["steps"])

    def step(self, answer):
        return tuple(next(self.steps))

    def close(self):
        pass


class Given:
    """Answers in ids, turn by turn."""

    def __init__(self, answers, end):
        self.answers, self.end = [iter(one) for one in answers], end

    def answered(self, wanted):
        return {i: [*next(self.answers[i]), self.end] for i in wanted}


def assert_equals_skyrl(folder, environment):
    tokenizer = load_tokenizer(PUBLISHED[LOOP["tokenizer"]].write(folder))
    episodes, prompting = LOOP["episodes"], tasks.Prompting(chat=True)
    own = tasks.Task("gsm", 64, 64, tokenizer, sample=lambda rng: ("a", "b"), environment=environment,
                     turns=LOOP["turns"], observation_length=256, prompting=prompting)  # fmt: skip
    tokens, count = np.zeros((len(episodes), own.prompt_length), np.int32), np.arange(len(episodes))
    asked, rows = [], []
    for i, one in enumerate(episodes):
        *earlier, last = one["row"]["prompt"]
        ids = prompting.ids(tokenizer, last["content"], earlier)
        assert ids == one["prompt_ids"]
        tokens[i, : len(ids)] = ids
        rest = {key: value for key, value in one["row"].items() if key not in ("prompt", "env_class")}
        asked.append(last["content"])
        rows.append({**rest, "earlier_messages": earlier, "steps": one["steps"]})
    lengths = np.array([len(one["prompt_ids"]) for one in episodes], np.int32)
    batch = tasks.Prompts(
        uid=count, draw=count, tokens=tokens, lengths=lengths, prompt=asked, answer=[""] * len(rows), row=rows
    )
    engine = Engine(Model(tiny()), sampling=Sampling(), group_size=1, max_new_tokens=64, end_ids=tokenizer.end_ids)
    table = converse(Given([one["answers"] for one in episodes], tokenizer.end_ids[0]).answered, engine, own, batch)
    for ours, one in zip(table.episodes, episodes, strict=True):
        begin = len(one["prompt_ids"])
        assert ours.error == ""
        assert ours.context == one["prompt_ids"] + one["response_ids"]
        rewards = np.zeros(len(ours.context))
        rewards[[place[-1] for place in ours.places]] = [step.reward for _, step in ours.turns]
        np.testing.assert_allclose(rewards[begin:], one["reward"], atol=1e-7)
        assert sum(map(len, ours.places)) == sum(one["loss_mask"])
        assert [i for i, ends in enumerate(one["loss_mask"]) if ends and not [*one["loss_mask"], 0][i + 1]] == [
            place[-1] - begin for place in ours.places
        ]


def test_the_episodes_of_skyrls_loop(tmp_path):
    assert_equals_skyrl(tmp_path, Recorded)


@pytest.mark.slow
def test_the_episodes_of_skyrls_loop_with_its_environment(tmp_path):
    if importlib.util.find_spec("skyrl_gym") is None:
        pytest.skip("needs skyrl_gym")
    assert_equals_skyrl(tmp_path, functools.partial(SkyRLEpisode, "gsm8k_multi_turn", {}, LOOP["turns"]))
