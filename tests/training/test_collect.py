"""Rewards, length shaping and dynamic sampling, on answers written by hand instead of sampled."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from jaxrl_llm import objectives, tasks
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.verification import verify
from jaxrl_llm.training.collect import DynamicSampling, judged, mixed, verifying
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RewardConfig, RolloutStream
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.tasks import verifiers_for_tests

GROUP, PROMPTS, BOUND = 2, 3, 4
OFF = DynamicSampling(1)
TASK = tasks.Task(
    name="ones",
    prompt_length=2,
    answer_length=BOUND,
    tokenizer=tasks.CharTokenizer("0123456789="),
    sample=lambda rng: ("0=", "1"),
    verify=lambda prompt, answer, gold, row: {"1": 1.0, "11": 0.5}.get(answer, 0.0),
)


def weighting(**changes):
    return RewardConfig(**base.get_config().rewards.to_dict() | changes)


PLAIN = weighting()


class Prompts:
    """Batches of three prompts; prompt number n of the stream reads "n=". Its uid in the data is another number."""

    def __init__(self):
        self.batches = 0

    def __iter__(self):
        return self

    def __next__(self):
        draw = np.arange(self.batches * PROMPTS, (self.batches + 1) * PROMPTS)
        self.batches += 1
        text = [f"{n % 10}=" for n in draw]
        tokens = np.array([TASK.tokenizer.encode(t) for t in text], np.int32)
        lengths = np.full(PROMPTS, 2, np.int32)
        return tasks.Prompts(
            uid=draw[::-1],
            draw=draw,
            tokens=tokens,
            lengths=lengths,
            prompt=text,
            answer=["1"] * PROMPTS,
            row=[{}] * PROMPTS,
        )

    def get_state(self):
        return {"batches": self.batches}

    def set_state(self, state):
        self.batches = state["batches"]


@dataclasses.dataclass(frozen=True)
class Script(Engine):
    """Answers by prompt number; four characters are cut off before EOS. Routing and log-probs carry the number."""

    answers: tuple[tuple[str, str], ...] = ()

    def generate(self, params, prompts, lengths, uids, key, limits=None):
        rows = [(int(uid), text) for uid in uids for text in self.answers[int(uid)]]
        b, t = len(rows), 2 + BOUND
        tokens, mask = np.zeros((b, t), np.int32), np.zeros((b, t), bool)
        for i, (_, text) in enumerate(rows):
            ids = [*TASK.tokenizer.encode(text), TASK.tokenizer.end_ids[0]][:BOUND]
            tokens[i, :2] = prompts[i // GROUP]
            tokens[i, 2 : 2 + len(ids)], mask[i, 2 : 2 + len(ids)] = ids, True
        number = np.array([uid for uid, _ in rows])
        return Rollout(
            tokens=jnp.asarray(tokens),
            segment_ids=jnp.asarray((mask | (np.arange(t) < 2)).astype(np.int32)),
            loss_mask=jnp.asarray(mask),
            sampler_logprobs=jnp.asarray(np.where(mask, -number[:, None] - 1.0, 0), jnp.float32),
            truncated=jnp.asarray([len(text) >= BOUND for _, text in rows]),
            routes=Routes(Routing(jnp.asarray(np.broadcast_to(number[None, :, None, None], (1, b, t, 2)), jnp.uint8))),
        )


ALIKE, MIXED, WRONG = ("1", "1"), ("1", "0"), ("0", "000")


def scripted(answers, batch=None):
    engine = Script(tiny.make_model(), Sampling(), GROUP, BOUND, 1, answers=tuple(answers))
    batch = next(Prompts()) if batch is None else batch
    return engine.generate({}, batch["tokens"], batch["lengths"], batch["draw"], None)


def drawn(answers, stream, task):
    batch = next(stream)
    return verifying(scripted(answers, batch), batch, task, GROUP, {})


def run(answers, sampling=OFF, rewards=PLAIN, samples=0, task=TASK, scores=None):
    stream, most = Prompts(), sampling.max_draws
    draw = functools.partial(drawn, answers, stream, task)
    found = draw() if most == 1 else mixed(draw, most, rewards, BOUND)
    found = dataclasses.replace(found, rollout=rewards.filtered(found.rollout))
    return judged(found, rewards, BOUND, samples, scores), stream


def prompts_of(found):
    return [TASK.tokenizer.decode(row[:2].tolist()) for row in np.asarray(found.rollout.tokens)]


def test_without_dynamic_sampling_every_group_stays():
    found, stream = run([ALIKE, MIXED, WRONG])
    assert stream.batches == 1
    np.testing.assert_array_equal(found.rollout.rewards, [1, 1, 1, 0, 0, 0])
    assert found.tokens == 2 + 2 + 2 + 2 + 2 + 4
    assert found.host == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/zero_advantage_groups": pytest.approx(2 / 3),
        "reward/verifier_timeouts": 0.0,
        "reward/verifier_errors": 0.0,
        "rollout/length_mean": pytest.approx(14 / 6),
        "rollout/truncated": 0.0,
        "rollout/groups_generated": 3.0,
        "rollout/groups_kept": 3.0,
    }


def test_mixed_groups_are_kept_in_draw_order():
    """Two of three batches would do; the third prompt of the last batch is surplus and dropped, but counted."""
    answers = [ALIKE, MIXED, WRONG, MIXED, ALIKE, ALIKE, ("0", "1"), MIXED, MIXED]
    found, stream = run(answers, DynamicSampling(5))
    assert stream.batches == 3
    assert prompts_of(found) == ["1=", "1=", "3=", "3=", "6=", "6="]
    np.testing.assert_array_equal(found.rollout.rewards, [1, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(found.rollout.routes.sampled.experts[0, :, 0, 0], [1, 1, 3, 3, 6, 6])
    np.testing.assert_array_equal(found.rollout.sampler_logprobs[:, 2], [-2, -2, -4, -4, -7, -7])
    assert found.rollout.loss_mask.any(1).all()
    assert found.host["rollout/groups_generated"] == 9
    assert found.host["rollout/groups_kept"] == 3
    # Every generated answer, the dropped ones too: three groups of two ones, five mixed, one of zeros.
    assert found.host["reward/mean"] == pytest.approx((3 * 2 + 5) / 18)
    assert found.host["reward/zero_advantage_groups"] == pytest.approx(4 / 9)
    assert found.tokens == 17 * 2 + 4


def test_every_step_samples_with_its_own_key():
    """fold_in(run key, step), whatever the stream; and says how many steps trained the policy."""
    keys, versions = [], []

    class Noting(Script):
        def take_weights(self, params, version=0):
            versions.append(version)
            return params, {}

        def generate(self, params, prompts, lengths, uids, key, limits=None):
            keys.append(tuple(jax.random.key_data(key).tolist()))
            return super().generate(params, prompts, lengths, uids, key)

    engine = Noting(tiny.make_model(), Sampling(), GROUP, BOUND, 1, answers=(MIXED,) * 12)
    learner = Learner(engine.model, objectives.make("grpo"), optax.sgd(1.0))
    scorer, state = Scorer(learner, ReplayConfig(), GROUP), make_state(engine.model, {}, learner.optimizer)
    for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1)):
        source = Rollouts(engine, scorer, TASK, None, seed, PROMPTS, tiny.UPDATES, OFF, PLAIN)
        source.sample(RolloutStream(Prompts()), step, state)
    assert len(set(keys)) == 3
    assert keys[3] == keys[0]
    assert versions == [0, 1, 0, 0]


def test_a_stream_goes_on_with_what_its_rewards_carry():
    """The place in the data, the steered coefficient and the centre: all three are in the checkpoint alone."""
    before, after = RolloutStream(Prompts(), kl_coef=0.1), RolloutStream(Prompts(), kl_coef=0.1)
    next(before)
    before.kl_coef = 0.05
    before.centred(jnp.array([1.0, 2.0]))
    after.set_state(json.loads(json.dumps(before.get_state())))
    np.testing.assert_array_equal(next(after)["draw"], np.arange(PROMPTS, 2 * PROMPTS))
    assert after.kl_coef == 0.05
    np.testing.assert_array_equal(after.centred(jnp.array([4.0, 6.0])), [2.5, 4.5])


def test_the_bound_leaves_groups_without_a_loss():
    """Shapes do not change, the stream stands behind the last draw, and a full batch stops at once."""
    found, stream = run([ALIKE, ALIKE, MIXED, ALIKE, ALIKE, WRONG], DynamicSampling(2))
    assert stream.batches == 2
    assert found.rollout.tokens.shape == (PROMPTS * GROUP, 2 + BOUND)
    np.testing.assert_array_equal(found.rollout.loss_mask.any(1), [True] * 2 + [False] * 4)
    # A kept group is nowhere else: routing is counted on answers without a loss too.
    assert prompts_of(found) == ["2=", "2=", "0=", "0=", "1=", "1="]
    np.testing.assert_array_equal(found.rollout.routes.sampled.experts[0, :, 0, 0], [2, 2, 0, 0, 1, 1])
    assert found.host["rollout/groups_kept"] == 1
    assert run([MIXED] * 3, DynamicSampling(9))[1].batches == 1


def test_no_group_at_all_is_a_rollout_without_a_loss():
    found, _ = run([ALIKE, WRONG, ALIKE] * 2, DynamicSampling(2))
    assert not found.rollout.loss_mask.any()
    assert found.host["rollout/groups_kept"] == 0


def test_length_does_not_make_a_group_worth_keeping():
    """All wrong with unequal lengths: unlike rewards after shaping, alike before."""
    shaping = weighting(overlong_cache=4)
    found, _ = run([WRONG, MIXED, MIXED, MIXED, ALIKE, ALIKE], DynamicSampling(2), shaping)
    assert prompts_of(found) == ["1=", "1=", "2=", "2=", "3=", "3="]


def test_the_ramp_counts_tokens_with_eos():
    """Bound 4, ramp 2: answers of 2, 3 and 4 tokens lose 0, 1/2 and 1. Metrics speak of the task's own rewards."""
    found, _ = run([("1", "11"), ("000", "0"), ("0000", "00")], rewards=weighting(overlong_cache=2))
    np.testing.assert_allclose(found.rollout.rewards, [1, 0.5 - 0.5, 0 - 1, 0, 0 - 1, 0 - 0.5])
    assert found.host["reward/mean"] == pytest.approx(1.5 / 6)


