"""Surrogates with a trust region other than the fixed clip: contracted by the batch, of a divergence, of answers."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.objectives.batch import Batch, Ids, mean_of_answer, sequence_sum, to_tokens, token_log_ratio
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.surrogates import Clip, Surrogate


def staleness_contraction(log_ratio: PerToken, mask: Mask, tail: float) -> PerToken:
    """c_t = 1 / (1 + (|d_t| / q)^2) if |d_t| > q > 0, else 1, with d = sg(log r) and q = quantile(|d|, tail).

    The quantile is over unmasked tokens. c multiplies both clip ranges; as 1 - c low only binds below ratio 1 and
    1 + c high only above, it contracts the one bound that the token moves towards, and never hinders a token on its
    way back to ratio 1. With tail = 1, c is 1 everywhere.

    Source: SAT, arXiv 2607.18722 section 4, read in descriptions of the paper, not in its text: the Hill kernel has
    exponent 2; its normalisation, 1/2 at the quantile, is a choice made here.
    """
    size = jnp.abs(jax.lax.stop_gradient(log_ratio))
    q = jnp.nanquantile(jnp.where(mask, size, jnp.nan), tail)  # NaN if empty: nothing is above it
    beyond = (size > q) & (q > 0)
    return jnp.where(beyond, 1 / (1 + (size / jnp.where(q > 0, q, 1)) ** 2), 1)


def binary_divergence(log_p: PerToken, log_q: PerToken, divergence: str) -> PerToken:
    """D(q, p) of two Bernoulli distributions, from the log-probabilities of one outcome (a sampled token).

        tv   |p - q|                                              kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Source: DPPO, arXiv 2602.04879 (binary approximations), read in the code of verl and SkyRL, not in the paper's text.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if divergence == "tv":
        return jnp.abs(p - q)
    rest_p, rest_q = (jnp.log1p(-jnp.minimum(x, 1 - 1e-7)) for x in (p, q))  # finite for a certain token
    return q * (log_q - log_p) + (1 - q) * (rest_q - rest_p)


def divergence_mask(
    log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, low: float, high: float, divergence: str
) -> tuple[Mask, Mask]:
    """Tokens that have moved too far: A < 0, r < 1 and D(q, p) > low; and A > 0, r > 1 and D(q, p) > high.

    p = pi_theta(y_t) and q = p / r are the probabilities of the sampled token alone, D is their `binary_divergence`.
    A rare token may multiply its probability many times over; one of probability 0.9 may not even fall to 0.7.
    """
    distance = binary_divergence(logprobs, logprobs - log_ratio, divergence)
    falls, rises = (advantages < 0) & (log_ratio < 0), (advantages > 0) & (log_ratio > 0)
    return falls & (distance > low), rises & (distance > high)


def prefix_budget_mask(
    divergence: PerToken,
    threshold: PerToken,
    budget: float,
    weight_floor: float,
    mask: Mask,
    sequence_ids: Ids = None,
    num_sequences: int | None = None,
) -> Mask:
    """Tokens of `mask` with w_t D_t > min(delta, delta + budget W_(t-1) - S_(t-1)), W = sum w, S = sum w D so far.

    w falls from 1 at an answer's first token to `weight_floor` at its last, so that early tokens may move less; an
    answer whose prefix moved by more than the budget, on average, has less left. threshold is delta of each token.

    Source: CPPO, arXiv 2606.10968 eqs 8 to 10 and algorithm 1.
    """
    where = (mask, sequence_ids, num_sequences)

    def before(x: PerToken) -> PerToken:
        """The sum over the earlier tokens of the same answer."""
        x = jnp.where(mask, x, 0)
        earlier = jnp.cumsum(x, axis=1) - x
        if sequence_ids is None:
            return earlier
        count = num_sequences or mask.size
        first = jax.ops.segment_min(jnp.where(mask, earlier, jnp.inf).ravel(), sequence_ids.ravel(), count)
        return jnp.where(mask, earlier - to_tokens(first, mask, sequence_ids), 0)

    ones = jnp.ones_like(divergence)
    length = to_tokens(sequence_sum(ones, *where), mask, sequence_ids)
    weight = 1 - (1 - weight_floor) * before(ones) / jnp.maximum(length - 1, 1)
    moved = weight * divergence
    slack = jnp.minimum(0, budget * before(weight) - before(moved))
    return mask & (moved > threshold + slack)


