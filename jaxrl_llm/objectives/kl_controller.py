"""The coefficient of the KL inside the reward: fixed, or steered towards a target."""

import dataclasses
import math

from jaxrl_llm.ground.ranges import at_least_zero, positive

__all__ = ["KlController"]


@dataclasses.dataclass(frozen=True)
class KlController:
    """beta_{k+1} = beta_k (1 + gain e_k) with e_k = clip(KL_k / target - 1, -0.2, 0.2); fixed without a target.

    The state is one number, beta: it starts at `initial`, goes into the next rollout's rewards (`token_rewards`) and
    into the checkpoint. KL is the mean over answers of the sum over tokens of log pi - log pi_ref, in nats an answer,
    measured on the rollout itself: the quantity that the reward pays for.

    Source: Ziegler et al. 2019, arXiv 1909.08593 section 2.2 (gain 0.1).
    """

    initial: float
    target: float | None = None
    gain: float = 0.1

    def __post_init__(self) -> None:
        at_least_zero("reward_kl_coef", self.initial)
        positive("kl_gain", self.gain, at_most=1.0)
        if self.target is not None:
            positive("kl_target", self.target)
            if not self.initial:
                raise ValueError(
                    f"kl_target={self.target!r} with reward_kl_coef=0 never moves, as the coefficient is multiplied; "
                    "start from a positive reward_kl_coef"
                )

    def next(self, coefficient: float, kl: float) -> float:
        """The coefficient of the next rollout, from this one's and from its KL in nats an answer.

        Raises:
          FloatingPointError: the KL is not finite.
        """
        if self.target is None:
            return coefficient
        if not math.isfinite(kl):
            raise FloatingPointError(f"kl={kl} cannot steer reward_kl_coef; look at the step's log-probs")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.gain * error)