def test_rewards_are_the_weighted_sum_of_their_sources():
    """Lengths 2, 3 | 4, 2 | 4, 2 with EOS, verified 1, .5 | 0, 0 | 0, 1: weights 2, -1/4 a token, 1/2 of the model."""
    sources = weighting(
        verifier_weight=2.0, length_weight=-0.25, reward_model="runs/rm", reward_model_weight=0.5, overlong_cache=2
    )
    assert list(sources.weights) == ["verifier", "overlong", "length", "reward_model"]
    scores = jnp.asarray([1.0, 2, 3, 4, 5, 6])
    got, _ = run([("1", "11"), ("000", "0"), ("0000", "1")], rewards=sources, scores=scores)
    ramp, lengths, verified = [0, -0.5, -1, 0, -1, 0], [2, 3, 4, 2, 4, 2], [1, 0.5, 0, 0, 0, 1]
    expected = 2 * np.array(verified) + np.array(ramp) - 0.25 * np.array(lengths) + 0.5 * np.arange(1, 7)
    np.testing.assert_allclose(got.rollout.rewards, expected)
    assert finalize(got.metrics) == pytest.approx(
        {
            "reward/verifier": 2.5 / 6,
            "reward/verifier_weighted": 5 / 6,
            "reward/overlong": -2.5 / 6,
            "reward/overlong_weighted": -2.5 / 6,
            "reward/length": 17 / 6,
            "reward/length_weighted": -17 / 24,
            "reward/reward_model": 3.5,
            "reward/reward_model_weighted": 1.75,
            "reward/total": expected.mean(),
        }
    )


