"""Arrays that are missing, unknown or would broadcast into something else are refused with the remedy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.objectives import ratios, surrogates


def arrays(b=3, t=4, **changes):
    x = jnp.zeros((b, t))
    return {"logprobs": x, "old_logprobs": x, "advantages": jnp.ones(b), "mask": jnp.ones((b, t), bool), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": jnp.ones(4)}, r"advantages has shape \(4,\), logprobs \(3, 4\); give \[b t\], or one number"),
        ({"advantages": jnp.ones((3, 1))}, r"advantages has shape \(3, 1\)"),
        ({"advantages": jnp.ones((4, 3))}, r"advantages has shape \(4, 3\)"),
        ({"advantages": jnp.ones(())}, r"advantages has shape \(\)"),
        ({"old_logprobs": jnp.zeros((3, 1))}, r"old_logprobs has shape \(3, 1\), logprobs \(3, 4\)"),
        ({"old_logprobs": jnp.zeros(4)}, r"old_logprobs has shape \(4,\)"),
        ({"mask": jnp.ones((3, 4))}, r"mask has dtype float32; give booleans"),
        ({"mask": jnp.ones(4, bool)}, r"mask has shape \(4,\)"),
        ({"logprobs": jnp.zeros(4)}, r"logprobs has shape \(4,\); give \[b t\]"),
        ({"old_logprob": jnp.zeros((3, 4))}, r"unknown array 'old_logprob' \(did you mean 'old_logprobs'\?\)"),
        ({"old_logprobs": None}, "needs old_logprobs; pass what objective.needs lists"),
        ({"sequence_ids": jnp.zeros((3, 4), int)}, r"advantages \[b\] cannot serve packed rows"),
        ({"num_sequences": 5}, "num_sequences=5 without sequence_ids must be the rows, 3"),
        ({"ref_logprobs": jnp.zeros((4, 3))}, r"ref_logprobs has shape \(4, 3\)"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        objectives.make("grpo")(**arrays(**changes))


@pytest.mark.parametrize(
    ("ids", "num_sequences", "message"),
    [
        (np.full((3, 4), 7), 3, "sequence_ids run from 7 to 7, num_sequences=3; number sequences from 0"),
        (np.full((3, 4), -1), None, "sequence_ids run from -1 to -1"),
        (np.zeros((3, 4)), None, "sequence_ids has dtype float32; give integers"),
    ],
)
def test_bad_sequence_ids_are_refused(ids, num_sequences, message):
    changed = arrays(advantages=jnp.ones((3, 4)), sequence_ids=jnp.asarray(ids))
    with pytest.raises(ValueError, match=message):
        objectives.make("grpo")(**changed, num_sequences=num_sequences)


@pytest.mark.parametrize(
    ("router", "old"), [((2, 3, 4), (2, 3, 4)), ((2, 4, 3, 2), (2, 4, 3, 2)), ((2, 3, 4, 2), (1, 3, 4, 2))]
)
def test_bad_router_shapes_are_refused(router, old):
    with pytest.raises(ValueError, match=r"router log-probs have shape"):
        objectives.make("rspo")(**arrays(router_logprobs=jnp.zeros(router), old_router_logprobs=jnp.zeros(old)))


def test_a_part_of_another_shape_is_refused():
    """One number an answer, [b 1], would be broadcast; a token too few would blame the surrogate of the package."""

    class Short(ratios.Ratio):
        def __call__(self, batch):
            return batch.log_ratio[:, 1:]

    class Whole(surrogates.LogProb):
        def __call__(self, log_ratio, batch):
            return batch.advantages[:, :1]

    grpo = objectives.make("grpo")
    for part, shape in [({"ratio": Short()}, (3, 3)), ({"surrogate": Whole()}, (3, 1))]:
        (name,) = (type(one).__name__ for one in part.values())
        with pytest.raises(ValueError) as error:
            dataclasses.replace(grpo, **part)(**arrays())
        assert str(error.value) == (
            f"{name} returned shape {shape}, the mask has (3, 4); return one number a token, [b t]"
        )


def test_an_equation_with_a_brace_that_is_no_field_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Misspelt(ratios.TokenRatio):
        power: float = 0.5
        equation = "r^{pwer:g}"

    @dataclasses.dataclass(frozen=True)
    class Open(ratios.TokenRatio):
        equation = "r_{"

    with pytest.raises(
        ValueError, match=r"equation of Misspelt, 'r\^\{pwer:g\}': 'pwer'; put only fields .* \(power\)"
    ):
        Misspelt()
    with pytest.raises(ValueError, match=r"equation of Open, .* put only fields in braces \(it has none\)"):
        Open()


def test_a_part_with_fields_that_is_no_dataclass_is_refused():
    class Plain(ratios.TokenRatio):
        power: float = objectives.hyperparameter(0.5, "power of the ratio", above=0)

    with pytest.raises(ValueError, match=r"Plain has fields and is no dataclass; put @dataclasses.dataclass"):
        Plain()


def test_an_answer_advantage_is_not_a_time_advantage_when_b_equals_t():
    """[b] with b == t: the number of dimensions decides, rows get their own advantage."""
    square = arrays(3, 3, advantages=jnp.asarray([1.0, 2.0, 4.0]))
    gradient = jax.jit(jax.grad(lambda x: -objectives.make("grpo")(**{**square, "logprobs": x})[0]))(square["logprobs"])
    np.testing.assert_allclose(gradient, np.asarray([[1.0], [2], [4]]) / 9 * np.ones(3), rtol=1e-6)


def test_low_precision_log_probs_are_lifted():
    half = arrays(logprobs=jnp.zeros((3, 4), jnp.bfloat16))
    assert jax.eval_shape(lambda x: objectives.make("grpo")(**x)[0], half).dtype == jnp.float32


def test_only_three_arrays_are_differentiated():
    zeros = jnp.zeros((3, 4))
    extra = {name: zeros for name in ("ref_logprobs", "sampler_logprobs", "values", "old_values", "returns", "entropy")}
    everything = arrays(advantages=zeros + 1, **extra)
    everything |= {"logprobs": zeros - 0.1, "ref_logprobs": zeros - 0.3, "values": zeros + 0.1}
    objective = objectives.make("ppo", kl_coef=0.1, entropy_coef=0.1, correction="tis")
    mask = everything.pop("mask")
    gradient = jax.jit(jax.grad(lambda x: objective(**x, mask=mask)[0]))(everything)
    moved = {name for name, x in gradient.items() if np.asarray(x).any()}
    assert moved == {"logprobs", "values", "entropy"}


@pytest.mark.parametrize("value", ["0.2", None, True, float("nan")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=r"clip_low=.* is not a number"):
        in_range("clip_low", value, above=0)
    with pytest.raises(ValueError, match=r"clip_low=.* is not a number"):
        in_range("clip_low", value, least=0, below=math.inf)
    with pytest.raises(ValueError, match="kl_coef=inf is out of range; give kl_coef at least 0 and finite"):
        in_range("kl_coef", math.inf, least=0, below=math.inf)
