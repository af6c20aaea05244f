"""pass@k by enumeration, and an evaluation against its own rollout: which answers count, and for what."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.pass_rate import Evaluator, pass_at_k
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.tiny_rollout import LENGTHS, PROMPTS, UIDS

SAMPLES, BOUND = 3, 3


def graded(prompt, answer, gold, row):
    """From 0 to 1.5: right answers, half right ones, and some that are worth more than a right one."""
    return sum(letter in "abcdefghij" for letter in answer) / 2


TASK = tasks.Task(
    name="letters",
    prompt_length=PROMPTS.shape[1],
    answer_length=BOUND,
    tokenizer=tasks.CharTokenizer("abcdefghijklmn"),
    sample=lambda rng: ("i", "ab"),
    verify=graded,
    verify_truncated=True,
)
BATCH = tasks.Prompts(
    uid=UIDS,
    draw=UIDS,
    tokens=PROMPTS,
    lengths=LENGTHS,
    prompt=[f"prompt {n}" for n in range(4)],
    answer=["ab"] * 4,
    row=[{}] * 4,
)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(k):
    """Of 4 answers, every choice of k without replacement."""
    shares = []
    for correct in range(5):
        draws = itertools.combinations([place < correct for place in range(4)], k)
        shares.append(np.mean([any(draw) for draw in draws]))
        assert pass_at_k([correct], 4, k) == pytest.approx(shares[-1])
    assert pass_at_k(range(5), 4, k) == pytest.approx(np.mean(shares))


def test_an_evaluation_counts_the_drawn_answers_and_the_greedy_one_apart(model, params):
    """Right is a reward of at least `solved`, 1 here; the mean reward is that of the drawn answers."""
    evaluator = Evaluator(model, TASK, BATCH, SAMPLES, BOUND)
    engine = Engine(model, Sampling(greedy_last=True), SAMPLES + 1, BOUND, (1,), record_routing=False)
    out = engine.generate(params, PROMPTS, LENGTHS, UIDS.astype(np.uint32), jax.random.key(0))
    tokens, mask = np.asarray(out.tokens), np.asarray(out.loss_mask)
    texts = np.array([TASK.tokenizer.decode(row[kept].tolist()) for row, kept in zip(tokens, mask, strict=True)])
    texts = texts.reshape(4, SAMPLES + 1)
    rewards = np.vectorize(lambda text: 0.0 if tasks.UNKNOWN in text else graded("", text, "", {}))(texts)
    drawn, greedy = rewards[:, :SAMPLES], rewards[:, SAMPLES]
    # Otherwise a mistake would not show: half right answers, and columns that differ.
    assert ((drawn > 0) & (drawn < 1)).any()
    assert (rewards[:, 1:] != rewards[:, :-1]).any()

    rates, rows = evaluator(params)
    assert rates == pytest.approx(
        {
            "eval/greedy": (greedy >= 1).mean(),
            "eval/greedy_reward": greedy.mean(),
            "eval/reward": drawn.mean(),
            "eval/pass_at_1": (drawn >= 1).mean(),
            "eval/pass_at_k": (drawn >= 1).any(1).mean(),
            "eval/k": SAMPLES,
        }
    )
    assert evaluator.pass_rate(params) == pytest.approx((drawn >= 1).mean())
    for i, row in enumerate(rows):
        assert row["prompt"] == f"prompt {i}"
        assert [*row["sampled"], row["greedy"]] == texts[i].tolist()
        assert [*row["sampled_reward"], row["reward"]] == rewards[i].tolist()
        assert "rewards" not in row


def test_an_evaluation_has_every_reward_function_by_its_name(model, params):
    """What is right stays the verifier's to say."""
    task = dataclasses.replace(TASK, functions={"long": (lambda prompt, answer, gold, row: len(answer), False)})
    rates, rows = Evaluator(model, task, BATCH, SAMPLES, BOUND)(params)
    plain, _ = Evaluator(model, TASK, BATCH, SAMPLES, BOUND)(params)
    drawn = [[seen(text) for text in row["sampled"]] for row in rows]
    assert rates == plain | {"eval/reward_long": pytest.approx(np.mean(drawn))}
    assert np.std(drawn) > 0
    assert [row["sampled_rewards"] for row in rows] == [{"long": lengths} for lengths in drawn]
    assert [row["rewards"] for row in rows] == [{"long": seen(row["greedy"])} for row in rows]


def seen(text):
    return 0.0 if tasks.UNKNOWN in text else float(len(text))


def test_an_evaluation_samples_as_it_is_told(model, params):
    """From the one most probable token every drawn answer is the greedy one, which at temperature 1 it is not."""
    one = Evaluator(model, TASK, BATCH, SAMPLES, BOUND, sampling=Sampling(top_k=1, greedy_last=True))(params)[1]
    whole = Evaluator(model, TASK, BATCH, SAMPLES, BOUND)(params)[1]
    assert all(row["sampled"] == [row["greedy"]] * SAMPLES for row in one)
    assert [row["greedy"] for row in one] == [row["greedy"] for row in whole]
    assert any(row["sampled"] != [row["greedy"]] * SAMPLES for row in whole)


@pytest.mark.parametrize(
    ("shape", "prompts", "slots"), [((1, 1, 1, 1), 4, 5), ((3, 1, 1, 1), 6, 6), ((2, 1, 1, 1), 4, 6)]
)
def test_the_devices_divide_what_they_evaluate(monkeypatch, model, shape, prompts, slots):
    """Four prompts with four answers each, in at most five slots: on three devices two prompts more, which do not
    count, and one slot more."""
    seen = []

    def generate(engine, params, tokens, lengths, uids, key):
        seen.append((len(tokens), len(lengths), engine.slots))
        answers = np.repeat(tokens[:, :1], engine.group_size, axis=0)
        mask = np.ones_like(answers, bool)
        arrays = (answers, mask.astype(np.int32), mask, answers.astype(np.float32), np.zeros(len(answers), bool))
        return Rollout(*map(jax.numpy.asarray, arrays))

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(Engine, "prepare", lambda engine, params: params)
    spread = dataclasses.replace(model, mesh=sharding.make_mesh(shape))
    rates, rows = Evaluator(spread, TASK, BATCH, SAMPLES, BOUND, slots=5)({})
    assert seen == [(prompts, prompts, slots)]
    assert [row["prompt"] for row in rows] == BATCH["prompt"]
    assert [row["greedy"] for row in rows] == [TASK.tokenizer.decode([first]) for first in PROMPTS[:, 0].tolist()]
    assert rates["eval/greedy_reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