def test_an_answer_that_is_cut_off_costs_the_penalty():
    """As TRL's PPO: score - penalty where there is no EOS; an answer that ends at the bound has one."""
    got, _ = run([("1111", "111"), MIXED, MIXED], rewards=weighting(missing_eos_penalty=0.75))
    plain, _ = run([("1111", "111"), MIXED, MIXED])
    np.testing.assert_allclose(got.rollout.rewards, np.asarray(plain.rollout.rewards) - [0.75, *[0.0] * 5])
    assert finalize(got.metrics)["reward/missing_eos"] == pytest.approx(-1 / 6)


def test_one_source_is_its_own_reward():
    """The default: the verifier's rewards bit for bit."""
    graded = dataclasses.replace(TASK, verify=lambda prompt, answer, gold, row: len(answer) / 3)
    got, _ = run([("1", "111"), MIXED, MIXED], task=graded)
    np.testing.assert_array_equal(got.rollout.rewards, np.asarray([1 / 3, 1, *[1 / 3] * 4], np.float32))
    assert PLAIN.weights == {"verifier": 1.0}


def test_sources_follow_the_groups_that_are_kept():
    """Dynamic sampling picks groups by the verifier; the metrics of the sources leave out groups that fill a place."""
    answers = [WRONG, MIXED, ALIKE, ALIKE, ("11", "0"), WRONG]
    got, _ = run(answers, DynamicSampling(2), weighting(length_weight=1.0))
    np.testing.assert_array_equal(got.rollout.rewards[:4], [1 + 2, 0 + 2, 0.5 + 3, 0 + 2])
    assert finalize(got.metrics)["reward/length"] == pytest.approx((2 + 2 + 3 + 2) / 4)
    assert finalize(got.metrics)["reward/verifier"] == pytest.approx(1.5 / 4)
    assert got.host["reward/mean"] == pytest.approx((0 + 1 + 2 + 2 + 0.5 + 0) / 12)


