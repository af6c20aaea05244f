"""The teacher of a run; several: a weighted sum of their log-probs, or for each answer the one that its row names."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.blocks import TeacherConfig
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.run.teacher_settings import is_served, named, shares
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.step import Learner

_KINDS = ByName(
    {
        "self": "jaxrl_llm.run.self_teacher:SelfTeacher",
        "served": "jaxrl_llm.run.served_teacher:ServedTeacher",
        "here": "jaxrl_llm.run.teacher:Teacher",
    }
)


def find_teacher(s: Settings, mesh: Any, path: str = "") -> Any:
    """The teacher of a run, or one of several with this path, checked and not yet loaded; raises as its `find`."""
    path = path or s.teacher.path
    if "," in path:
        return Teachers.find(s, mesh)
    kind = "self" if s.teacher.is_self else "served" if is_served(path) else "here"
    return _KINDS[kind].find(s, mesh, path)


@dataclasses.dataclass(frozen=True)
class Teachers:
    """Teachers k with weights w_k, whose log-prob of a token is sum_k w_k log pi_k, and whose divergence sum_k w_k D_k.

    The gradient of sum_k w_k KL(pi, pi_k) is that of the KL to the geometric mean of the teachers, so both forms agree.
    """

    config: TeacherConfig
    identity: list[Any]
    each: tuple[Any, ...]
    place: str = "models on servers"

    @classmethod
    def find(cls, s: Settings, mesh: Any = None) -> "Teachers":
        each = tuple(find_teacher(s, mesh, path) for path in s.teacher.paths)
        return cls(s.teacher, [one.identity for one in each], each)

    @property
    def path(self) -> str:
        return self.config.path

    @property
    def parts(self) -> tuple[Any, ...]:
        """The models that teach on this machine."""
        return tuple(part for one in self.each for part in one.parts)

    @property
    def params(self) -> tuple[Any, ...]:
        return tuple(one.params for one in self.parts)

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(one.shapes for one in self.parts)

    def load(self) -> "Teachers":
        return dataclasses.replace(self, each=tuple(one.load() for one in self.each))

    def scored(self, learner: Learner, rollout: Rollout, layouts: Sequence[Layout], draw: Draw, policy: Any) -> Rollout:
        """The rollout with the weighted sum of the teachers' log-probs, each by the policy's scoring pass."""
        given = (rollout, layouts, draw, policy)
        found: list[Any] = [one.scored(learner, *given).teacher_logprobs for one in self.each]
        weights = self._by_answer(draw) if self.config.by else np.tile(shares(self.config), (len(rollout.tokens), 1))
        (weights,) = sharding.put_rows((weights.astype(np.float32),), learner.model.mesh)
        return rollout.replace(teacher_logprobs=sum(jnp.float32(weights[:, k, None]) * x for k, x in enumerate(found)))

    def _by_answer(self, draw: Draw) -> np.ndarray:
        """1 for the teacher that an answer's row names, 0 for the others, [b k].

        Raises:
          ValueError: a row has no such field, or one that names no teacher.
        """
        field, values = named(self.config)
        ((prompts, _),) = draw.asked
        told = [str(row.get(field)) for row in prompts["row"]]
        if unknown := set(told) - set(values):
            raise ValueError(
                f"teacher.by={self.config.by} names the teachers of {', '.join(values)}, and a prompt's row has "
                f"{field}={unknown.pop()}; give every value of the data a teacher"
            )
        return np.repeat(np.asarray(told)[:, None] == np.asarray(values), draw.group_size, axis=0)

    def divergence(self, s: Settings) -> "WeightedDivergence":
        """The divergence that the run's updates take of them."""
        return WeightedDivergence(tuple(one.divergence(s) for one in self.parts), shares(self.config))


@dataclasses.dataclass(frozen=True)
class WeightedDivergence:
    """sum_k w_k D_k of several `TeacherDivergence`, whose parameters come as a tuple."""

    parts: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]

    def __call__(self, frozen: Sequence[Any], *of_student: Any, **how: Any) -> Any:
        found = [part(params, *of_student, **how) for part, params in zip(self.parts, frozen, strict=True)]
        return sum(weight * x for weight, x in zip(self.weights, found, strict=True))
