"""What leaves a rollout: decode equals teacher forcing, and an answer is its own whatever it was sampled beside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model
from jaxrl_llm.rollout import engine as engine_module
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.compilations import compilations
from tests.reference.slowly import first_quick
from tests.reference.tiny_rollout import LENGTHS, PROMPTS, UIDS, VOCABULARY, tiny
from tests.reference.truncated_sampling import truncated

GROUP, BOUND = 3, 9
ROWS = len(LENGTHS) * GROUP
START = np.repeat(LENGTHS, GROUP)
NEVER = VOCABULARY  # an EOS outside the vocabulary
NONE = 255


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, Sampling(temperature=0.7), GROUP, BOUND, end_ids=(NEVER,))


@pytest.fixture(scope="module")
def free(engine, sample):
    """Answers that never see an EOS."""
    return sample(engine)


@pytest.fixture(scope="module")
def eos(free):
    """A token that is first in one answer, later in others and absent from some."""
    answers = [row[s : s + BOUND] for row, s in zip(free.tokens, START, strict=True)]
    for token in range(VOCABULARY):
        found = [np.flatnonzero(a == token) for a in answers]
        first = [f[0] if len(f) else None for f in found]
        if {0, None} < set(first):
            return token
    raise AssertionError("no token fits: choose another key")


@pytest.fixture(scope="module")
def ended(engine, eos, sample):
    return sample(dataclasses.replace(engine, end_ids=(eos,)))


def forward(model, params, trajectory):
    out = jax.jit(lambda p, t, s: model.apply(p, t, segment_ids=s))(params, trajectory.tokens, trajectory.segment_ids)
    logits = np.asarray(model.logits(params, out.hidden))
    return logits, np.asarray(out.routing.experts)


def assert_same(a, b, rows_of_b=slice(None), atol=1e-5):
    """Equal answers: tokens, masks and routing exactly, log-probs to rounding."""
    for name in ("tokens", "segment_ids", "loss_mask", "truncated"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name)[rows_of_b], err_msg=name)
    np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs[rows_of_b], atol=atol)
    np.testing.assert_array_equal(a.experts, b.experts[:, rows_of_b])


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(0.7), marks=pytest.mark.slow),
        Sampling(1.3, top_k=6, top_p=0.8, min_p=0.2),
        Sampling(0.0),
    ],
    ids=str,
)
def test_decode_equals_teacher_forcing(engine, model, params, sample, sampling):
    trajectory = sample(dataclasses.replace(engine, sampling=sampling, record_kept=sampling.top_k > 0))
    logits, experts = forward(model, params, trajectory)
    for row, start in enumerate(START):
        for t in range(start, start + BOUND):
            scores, token = logits[row, t - 1], trajectory.tokens[row, t]
            if sampling.greedy:
                assert token == scores.argmax()
                assert trajectory.sampler_logprobs[row, t] == 0
            else:
                expected = truncated(scores, *dataclasses.astuple(sampling)[:4])
                np.testing.assert_allclose(trajectory.sampler_logprobs[row, t], np.log(expected[token]), atol=2e-5)
                if sampling.cuts:
                    order = np.argsort(-expected, kind="stable")[:6]
                    np.testing.assert_array_equal(trajectory.kept[row, t], np.where(expected[order] > 0, order, -1))
        fed = slice(0, start + BOUND - 1)
        np.testing.assert_array_equal(trajectory.experts[:, row, fed], experts[:, row, fed])
    if sampling.cuts:
        assert (trajectory.kept[~trajectory.loss_mask] == -1).all()
        assert len(set(np.sum(trajectory.kept[trajectory.loss_mask] >= 0, axis=1))) > 2, "cuts of several lengths"


def test_the_last_answer_of_a_group_may_be_greedy(engine, sample, free):
    greedy = sample(dataclasses.replace(engine, sampling=Sampling(0.0)))
    both = sample(dataclasses.replace(engine, sampling=Sampling(0.7, greedy_last=True)))
    last = np.arange(ROWS) % GROUP == GROUP - 1
    np.testing.assert_array_equal(both.tokens, np.where(last[:, None], greedy.tokens, free.tokens))
    expected = np.where(last[:, None], 0, free.sampler_logprobs)
    np.testing.assert_allclose(both.sampler_logprobs, expected, atol=1e-5)


def test_what_trace_compiles_is_what_generate_runs(params):
    """Host arrays are on no device yet, in the shapes as in the call."""
    mesh = sharding.make_mesh((1, 4, 1, 1))
    model = Model(tiny(), mesh)
    engine = Engine(model, Sampling(), GROUP, 3, end_ids=(NEVER,))
    placed = jax.device_put(params, jax.tree.map(lambda x: x.sharding, model.shapes()))
    engine.trace(model.shapes(), len(LENGTHS), PROMPTS.shape[1]).lower().compile()
    with compilations() as compiled:
        engine.generate(placed, PROMPTS, LENGTHS, UIDS.astype(np.uint32), jax.random.key(1))
    assert not any("_generate" in name for name in compiled), compiled


@pytest.mark.parametrize("tied", first_quick(1, [True, False]))
def test_matrices_kept_transposed_change_no_answer(tied):
    model = Model(dataclasses.replace(tiny(), tie_word_embeddings=tied, num_experts=0, num_hidden_layers=2))
    params = jax.jit(model.init)(jax.random.key(0))
    unstacked = model.unstack(params)
    kept = model.for_decoding(unstacked, 12, 32)
    matrix = kept["dense"][0]["mlp"]["down"]
    np.testing.assert_array_equal(matrix.value, unstacked["dense"][0]["mlp"]["down"].T)
    engine = Engine(model, Sampling(), GROUP, 32, end_ids=(NEVER,))
    keys = jax.random.split(jax.random.key(1), ROWS)
    decoder = engine.decoder(params, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS), keys, jnp.full(ROWS, 32))
    np.testing.assert_array_equal(decoder.params["dense"][0]["mlp"]["down"].value, matrix.value)
    for rows, steps in ((1, 32), (65, 32), (12, 31)):  # one row, many rows or few steps gain nothing
        assert model.for_decoding(unstacked, rows, steps) is unstacked
    tokens = jnp.arange(24).reshape(12, 2) % VOCABULARY
    expected, found = (jax.jit(lambda p: model.logits(p, model.apply(p, tokens).hidden))(p) for p in (unstacked, kept))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(expected, model.apply(params, tokens).hidden @ model.head(params), atol=1e-5)


def test_a_cache_of_several_stretches_changes_no_answer(engine, model, params, sample):
    # Five columns of prompt and 70 of answers: the rows cross from the first 64 columns into the rest.
    limits = np.array([70, 3, 9, 65, 70, 1, 30, 60, 62, 70, 2, 64], np.int32)
    long = dataclasses.replace(engine, max_new_tokens=70, slots=5)
    trajectory = sample(long, limits=limits)
    logits, experts = forward(model, params, trajectory)
    scores = np.asarray(jax.nn.log_softmax(logits[:, :-1] / 0.7))
    expected = np.take_along_axis(scores, trajectory.tokens[:, 1:, None], axis=-1)[..., 0]
    mask = trajectory.loss_mask[:, 1:]
    np.testing.assert_array_equal(mask.sum(1), limits)
    np.testing.assert_allclose(trajectory.sampler_logprobs[:, 1:][mask], expected[mask], atol=2e-5)
    recorded = trajectory.experts != NONE
    np.testing.assert_array_equal(trajectory.experts[recorded], experts[recorded])


def test_rows_are_left_aligned_and_masked(free):
    assert free.tokens.shape == (ROWS, PROMPTS.shape[1] + BOUND)
    column = np.arange(free.tokens.shape[1])[None]
    start, end = START[:, None], START[:, None] + BOUND
    prompt = np.pad(np.repeat(PROMPTS, GROUP, axis=0), ((0, 0), (0, BOUND)))
    np.testing.assert_array_equal(free.tokens[column < start], prompt[column < start])
    np.testing.assert_array_equal(free.segment_ids, column < end)
    np.testing.assert_array_equal(free.loss_mask, (column >= start) & (column < end))
    assert (free.sampler_logprobs[free.loss_mask] < 0).all()
    assert free.truncated.all()
    # The last token was never fed; padding neither.
    np.testing.assert_array_equal((free.experts != NONE).all((0, 3)), column < end - 1)
    np.testing.assert_array_equal((free.experts == NONE).all((0, 3)), column >= end - 1)


def test_an_answer_ends_with_its_eos(free, ended, eos):
    seen = set()
    for row, start in enumerate(START):
        answer = free.tokens[row, start : start + BOUND]
        hit = np.flatnonzero(answer == eos)
        count = hit[0] + 1 if len(hit) else BOUND
        seen.add((count == 1, len(hit) == 0))
        np.testing.assert_array_equal(ended.tokens[row, : start + count], free.tokens[row, : start + count])
        assert (ended.tokens[row, start + count :] == 0).all()
        assert ended.segment_ids[row].sum() == start + count
        assert ended.loss_mask[row].sum() == count
        assert ended.loss_mask[row, start : start + count].all()
        assert (ended.sampler_logprobs[row, start + count :] == 0).all()
        assert ended.truncated[row] == (len(hit) == 0)
        fed = slice(0, start + count - 1)
        np.testing.assert_array_equal(ended.experts[:, row, fed], free.experts[:, row, fed])
        assert (ended.experts[:, row, start + count - 1 :] == NONE).all()
    assert {(True, False), (False, True), (False, False)} <= seen


def test_an_answer_whose_eos_is_its_last_token_allowed_is_whole(engine, eos, ended, sample):
    found = sample(dataclasses.replace(engine, end_ids=(eos,)), limits=ended.loss_mask.sum(1).astype(np.int32))
    assert_same(found, ended)
    assert 0 < found.truncated.sum() < ROWS


@pytest.mark.parametrize("slots", first_quick(1, [5, 0]))
def test_an_answer_ends_with_the_first_of_several_ends(engine, free, eos, sample, slots):
    """By hand from the answers that never end; only those without any of the ends are truncated."""
    answers = [row[s : s + BOUND] for row, s in zip(free.tokens, START, strict=True)]
    other = next(int(answer[1]) for answer in answers if eos not in answer[:2])
    ended = sample(dataclasses.replace(engine, end_ids=(eos, other), slots=slots))
    last = set()
    for row, (start, answer) in enumerate(zip(START, answers, strict=True)):
        ends = np.flatnonzero((answer == eos) | (answer == other))
        count = ends[0] + 1 if len(ends) else BOUND
        np.testing.assert_array_equal(ended.tokens[row, start : start + count], answer[:count])
        assert ended.loss_mask[row].sum() == count
        assert ended.truncated[row] == (len(ends) == 0)
        last |= {int(answer[count - 1])} & {eos, other}
    assert last == {eos, other}


@pytest.mark.parametrize(
    "slots", first_quick(2, [7, ROWS + 4, 5, 1])
)  # 7: chunks of three prompts, the second reaches back
def test_refilled_slots_change_no_answer(engine, eos, ended, sample, slots):
    assert_same(sample(dataclasses.replace(engine, end_ids=(eos,), slots=slots)), ended)


@pytest.mark.parametrize("slots", first_quick(1, [2, 0]))
def test_answers_of_one_token(engine, free, sample, slots):
    """There is nothing to feed: no column but the prompt's."""
    one = sample(dataclasses.replace(engine, max_new_tokens=1, slots=slots))
    np.testing.assert_array_equal(one.tokens[one.loss_mask], free.tokens[np.arange(ROWS), START])
    np.testing.assert_allclose(one.sampler_logprobs[one.loss_mask], free.sampler_logprobs[np.arange(ROWS), START], 1e-5)