def test_answers_cut_off_are_wrong_and_may_leave_the_loss():
    """They stay in the group's mean and deviation: only the mask changes."""
    answers = [("1111", "1"), MIXED, MIXED]
    plain, _ = run(answers)
    filtered, _ = run(answers, rewards=weighting(overlong_filter=True))
    assert plain.rollout.loss_mask[0].sum() == BOUND
    np.testing.assert_array_equal(filtered.rollout.loss_mask.any(1), [False] + [True] * 5)
    np.testing.assert_array_equal(filtered.rollout.rewards, plain.rollout.rewards)
    assert float(plain.rollout.rewards[0]) == 0
    assert plain.host["rollout/truncated"] == pytest.approx(1 / 6)


def test_samples_are_rows_for_a_person():
    found, _ = run([MIXED, ALIKE, ("11", "1111")], samples=3)
    assert found.samples == [
        {"prompt": "0=", "answer": "1", "reward": 1.0, "length": 2},
        {"prompt": "0=", "answer": "0", "reward": 0.0, "length": 2},
        {"prompt": "1=", "answer": "1", "reward": 1.0, "length": 2},
    ]
    assert len(run([MIXED] * 3, samples=99)[0].samples) == 6
    assert run([MIXED] * 3, samples=0)[0].samples == []
    over_draws = run([ALIKE] * 3 + [MIXED] * 3, DynamicSampling(2), samples=8)[0].samples
    assert [row["prompt"] for row in over_draws] == ["0=", "0=", "1=", "1=", "2=", "2=", "3=", "3="]


def test_a_reward_may_be_any_finite_number():
    graded = dataclasses.replace(TASK, verify=lambda prompt, answer, gold, row: 10.0 * len(answer) - 25.0)
    got, _ = run([("1", "111"), MIXED, MIXED], task=graded)
    np.testing.assert_array_equal(got.rollout.rewards, [-15, 5, -15, -15, -15, -15])


def test_the_verifier_gets_gold_and_row():
    seen = []
    task = dataclasses.replace(TASK, verify=lambda *given: float(len(seen.append(given) or seen)))
    run([("1", "0"), ALIKE, ALIKE], task=task)
    assert seen[:3] == [("0=", "1", "1", {}), ("0=", "0", "1", {}), ("1=", "1", "1", {})]


def test_a_verifier_that_fails_is_a_counted_zero_with_its_answer_saved():
    def verify(prompt, answer, gold, row):
        return {"1": 1.0, "0": float("nan")}[answer]  # "11" raises

    got, _ = run([("1", "11"), ("1", "0"), ALIKE], task=dataclasses.replace(TASK, verify=verify), samples=1)
    np.testing.assert_array_equal(got.rollout.rewards, [1, 0, 1, 0, 1, 1])
    assert (got.host["reward/verifier_errors"], got.host["reward/verifier_timeouts"]) == (2, 0)
    assert [(row["answer"], row.get("verifier_error")) for row in got.samples] == [
        ("1", None),
        ("11", "KeyError: '11'"),
        ("0", "ValueError: the reward nan is not finite; return a finite number"),
    ]


def test_answers_that_no_verifier_sees():
    """Cut off by the bound, unless the task verifies those; an id that the tokenizer does not know, always."""
    lenient = dataclasses.replace(TASK, verify=lambda prompt, answer, gold, row: 7.0)
    answers = [("1111", "1"), MIXED, MIXED]
    assert run(answers, task=lenient)[0].rollout.rewards[0] == 0
    whole = dataclasses.replace(lenient, verify_truncated=True)
    assert run(answers, task=whole)[0].rollout.rewards[0] == 7
    small = dataclasses.replace(whole, tokenizer=tasks.CharTokenizer("0"))  # "1" decodes to U+FFFD
    np.testing.assert_array_equal(
        verify(scripted(answers), small, next(Prompts()), GROUP)[1]["verifier"], [0, 0, 0, 7, 0, 7]
    )


def test_verification_goes_on_while_the_rollout_is_scored():
    task = dataclasses.replace(TASK, verify=verifiers_for_tests.troubled, isolated=True, time_limit=1.0)
    draw = drawn((MIXED,) * 3, Prompts(), task)
    assert draw.rollout.rewards is None
    np.testing.assert_array_equal(judged(draw, PLAIN, BOUND).rollout.rewards, [2.5] * 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicSampling(0), r"dynamic_sampling\.max_draws=0"),
        (lambda: weighting(overlong_cache=-1), r"rewards\.overlong_cache=-1"),
        (lambda: weighting(verifier_weight=0.0), r"rewards\.verifier_weight=0 leaves nothing to learn from"),
        (lambda: weighting(verifier_weight=0.0, reward_model="runs/rm", reward_model_weight=0.0), "leaves nothing"),
    ],
)
def test_bad_values_name_their_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()
