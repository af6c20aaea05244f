"""Rows that hold a group, its prompt once: the same scores and the same update as a row for every answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from jaxrl_llm import objectives
from jaxrl_llm.ground import machine, sharding
from jaxrl_llm.models import Model, scoring
from jaxrl_llm.models.attention import attend_blocks
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.indexing import put, take
from jaxrl_llm.training.layout import UpdateConfig, groups_of, lay_out
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny

GROUP, WIDEST, ANSWER = 3, 5, 4
TIME = WIDEST + ANSWER
STARTS = np.repeat([5, 2], GROUP)
LENGTHS = STARTS + np.array([4, 1, 3, 2, 2, 4])
COLUMN = np.arange(TIME)[None]
SEGMENTS = (LENGTHS[:, None] > COLUMN).astype(np.int32)
MASK = (STARTS[:, None] <= COLUMN) & (SEGMENTS > 0)
CONFIG = dataclasses.replace(tiny.CONFIG, num_experts=0, qk_norm="none", tie_word_embeddings=True)
MODEL = Model(CONFIG)
init = jax.jit(MODEL.init)


def updates(layout, micro=0, buckets=1):
    return UpdateConfig(1, micro_batch_rows=micro, layout=layout, length_buckets=buckets, shuffle="groups")


def cut(layout, micro=0, mask=MASK, buckets=1):
    return lay_out(
        np.arange(6), LENGTHS, TIME, updates(layout, micro, buckets), groups_of(mask, LENGTHS, GROUP, ANSWER)
    )


def tokens():
    drawn = np.random.default_rng(0).integers(1, 16, (6, TIME))
    for row in range(6):
        prompt = slice(0, STARTS[row])
        drawn[row, prompt] = drawn[row - row % GROUP, prompt]
    return jnp.asarray(np.where(SEGMENTS > 0, drawn, 0), jnp.int32)


def test_a_row_holds_the_prompt_and_then_every_answer():
    """By hand: prompts of 5 and 2 tokens, answers of 4, 1, 3 and of 2, 2, 4; room for 5 + 3 x 4 tokens."""
    layout = cut("shared")
    expected = [[1] * 5 + [2] * 4 + [3] + [4] * 3 + [0] * 4, [1] * 2 + [2] * 2 + [3] * 2 + [4] * 4 + [0] * 7]
    np.testing.assert_array_equal(layout.segment_ids[0], expected)
    first = [*range(9), 9 + 5, *range(18 + 5, 18 + 8), *[-1] * 4]
    np.testing.assert_array_equal(layout.index[0, 0], first)
    assert cut("shared", buckets=17).index.shape == (1, 2, 13)  # cut to the longest group
    assert cut("shared", micro=GROUP).index.shape == (2, 1, 17)


def test_a_masked_answer_starts_where_its_group_does():
    """A filtered answer has no mask of its own; in a group without any, the shortest row ends the prompt."""
    masked = MASK & ~np.isin(np.arange(6), [0, 3, 4, 5])[:, None]
    np.testing.assert_array_equal(groups_of(masked, LENGTHS, GROUP, ANSWER).starts, [5, 5, 5, 4, 4, 4])
    np.testing.assert_array_equal(cut("shared", mask=masked).index[0, 0], cut("shared").index[0, 0])


def test_scores_equal_those_of_padded_rows():
    params, ids, layout = init(jax.random.key(0)), tokens(), cut("shared")
    padded = jax.jit(lambda p: scoring.score(MODEL, p, ids, jnp.asarray(SEGMENTS)))(params)

    @jax.jit
    def shared(p):
        scores = scoring.score(MODEL, p, take(ids, layout, 0), jnp.asarray(layout.segment_ids[0]), rows="shared")
        return [put(jnp.zeros(ids.shape), x, layout, 0) for x in (scores.logprobs, scores.entropy)]

    for found, expected in zip(shared(params), (padded.logprobs, padded.entropy), strict=True):
        np.testing.assert_allclose(np.where(MASK, found, 0), np.where(MASK, expected, 0), atol=2e-5)
        np.testing.assert_allclose(found[::GROUP], expected[::GROUP], atol=2e-5)  # with their prompts


@functools.cache
def learner(name, shared):
    return Learner(MODEL, objectives.make(name), optax.sgd(1.0), rows="shared" if shared else "padded")


@pytest.mark.parametrize(
    ("name", "micro"),
    [
        pytest.param("dapo", 0, marks=pytest.mark.slow),
        ("gspo", GROUP),
        pytest.param("dapo", GROUP, marks=pytest.mark.slow),
        pytest.param("gspo", 0, marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_padded_rows(name, micro):
    """Token-level and sequence-level ratios around 1, one answer filtered, whole and in two micro-batches."""
    rng = np.random.default_rng(1)
    mask = MASK & (np.arange(6) != 0)[:, None]
    old = np.where(MASK, -2.7 + 0.3 * rng.normal(size=MASK.shape), 0)
    batch = Rollout(
        tokens=tokens(),
        segment_ids=jnp.asarray(SEGMENTS),
        loss_mask=jnp.asarray(mask),
        advantages=jnp.asarray(np.where(mask, rng.normal(size=(6, 1)), 0), jnp.float32),
        sampler_logprobs=jnp.asarray(old, jnp.float32),
        old_logprobs=jnp.asarray(old, jnp.float32),
    )

    def gradient(shared):
        own = learner(name, shared)
        state = make_state(MODEL, init(jax.random.key(0)), own.optimizer)
        before = jax.device_get(state.trained.policy)
        after, _ = own.update(state, batch, cut("shared" if shared else "padded", micro, mask))
        return jax.tree.map(np.subtract, before, jax.device_get(after.trained.policy))

    for found, expected in zip(*map(jax.tree.leaves, (gradient(True), gradient(False))), strict=True):
        assert np.abs(expected).max() > 1e-6
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max() + 1e-8)


def test_the_trainer_cuts_whole_groups():
    """Of the smoke run: 4 prompts of 4 tokens at most, 4 answers of 4 to each, two updates of two groups."""
    config = base.get_config("smoke")
    config.model.num_experts, config.updates.layout, config.updates.shuffle = 0, "shared", "groups"
    s = validate(config)
    lengths, time = np.full(16, 7), 8
    held = np.arange(time)[None] < lengths[:, None]
    answered = jnp.asarray(held & (np.arange(time) >= 4))
    segment_ids = jnp.asarray(held, jnp.int32)
    rollout = Rollout(segment_ids, segment_ids, answered)
    first, second = assembly.build(s).source.layouts(rollout, step=1)[0]
    assert first.index.shape == second.index.shape == (1, 2, time + 3 * s.answer_length)
    groups = [set(layout.index[layout.index >= 0] // time // 4) for layout in (first, second)]
    assert sorted(map(len, groups)) == [2, 2]
    assert groups[0] | groups[1] == {0, 1, 2, 3}
    assert (first.segment_ids[0, :, :16] == [1] * 4 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3).all()


@pytest.mark.slow
def test_a_long_row_is_attended_in_blocks(monkeypatch):
    """Two answers of 250 tokens to one prompt, on few cores; on many no block is left out."""
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 250, 250])[None])
    row = jnp.arange(ids.size)[None] % CONFIG.vocab_size
    params, calls, of_blocks = init(jax.random.key(0)), [], attend_blocks.attend_blocks

    def attend(*given):
        calls.append(given)
        return of_blocks(*given)

    monkeypatch.setattr("jaxrl_llm.models.attention.attend_blocks.attend_blocks", attend)
    found = []
    for cores in (2, 8):
        monkeypatch.setattr(machine, "usable_cores", lambda cores=cores: list(range(cores)))
        found.append(MODEL.apply(params, row, segment_ids=ids, rows="shared").hidden)
    assert len(calls) == 1  # layers of one kind are traced once
    np.testing.assert_allclose(*found, atol=2e-5)


def test_flash_attention_is_refused(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.models.kernels.choose_attention", lambda *_: "flash")
    with pytest.raises(ValueError, match=r"need plain attention; set model\.attention_implementation=plain"):
        MODEL.apply(init(jax.random.key(0)), tokens(), rows="shared")


def test_devices_that_share_a_row_refuse_it():
    model = Model(CONFIG, sharding.make_mesh((1, 1, 1, 1, 2)))
    with pytest.raises(ValueError, match=r"set the context axis, the fifth size of mesh.shape, to 1"):
        model.apply({}, tokens(), segment_ids=jnp.asarray(SEGMENTS), rows="shared")