def off_policy_sequences(
    log_ratio: PerToken,
    advantages: PerToken,
    delta: float,
    mask: Mask,
    sequence_ids: Ids = None,
    num_sequences: int | None = None,
) -> Mask:
    """Tokens with A < 0 of answers that the policy has left: mean_t -log r > delta, in nats a token.

    Right answers stay however far off policy they are, and so do wrong ones that have become likelier.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556 eq. 9, whose old policy is the sampler.
    """
    return (advantages < 0) & (mean_of_answer(-log_ratio, mask, sequence_ids, num_sequences) > delta)


@dataclasses.dataclass(frozen=True)
class StalenessClip(Clip):
    """`clip` with its range times the `staleness_contraction`; `dual_clip` is left as it is."""

    tail: float = hyperparameter(
        0.9, "SAT: the clip range is contracted beyond this quantile of abs(log r)", least=0.0, most=1.0
    )
    whole_minibatch: ClassVar[bool] = True  # the quantile is one number for all its tokens

    def radii(self, log_ratio: PerToken, batch: Batch) -> tuple[PerToken, PerToken]:
        c = staleness_contraction(log_ratio, batch.mask, self.tail)
        return c * self.clip_low, c * self.clip_high

    def formula(self) -> str:
        bounded = f"min(r A, clip(r, 1 - {self.clip_low:g} c, 1 + {self.clip_high:g} c) A)"
        dual = bounded if self.dual_clip is None else f"max({bounded}, {self.dual_clip:g} A if A < 0)"
        return f"{dual}; c = 1 / (1 + (abs(log r) / q)^2) beyond q; q = quantile(abs(log r), {self.tail:g})"


