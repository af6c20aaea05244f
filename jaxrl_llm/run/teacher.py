"""A frozen teacher beside the policy: the model of a DIR or of a published checkpoint."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm import models, tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model
from jaxrl_llm.records.checkpoint_reader import read_part
from jaxrl_llm.records.recorded_config import recorded_config
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.settings import Settings, model_settings
from jaxrl_llm.run.teacher_identity import is_run, teacher_identity
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.teacher_divergence import TeacherDivergence


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model of any family with the policy's token ids; its parameters stay as they are stored."""

    path: str
    identity: Any
    model: Model
    params: Any = None  # until `load`

    @classmethod
    def find(cls, s: Settings, mesh: Any = None, path: str = "") -> "Teacher":
        """The teacher of a run, or one of several with this path, checked and not yet loaded.

        Raises:
          FileNotFoundError: there is no run or no checkpoint.
          ValueError: its tokens have other ids than the policy's, or it is no policy that can be scored.
        """
        path, own = path or s.teacher.path, s.task.tokenizer
        known = teacher_identity(path)
        if is_run(path):
            config, tokens = _of_run(path)
        else:
            config, tokens = models.published_config(path), _tokenizer(path)
        if not _same_ids(tokens, own) or config.vocab_size < own.vocab_size:
            raise other_ids(path, f"{tokens.vocab_size} tokens", own)
        if s.updates.layout == "shared" and config.num_experts:
            raise ValueError(
                f"teacher.path={path} is a mixture of experts, and updates.layout=shared serves dense models alone; "
                "set that to packed"
            )
        return cls(path, known, Model(config, mesh_of_teacher(s.teacher.mesh_shape, mesh)))

    @property
    def parts(self) -> tuple["Teacher", ...]:
        """The models that teach: this one."""
        return (self,)

    @property
    def shapes(self) -> Any:
        return self.model.shapes()

    def beside(self, mesh: Any) -> bool:
        """True if it lies on the devices of this mesh."""
        own: Any = self.model.mesh
        return own is mesh or set(own.devices.flat) == set(mesh.devices.flat)

    def load(self) -> "Teacher":
        """With its parameters on the mesh; raises ValueError if the checkpoint is damaged or of another model."""
        if isinstance(self.identity, str):
            return dataclasses.replace(self, params=models.load_params(self.path, self.model))
        restored = read_part(self.path, self.identity[0], {"params": self.shapes})
        return dataclasses.replace(self, params=restored["params"])

    def scored(self, learner: Learner, rollout: Rollout, layouts: Sequence[Layout], *drawn: Any) -> Rollout:
        """The rollout with the teacher's log-probs, by the policy's scoring pass, whatever was `drawn`."""
        own, here, there = dataclasses.replace(learner, model=self.model), learner.model.mesh, self.model.mesh
        read = Rollout(rollout.tokens, rollout.segment_ids, rollout.loss_mask, kept=rollout.kept)
        read = read if here == there else _moved(read, there)
        found = own.score(Policy(self.params), read, layouts, {"logprobs"})["logprobs"]
        return rollout.replace(teacher_logprobs=found if here == there else _moved(found, here))

    def trace(self, learner: Learner, rollout: Rollout, layout: Layout) -> jax.stages.Traced:
        """The program of `scored` for one minibatch, from abstract arrays."""
        own = dataclasses.replace(learner, model=self.model)
        if self.model.mesh != learner.model.mesh:
            rollout = jax.tree.map(functools.partial(_abstract_on, mesh=self.model.mesh), rollout)
        return own.trace_score(Policy(self.shapes), rollout, layout, {"logprobs"}, None)

    def divergence(self, s: Settings) -> TeacherDivergence:
        """The divergence that the run's updates take of it."""
        return TeacherDivergence(self.model, s.teacher.beta, s.teacher.top_k, s.teacher.add_tail)


def mesh_of_teacher(shape: Sequence[int], mesh: Any) -> Any:
    """A mesh of this shape, of the devices that `mesh` leaves free, or of its own if it leaves none; (): `mesh` itself.

    Raises:
      ValueError: as `sharding.make_mesh` and `sharding.mesh_of_same_devices`.
    """
    if not shape:
        return mesh
    taken, visible = set(mesh.devices.flat), sharding.visible()
    free = (
        [one for one in visible if one not in taken] if taken <= set(visible) else []
    )  # not while compiling for others
    if not free:
        return sharding.mesh_of_same_devices(mesh, shape, "teacher.mesh_shape")
    return sharding.make_mesh(sharding.resolved(shape, len(free), "teacher.mesh_shape"), free)


def _moved(tree: Any, mesh: Any) -> Any:
    """Arrays of a rollout, with their rows on a mesh."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding.rollout_sharding(x, mesh)), tree)


def _abstract_on(x: Any, mesh: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rollout_sharding(x, mesh))


def other_ids(path: str, what: str, own: Any) -> ValueError:
    """The refusal of a teacher that reads something with other ids than the policy's tokenizer does."""
    return ValueError(
        f"teacher.path={path} reads {what} with other ids than the policy's {own.vocab_size}, so its probabilities are "
        "of other texts; give a teacher with the policy's tokenizer"
    )


def _of_run(path: str) -> tuple[models.ModelConfig, tasks.Tokenizer]:
    config: Any = recorded_config(path, remedy="read it, and if you trust it, give an export of the run as the teacher")
    export = f"give its export: python -m jaxrl_llm.export --workdir {path} --to FOLDER"
    if config.lora.rank:
        raise ValueError(
            f"teacher.path={path} holds adapters (lora.rank={config.lora.rank}) without their base; {export}"
        )
    if config.objective.name == "reward_model":
        raise ValueError(f"teacher.path={path} holds a reward model, which gives no probabilities; give a policy's DIR")
    return model_settings(config)


def _tokenizer(path: str) -> tasks.Tokenizer:
    try:
        return tasks.load_tokenizer(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"teacher.path={path} has no tokenizer to compare token ids by ({error}); copy the policy's tokenizer.json "
            "into it, or give the DIR of a run"
        ) from error


def _vocabulary(tokenizer: Any) -> Any:
    """Every token with its id; of a tokenizer of single characters its fingerprint, which says as much."""
    backend = getattr(tokenizer, "backend", None)
    return tokenizer.fingerprint if backend is None else backend.get_vocab(with_added_tokens=True)


def _same_ids(one: Any, other: Any) -> bool:
    return _vocabulary(one) == _vocabulary(other)
