"""The reward of an answer as a weighted sum of named sources, and what rewards carry from rollout to rollout."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm import objectives, tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, PerAnswer
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.objectives.rewards import weighted_rewards
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.tasks import verifiers

_SHAPING = ByName(
    {
        "normalized_sum": "jaxrl_llm.objectives.reward_shaping",
        "bounded": "jaxrl_llm.objectives.reward_shaping",
    }
)
_TAKEN = {"verifier", "overlong", "length", "missing_eos", "reward_model", "reward_model_centre", "mean", "std"}
_TAKEN |= {"total", "zero_advantage_groups", "verifier_errors", "verifier_timeouts"}


@dataclasses.dataclass(frozen=True)
class RewardConfig(Block, prefix="rewards."):
    """The sum of weight * source over the sources below; each is logged apart.

    The penalty for a missing EOS is that of TRL's PPO: a reward model that was trained on whole answers knows nothing
    of others.
    """

    verifier_weight: float = declared(1.0, "of the task's verifier; at 0 it is still asked, for the metrics")
    functions: tuple[str, ...] = declared((), "others: exact, numeric, math, file.py:function, module:function")
    function_weights: tuple[float, ...] = declared((), "of each of them; (): 1")
    reward_model: str = declared("", "DIR of a run of configs/reward_model.py; empty: none")
    reward_model_weight: float = declared(1.0, "of its score without the score's mean over the first rollout")
    overlong_cache: int = declared(0, "tokens of DAPO's soft overlong ramp; 0: off", least=0)
    overlong_weight: float = declared(1.0, "of that ramp, which goes from 0 down to -1")
    length_weight: float = declared(0.0, "of the number of tokens of an answer; below 0: a cost for each")
    missing_eos_penalty: float = declared(0.0, "taken from the reward of an answer that is cut off", least=0)
    truncated_scale: float = declared(1.0, "factor of the sum of a cut-off answer, with task.verify_truncated", least=0)
    normalize: bool = declared(False, "sum sources centred and divided by their deviation in the group: GDPO")
    shift: float = declared(0.0, "added to the sum")
    scale: float = declared(1.0, "then multiplies it")
    clip: tuple[float, ...] = declared((), "least and largest reward after that; (): no bounds")
    turn_gamma: float = declared(
        1.0, "the reward of turn k counts turn_gamma^(k - 1): docs/environments.md", least=0, most=1
    )
    overlong_filter: bool = declared(False, "leave truncated answers out of the loss")

    def check(self) -> None:
        count = len(self.functions)
        if len(self.function_weights) not in (0, count):
            raise ValueError(
                f"rewards.function_weights={self.function_weights} needs one weight for each of the {count} "
                "rewards.functions, or none: then each has 1"
            )
        if taken := [name for name in self.named_functions if name in _TAKEN or name.endswith("_weighted")]:
            raise ValueError(
                f"rewards.functions={self.functions}: reward/{taken[0]} is another metric; rename the function"
            )
        if len(self.named_functions) < count:
            raise ValueError(f"rewards.functions={self.functions} has a name twice; give each function its own name")
        if self.clip and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            raise ValueError(f"rewards.clip={self.clip} must be a smaller and a larger number, or ()")
        if not self.weights:
            raise ValueError(
                "rewards.verifier_weight=0 leaves nothing to learn from; give a source of rewards a weight, for "
                "example a model by rewards.reward_model=DIR"
            )

    @property
    def named_functions(self) -> dict[str, str]:
        """{name in metrics: how `functions` names it}."""
        return {given.rpartition(":")[2]: given for given in self.functions}

    def verifiers(self) -> dict[str, tuple[tasks.Verify, bool]]:
        """`functions` by name, as `Task.functions` has them; raises as `verifier` does."""
        try:
            return {name: verifiers.verifier(given) for name, given in self.named_functions.items()}
        except ValueError as error:
            raise ValueError(f"rewards.functions: {error}") from error

    @property
    def weights(self) -> dict[str, float]:
        """The sources that are summed, in the order of the sum."""
        sources = {
            "verifier": self.verifier_weight,
            "overlong": self.overlong_weight if self.overlong_cache else 0.0,
            "length": self.length_weight,
            "missing_eos": self.missing_eos_penalty,
            "reward_model": self.reward_model_weight if self.reward_model else 0.0,
            **dict(zip(self.named_functions, self.function_weights or itertools.repeat(1.0), strict=False)),
        }
        return {name: weight for name, weight in sources.items() if weight}

    def filtered(self, rollout: Rollout) -> Rollout:
        """The rollout with a loss on the answers that may have one."""
        truncated: Any = rollout.truncated
        if not self.overlong_filter:
            return rollout
        return rollout.replace(loss_mask=objectives.overlong_filter(rollout.loss_mask, truncated))

    def rules(
        self,
        verified: Mapping[str, Float[np.ndarray, "b"]],
        lengths: Int[np.ndarray, "b"],
        truncated: Bool[np.ndarray, "b"],
        max_length: int,
    ) -> dict[str, Float[np.ndarray, "b"]]:
        """Return rewards known on the host: verifier, functions, and the rules on the length that have a weight."""
        sources = dict(verified)
        if "overlong" in self.weights:
            ramp = objectives.overlong_penalty(jnp.asarray(lengths), max_length=max_length, cache=self.overlong_cache)
            sources["overlong"] = np.asarray(ramp, np.float32)
        if "length" in self.weights:
            sources["length"] = lengths.astype(np.float32)
        if "missing_eos" in self.weights:
            sources["missing_eos"] = -truncated.astype(np.float32)
        return sources


@functools.partial(jax.jit, static_argnums=(0, 3))
def total_rewards(
    config: RewardConfig,
    sources: dict[str, PerAnswer],
    where: Bool[Array, "b"],
    group_size: int,
    truncated: Any = None,
) -> tuple[PerAnswer, dict[str, M.Metric]]:
    """(the weighted sum in its bounds, metrics): `reward/NAME` of every source, `reward/NAME_weighted` of those that
    are summed, before any normalization, and `reward/total`, over the answers of `where`."""
    total, metrics = weighted_rewards(sources, config.weights, where=where)
    if config.normalize:
        total = _SHAPING["normalized_sum"](sources, config.weights, group_size)
    if config.truncated_scale != 1:
        total = jnp.where(truncated, config.truncated_scale * total, total)
    if (config.shift, config.scale, config.clip) != (0.0, 1.0, ()):
        total = _SHAPING["bounded"](total, config.shift, config.scale, config.clip)
    for name, weight in config.weights.items():
        metrics[f"reward/{name}_weighted"] = M.Mean.of(weight * sources[name], where)
    return total, metrics | {"reward/total": M.Mean.of(total, where)}


@dataclasses.dataclass
class RolloutStream:
    """The prompts of a run and what its rewards carry: all that a rollout depends on beside the policy and its number.

    kl_coef: of the KL inside the reward; the objective's `KlController` moves it.
    centre: what is subtracted from the reward model's scores: their mean over the first rollout, whose answers are
      those of the policy that the run starts from. None before it. A constant in the reward of every answer changes no
      comparison; without it a critic, which starts at 0, spends its first updates on the model's offset.
    """

    prompts: tasks.PromptStream
    kl_coef: float = 0.0
    centre: float | None = None

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> tasks.Prompts:
        return next(self.prompts)

    def centred(self, scores: PerAnswer) -> PerAnswer:
        """The reward model's scores without their centre, which the first call fixes."""
        if self.centre is None:
            self.centre = float(jnp.mean(scores))
        return scores - jnp.float32(self.centre)

    def get_state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.get_state(), "kl_coef": self.kl_coef, "centre": self.centre}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.prompts.set_state(state["prompts"])
        self.kl_coef, self.centre = state["kl_coef"], state["centre"]