@dataclasses.dataclass(frozen=True)
class DecoupledClip(Clip):
    """k `clip` with k = sg(p / mu), p the policy that the ratio is taken to: the range is around p, while k weighs what
    the sampler mu drew, so that together they are pi / mu where nothing is clipped.

    Source: decoupled PPO, arXiv 2110.00641 and 2505.24298 (AReaL); with `ratios.InterpolatedRatio` A-3PO, 2512.06547.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logprobs"})
    units: ClassVar[tuple[str, ...]] = ("token",)

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        whole = token_log_ratio(batch.logprobs, batch.require("sampler_logprobs"), batch.mask)
        return jax.lax.stop_gradient(jnp.exp(whole - log_ratio))

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return self.weight(log_ratio, batch) * super().__call__(log_ratio, batch)

    def metrics(self, log_ratio: PerToken, batch: Batch) -> dict[str, Metric]:
        return super().metrics(log_ratio, batch) | {
            "mismatch/weight": Mean.of(self.weight(log_ratio, batch), batch.mask)
        }

    def formula(self) -> str:
        return f"k {super().formula()}; k = sg(p / mu)"


@dataclasses.dataclass(frozen=True)
class SequenceMaskedClip(Clip):
    """`clip`, and 0 on `off_policy_sequences`. The paper prints no delta: users of TRL and Trinity take 0.05 to 0.5.

    Mask and clip are both around the sampler, as in slime; TRL masks by the sampler and clips around pi_old.
    """

    delta: float = hyperparameter(
        0.1, "OPSM: wrong answers whose mean log(1 / r) is beyond it, in nats a token, are masked", above=0
    )

    def masked(self, log_ratio: PerToken, batch: Batch) -> Mask:
        return off_policy_sequences(log_ratio, batch.advantages, self.delta, *batch.sequences)

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        low, high = super().clipped(log_ratio, batch)
        masked = self.masked(log_ratio, batch)
        return low | masked, high & ~masked

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return jnp.where(self.masked(log_ratio, batch), 0, super().__call__(log_ratio, batch))

    def formula(self) -> str:
        return f"M {super().formula()}; M = 0 if A < 0 and mean_t log(1 / r) > {self.delta:g}, else 1"


@dataclasses.dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """M r A with M = 0 on the tokens of `divergence_mask`, else 1: the token is masked, its ratio is not clipped.

    SkyRL and prime-rl compute the same. verl differentiates sg(min(r, c)) log pi with c = 3 unless set, so that its
    gradient is smaller wherever a kept token has r > c. The default thresholds are verl's.
    """

    divergence: str = hyperparameter(
        "tv", "DPPO's divergence of the two probabilities of a sampled token", among=("tv", "kl")
    )
    divergence_low: float = hyperparameter(0.2, "DPPO: tokens that fall with A < 0 are masked beyond it", above=0)
    divergence_high: float = hyperparameter(0.2, "DPPO: tokens that rise with A > 0 are masked beyond it", above=0)
    units: ClassVar[tuple[str, ...]] = ("token",)
    equation: ClassVar[str] = (
        "M r A; "
        "M = 0 beyond {divergence} {divergence_low:g} downwards (A < 0), {divergence_high:g} upwards (A > 0), else 1"
    )

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        bounds = (self.divergence_low, self.divergence_high)
        return divergence_mask(log_ratio, batch.masked("logprobs"), batch.advantages, *bounds, self.divergence)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        low, high = self.clipped(log_ratio, batch)
        return batch.advantages * jnp.where(low | high, 0, jnp.exp(log_ratio))


def squared_step(log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, coef: float) -> PerToken:
    """A log pi - coef (log r)^2 / 2: no bound, but every step from the old policy costs its square.

    Source: DRO, arXiv 2405.19107, read in verl's code; prime-rl adds the same square to `dppo`.
    """
    return advantages * logprobs - coef * log_ratio**2 / 2


@dataclasses.dataclass(frozen=True)
class SquaredStep(Surrogate):
    """`squared_step`."""

    step_coef: float = hyperparameter(0.1, "DRO: weight of half the squared log-ratio", least=0)
    units: ClassVar[tuple[str, ...]] = ("token",)
    equation: ClassVar[str] = "A log pi - {step_coef:g} (log r)^2 / 2"

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return squared_step(log_ratio, batch.masked("logprobs"), batch.advantages, self.step_coef)


@dataclasses.dataclass(frozen=True)
class PrefixBudgetMask(DivergenceMask):
    """M r A with M = 0 on tokens that move away from ratio 1 and are in `prefix_budget_mask`.

    The divergence is that of the sampled token alone, the paper's of the 20 likeliest tokens; the budget is a constant,
    as the paper has it for a model that was trained before.
    """

    prefix_budget: float = hyperparameter(0.015, "CPPO: largest mean divergence of a prefix of an answer", above=0)
    weight_floor: float = hyperparameter(0.8, "CPPO: weight of an answer's last token, 1 at its first", above=0, most=1)
    equation: ClassVar[str] = (
        "M r A; M = 0 beyond {divergence} {divergence_low:g} down, {divergence_high:g} up, {prefix_budget:g} over the "
        "prefix, else 1"
    )

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        log_p = batch.masked("logprobs")
        distance = binary_divergence(log_p, log_p - log_ratio, self.divergence)
        threshold = jnp.where(batch.advantages < 0, self.divergence_low, self.divergence_high)
        beyond = prefix_budget_mask(distance, threshold, self.prefix_budget, self.weight_floor, *batch.sequences)
        falls, rises = (batch.advantages < 0) & (log_ratio < 0), (batch.advantages > 0) & (log_ratio > 0)
        return falls & beyond, rises & beyond