@pytest.mark.slow
def test_memory_follows_the_slots_and_not_the_prompts(engine, params):
    """Temporary bytes of the compiled rollout: eight times the prompts, of 512 tokens, at four slots."""
    long = dataclasses.replace(engine, slots=4, max_new_tokens=1, record_routing=False)

    def temporary(prompts):
        return long.trace(params, prompts, 512).lower().compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(4), temporary(32)
    cache = 2 * 2 * 1 * 8 * 512 * 4  # bytes a prompt: keys and values, layers, heads, head size, columns, float32
    assert many - few < 28 * cache / 4, (few, many)


def shapes_of(jaxpr):
    """The shape of every array inside a program."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_of(inner)


@pytest.mark.parametrize(("slots", "rows"), [(0, ROWS), (5, 5)])
def test_logits_are_those_of_the_slots(engine, slots, rows):
    """No array of a rollout is wider than slots x vocabulary: not of prompts, nor of time."""
    vocabulary = 97
    model = Model(tiny(vocab_size=vocabulary))
    wide = dataclasses.replace(engine, model=model, slots=slots)
    limits, key = np.full(ROWS, BOUND, np.int32), jax.random.key(0)
    shapes = jax.eval_shape(model.init, key)
    program = engine_module._generate.trace(wide, PROMPTS.shape[1], shapes, PROMPTS, LENGTHS, UIDS, limits, key).jaxpr
    weights = {x.shape for x in jax.tree.leaves(shapes) if vocabulary in x.shape}
    over_vocabulary = {s for s in shapes_of(program.jaxpr) if vocabulary in s} - weights
    assert max(np.prod(shape) for shape in over_vocabulary) == rows * vocabulary


def test_an_answer_has_its_own_bound(engine, free, sample):
    limits = np.array([1, 9, 2, 5, 1, 9, 3, 3, 4, 8, 9, 1], np.int32)
    for slots in (0, 5):
        cut = sample(dataclasses.replace(engine, slots=slots), limits=limits)
        np.testing.assert_array_equal(cut.loss_mask.sum(1), limits)
        np.testing.assert_array_equal(cut.tokens[cut.loss_mask], free.tokens[cut.loss_mask])
        assert cut.truncated.all()


def test_the_order_of_prompts_does_not_matter(engine, free, sample):
    order = [2, 0, 3, 1]
    rows = (np.array(order)[:, None] * GROUP + np.arange(GROUP)).ravel()
    assert_same(sample(engine, rows=order), free, rows)


def test_the_size_of_the_group_does_not_matter(engine, free, sample):
    rows = (np.arange(len(LENGTHS))[:, None] * GROUP + np.arange(2)).ravel()
    assert_same(sample(dataclasses.replace(engine, group_size=2)), free, rows)


def test_keys_uids_and_samples_differ(engine, free, sample):
    assert not np.array_equal(sample(engine, key=2).tokens, free.tokens)
    assert not np.array_equal(sample(engine, uids=UIDS + 1).tokens, free.tokens)
    groups = free.tokens.reshape(len(LENGTHS), GROUP, -1)
    assert all(len({tuple(row) for row in group}) == GROUP for group in groups)


@pytest.mark.parametrize("slots", first_quick(1, [2, 0]))
def test_prompts_in_buckets_change_no_answer(engine, params, eos, ended, sample, slots):
    """Four columns of five hold three of the prompts, and one column holds one: rows stay as wide as ever."""
    cut = dataclasses.replace(engine, end_ids=(eos,), slots=slots, prompt_buckets=5)
    short = [0, 1, 3]
    before = engine_module._generate._cache_size()
    for prompts in (short, [3], short[::-1]):
        rows = (np.array(prompts)[:, None] * GROUP + np.arange(GROUP)).ravel()
        trajectory = sample(cut, rows=prompts)
        assert trajectory.tokens.shape == (len(rows), PROMPTS.shape[1] + BOUND)
        assert_same(trajectory, ended, rows)
    assert engine_module._generate._cache_size() == before + 2  # one a width


def test_one_trace_a_shape(engine, model, sample):
    sample(engine)
    traces = engine_module._generate._cache_size()
    sample(Engine(model, Sampling(temperature=0.7), GROUP, BOUND, end_ids=(NEVER,)), rows=[3, 1, 0, 2], key=5)
    sample(engine, limits=np.full(ROWS, 2, np.int32))
    assert engine_module._generate._cache_size() == traces


@pytest.mark.parametrize("slots", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_mesh_changes_no_answer(engine, params, free, sample, slots):
    mesh = sharding.make_mesh((2, 2, 1, 1))
    model = Model(tiny(), mesh)
    placed = jax.device_put(params, sharding.shardings(model.axes(), params, mesh))
    assert_same(sample(dataclasses.replace(engine, model=model, slots=slots), params=placed), free)


@pytest.mark.slow
def test_prompts_that_the_devices_do_not_divide_are_not_shared(engine, params, free, sample):
    """Three prompts over four devices: a group and its prompt would lie apart."""
    model = Model(tiny(), sharding.make_mesh((2, 2, 1, 1)))
    placed = jax.device_put(params, sharding.shardings(model.axes(), params, model.mesh))
    found = sample(dataclasses.replace(engine, model=model), params=placed, rows=slice(3))
    assert_same(found, free, slice(3 * GROUP))


def test_recorded_logits_do_not_depend_on_the_slots(engine, params):
    """Chunks of three prompts, the second reaching back over two of the first."""
    recording = dataclasses.replace(engine, record_router_logits=True)
    whole, chunked = (
        dataclasses.replace(recording, slots=slots).generate(params, PROMPTS, LENGTHS, UIDS, jax.random.key(1)).routes
        for slots in (0, 7)
    )
    np.testing.assert_array_equal(chunked.sampled.experts, whole.sampled.experts)
    np.testing.assert_allclose(chunked.sampled.logits, whole.sampled.logits, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_samples_near_the_float32_distribution(engine, model, params, sample):
    trajectory = sample(dataclasses.replace(engine, dtype="bfloat16"))
    logits, _ = forward(model, params, trajectory)
    expected = np.zeros_like(trajectory.sampler_logprobs)
    expected[:, 1:] = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits[:, :-1] / 0.7)), trajectory.tokens[:, 1:, None], axis=-1
    )[..., 0]
    assert trajectory.sampler_logprobs.dtype == np.float32
    gap = np.abs(trajectory.sampler_logprobs - expected)[trajectory.loss_mask]
    # Eight bits of mantissa: a relative step of 2^-8 on logits of size 5, and now and then another expert.
    assert 1e-4 < gap.mean() < 0.1


def test_routing_is_recorded_on_request_and_where_there_are_experts(engine, free, sample):
    silent = sample(dataclasses.replace(engine, record_routing=False))
    assert silent.experts is None
    np.testing.assert_array_equal(silent.tokens, free.tokens)
    dense = Model(tiny(num_experts=0))
    assert sample(dataclasses.replace(engine, model=dense), params=dense.init(jax.random.key(0))).experts is None


def test_an_engine_without_an_end_is_refused(engine):
    with pytest.raises(ValueError, match=r"end_ids=\(\) names no token"):
        dataclasses.replace(engine, end_ids=())


@pytest.mark.parametrize(
    ("field", "value"), [("group_size", 0), ("max_new_tokens", 0), ("slots", -1), ("prompt_buckets", 0)]
)
def test_out_of_range_is_refused(engine, field, value):
    with pytest.raises(ValueError, match=rf"rollout\.{field}={value} must be at least"):
        dataclasses.replace(engine, **{field: value})


def test_bad_prompts_are_refused(engine, params):
    key = jax.random.key(0)
    for lengths in ([4, 2, 5, 0], [4, 2, 6, 1]):
        with pytest.raises(ValueError, match=r"lengths from \d to \d must lie in 1\.\.5"):
            engine.generate(params, PROMPTS, np.array(lengths, np.int32), UIDS, key)
    with pytest.raises(ValueError, match=r"limits from 1 to 10 must lie in 1\.\.9"):
        engine.generate(params, PROMPTS, LENGTHS, UIDS, key, np.r_[np.ones(ROWS - 1, np.int32), 10])
    with pytest.raises(ValueError, match="one for each of 12 answers"):
        engine.generate(params, PROMPTS, LENGTHS, UIDS, key, np.ones(3, np.int32))
