"""Episodes of several turns: what was sampled stays as it was, and one forward over an episode finds the same."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.models import Model, is_recorded, score
from jaxrl_llm.rollout import episode_slots
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episodes import converse, heard_again, play
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Step
from tests.reference.tiny_environments import Counting, Misbehaving, Once
from tests.reference.tiny_rollout import tiny

LETTERS = tasks.CharTokenizer("abcdefghijklmn")  # 16 ids with those of padding and the end
PROMPTS = ("abc", "d", "efghi")


def task(environment=Counting, **fields):
    fields = {"turns": 3, "observation_length": 2, "tokenizer": LETTERS, "answer_length": 4} | fields
    return Task(name="turns", prompt_length=6, sample=lambda rng: ("a", "b"), environment=environment, **fields)


def prompts(own, texts=PROMPTS, rows=None):
    ids = [own.ids_of_prompt(text) for text in texts]
    tokens = np.zeros((len(ids), own.prompt_length), np.int32)
    for row, one in zip(tokens, ids, strict=True):
        row[: len(one)] = one
    count = np.arange(len(ids))
    lengths = np.array([len(one) for one in ids], np.int32)
    rows = rows or [{} for _ in ids]
    return tasks.Prompts(
        uid=count, draw=count + 7, tokens=tokens, lengths=lengths, prompt=[*texts], answer=[*texts], row=rows
    )


def engine(model, **fields):
    fields = {"sampling": Sampling(), "group_size": 2, "max_new_tokens": 4, "end_ids": (1,)} | fields
    return Engine(model, **fields)


def sampled(own_engine, own, seed=0):
    params = own_engine.model.init(jax.random.key(0))
    weights, _ = own_engine.take_weights(params)
    return params, played(own_engine, weights, own, jax.random.key(seed))


def played(own_engine, weights, own, key):
    """The rollout and its episodes."""
    rollout, table = play(own_engine, weights, own, prompts(own), key)
    return SimpleNamespace(rollout=rollout, episodes=table.episodes)


def assert_scored_alike(model, params, played, tolerance):
    """One forward over whole episodes gives the sampler's log-probs and its experts, every fed token's of them."""
    rollout = played.rollout
    again = score(model, params, rollout.tokens, rollout.segment_ids, mask=rollout.loss_mask, rows="padded")
    mask = np.asarray(rollout.loss_mask)
    ours, theirs = (np.asarray(x)[mask] for x in (again.logprobs, rollout.sampler_logprobs))
    np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=0)
    recorded = np.asarray(is_recorded(rollout.routes.sampled.experts))
    lengths = np.asarray(rollout.segment_ids).sum(1)
    fed = np.arange(mask.shape[1])[None] < lengths[:, None] - 1
    np.testing.assert_array_equal(recorded, np.broadcast_to(fed, recorded.shape))
    experts = [np.sort(np.asarray(x.experts))[recorded] for x in (again.routing, rollout.routes.sampled)]
    np.testing.assert_array_equal(*experts)


def assert_is_what_was_said(own, played, texts=PROMPTS):
    """Prompt, answers with their ends and observations stand in a row; only answers are in the mask."""
    group = len(played.episodes) // len(texts)
    for i, episode in enumerate(played.episodes):
        tokens, mask = (np.asarray(x[i]) for x in (played.rollout.tokens, played.rollout.loss_mask))
        length = int(np.asarray(played.rollout.segment_ids[i]).sum())
        assert tokens[:length].tolist() == episode.context
        assert mask.sum() == sum(map(len, episode.places))
        if tasks.UNKNOWN in "".join(answer for answer, _ in episode.turns):
            continue  # padding, which an untrained model samples too
        expected, learnt = own.ids_of_prompt(texts[i // group]), []
        learnt += [False] * len(expected)
        for k, (answer, step) in enumerate(episode.turns):
            ids = own.tokenizer.encode(answer)
            last = k == len(episode.turns) - 1
            more = [] if last else own.tokenizer.encode(step.observation)
            if len(ids) < own.answer_length:
                ids.append(1)
            elif not last:
                more = [1, *more]  # nobody sampled this end
            expected, learnt = expected + ids + more, learnt + [True] * len(ids) + [False] * len(more)
        assert tokens[:length].tolist() == expected
        assert mask[:length].tolist() == learnt


def test_an_episode_scored_in_one_forward_is_the_sampler():
    model, own = Model(tiny()), task(verify_truncated=True)
    params, played = sampled(engine(model), own)
    assert_scored_alike(model, params, played, 1e-5)
    assert_is_what_was_said(own, played)
    assert max(len(one.turns) for one in played.episodes) == 3
    assert len({sum(map(len, one.places)) for one in played.episodes}) > 1


def test_an_environment_that_hears_the_answers_again_ends_episodes_as_it_did():
    own = task(verify_truncated=True)
    _, played = sampled(engine(Model(tiny())), own)
    again, table = heard_again(played.rollout, engine(Model(tiny())), own, prompts(own))
    assert table.episodes == played.episodes
    np.testing.assert_array_equal(again.truncated, played.rollout.truncated)


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "tolerance"), [("fast", 1e-5), ("exact", 0)])
@pytest.mark.parametrize(("slots", "fed"), [(0, 128), (0, 1), (4, 128)])
def test_every_answer_is_the_engines_own_to_its_context(monkeypatch, numerics, tolerance, slots, fed):
    """A cache that stays in its slot and one that is prefilled again sample alike, whatever slot it is."""
    monkeypatch.setattr(episode_slots, "_FED", fed)
    model, own = Model(tiny(numerics=numerics, experts_implementation="auto")), task(verify_truncated=True)
    own = dataclasses.replace(own, observation_length=3)
    alone = engine(model, group_size=1)
    params, played = sampled(engine(model, slots=slots), own)
    tokens, learnt = (np.asarray(x) for x in (played.rollout.tokens, played.rollout.loss_mask))
    width = tokens.shape[1] - 4
    for turn in (1, 2):
        on = [i for i, one in enumerate(played.episodes) if len(one.turns) > turn]
        starts = [played.episodes[i].places[turn - 1].stop for i in on]
        starts = [start + int(learnt[i, start:].argmax()) for i, start in zip(on, starts, strict=True)]
        given = np.where(np.arange(width)[None] < np.array(starts)[:, None], tokens[on, :width], 0)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2**32 - 1), turn)
        numbers = np.array([(7 + i // 2) * 2 + i % 2 for i in on], np.uint32)
        out = alone.generate(params, given, np.array(starts, np.int32), numbers, key)
        mask = np.asarray(out.loss_mask)
        np.testing.assert_array_equal(np.asarray(out.tokens)[mask], tokens[on][mask])
        ours = np.asarray(played.rollout.sampler_logprobs)[on][mask]
        np.testing.assert_allclose(ours, np.asarray(out.sampler_logprobs)[mask], atol=tolerance, rtol=0)
    assert len(on) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "fields", [{"slots": 2}, {"prompt_buckets": 3}, {"record_kept": True, "sampling": Sampling(top_k=5)}]
)
def test_slots_buckets_and_cuts_keep_the_record(seed, fields):
    model, own = Model(tiny()), task(verify_truncated=True)
    cut = engine(model, **fields)
    params, played = sampled(cut, own, seed)
    assert_is_what_was_said(own, played)
    if cut.record_kept:
        assert (np.asarray(played.rollout.kept)[..., 0] >= 0).tolist() == np.asarray(played.rollout.loss_mask).tolist()
        return
    assert_scored_alike(model, params, played, 1e-5)
    whole = sampled(engine(model), own, seed)[1]
    np.testing.assert_array_equal(played.rollout.tokens, whole.rollout.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("fed", [128, 1])
def test_a_state_waits_with_its_episode(monkeypatch, fed):
    """Layers of linear attention, whose state no token may reach twice; observations fed one by one, and prefilled."""
    monkeypatch.setattr(episode_slots, "_FED", fed)
    sizes = dict.fromkeys(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), 2)
    sizes = {f"linear_{name}": size for name, size in sizes.items()}
    model = Model(tiny(layer_types=("linear_attention", "full_attention"), **sizes))
    params, played = sampled(engine(model, slots=4), task())
    assert_scored_alike(model, params, played, 1e-5)


@pytest.mark.slow
def test_exact_numerics_keep_every_bit_over_turns():
    model = Model(tiny(numerics="exact", experts_implementation="auto"))
    params, played = sampled(engine(model), task(verify_truncated=True))
    assert_scored_alike(model, params, played, 0)


def test_one_turn_is_a_rollout_of_single_answers():
    model, own = Model(tiny()), task(Once, turns=1)
    alone = engine(model)
    params, played = sampled(alone, own)
    batch = prompts(own)
    given = batch["tokens"], batch["lengths"], batch["draw"].astype(np.uint32)
    single = alone.generate(params, *given, jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(played.rollout), jax.tree.leaves(single), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Scripted:
    """A policy whose answers are written down: say[i] is the answers of episode i, turn by turn."""

    def __init__(self, say):
        self.left, self.asked = [[*one] for one in say], []

    def answered(self, wanted):
        self.asked.append(list(wanted.values()))
        return {i: encoded(self.left[i].pop(0)) for i in wanted}


def encoded(text):
    """Its ids and the end; without the end where the text ends with '...'."""
    ids = LETTERS.encode(text.removesuffix("..."))
    return ids if text.endswith("...") else [*ids, 1]


def scripted(own, *say, rows=None, texts=None):
    texts, told = texts or ["a"] * len(say), Scripted(say)
    one = engine(Model(tiny()), group_size=1, max_new_tokens=own.answer_length)
    return told, converse(told.answered, one, own, prompts(own, texts, rows))


def test_what_goes_back_is_what_was_sampled_and_an_observation_once():
    told, played = scripted(task(), ["b", "cd", "e"])
    a, b, c, d, end = (*LETTERS.encode("abcd"), 1)
    first, second = LETTERS.encode("b"), LETTERS.encode("c")  # Counting says how many answers it heard
    assert told.asked == [[[a]], [[a, b, end, *first]], [[a, b, end, *first, c, d, end, *second]], []]
    said = [("b", "b"), ("cd", "c"), ("e", "d")]
    assert played.episodes[0].turns == [(answer, Step(heard, 1.0, False)) for answer, heard in said]
    assert played.episodes[0].dialogue == "b\n> b\ncd\n> c\ne"
    assert played.earlier_rewards(1.0, 22)[0].tolist() == [0, 0, 1, 0, 0, 0, 1, *[0] * 15]  # 'e' ends the last turn
    assert played.episodes[0].cut  # the environment would have gone on


def test_rewards_are_discounted_by_turns():
    """SkyRL's and verl-agent's return of an episode: 1 + gamma + gamma^2."""
    _, played = scripted(task(), ["b", "cd", "e"])
    assert played.episodes[0].rewards(0.5) == [1, 0.5, 0.25]
    assert played.judged(0.5)[1]["verifier"].tolist() == [1.75]
    assert played.earlier_rewards(0.5, 22)[0].tolist() == [0, 0, 1, 0, 0, 0, 0.5, *[0] * 15]


@pytest.mark.parametrize(
    ("answers", "fields", "reward", "error", "cut"),
    [
        (["b", "aa"], {}, 1.0, "", False),  # the environment is done after 'aa', which earns nothing
        (["bbbb..."], {}, 0.0, "", True),  # cut off by its bound: nobody sees it
        (["bbbb...", "aa"], {"verify_truncated": True, "observation_length": 3}, 1.0, "", False),
        (["bbbb..."], {"verify_truncated": True, "observation_length": 1}, 0.0, "2 tokens, over observation_l", False),
        (["b", "b"], {"episode_length": 10}, 2.0, "", True),  # a third answer might not fit
        (["g"], {"environment": Misbehaving}, 0.0, "KeyError: 'no such thing'", False),
    ],
)
def test_how_an_episode_ends(answers, fields, reward, error, cut):
    _, played = scripted(task(**fields), answers)
    (one,) = played.episodes
    assert (one.reward, one.cut) == (reward, cut)
    assert error in one.error
    assert bool(one.error) == bool(error)
    _, rewards, errors = played.judged()
    assert rewards["verifier"].tolist() == [reward]
    assert errors == ([{"verifier": one.error}] if error else [{}])


def test_one_episode_fails_and_the_others_go_on():
    """Each of these answers is of an episode of its own: docs/environments.md lists what is counted."""
    said = {
        "a": "timeout",
        "b": "the worker died",
        "c": "ValueError: step returned the observation None",
        "d": "100000 tokens, over observation_length=2",
        "e": "ValueError: step returned the reward nan",
        "f": "ValueError: step returned 'no tuple'",
        "g": "KeyError: 'no such thing'",
        "h": "MemoryError",
        "i": "",
    }
    own = task(Misbehaving, isolated=True, time_limit=0.7)
    _, played = scripted(own, *([one, "i", "i"] if one == "i" else [one] for one in said))
    for episode, (answer, error) in zip(played.episodes, said.items(), strict=True):
        assert error in episode.error, answer
        assert bool(episode.error) == bool(error)
        assert episode.reward == (0.0 if error else 1.5)
