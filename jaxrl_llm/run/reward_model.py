"""A reward model beside the policy: what the model of a DIR says of answers, on the policy's mesh."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Array, Int, PerAnswer, PerToken, Tokens
from jaxrl_llm.models import Model, Rows, scoring
from jaxrl_llm.records.checkpoint_reader import read_part
from jaxrl_llm.records.recorded import checkpoint_identity
from jaxrl_llm.records.recorded_config import recorded_config
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.settings import model_settings
from jaxrl_llm.tasks import Tokenizer
from jaxrl_llm.training.layout import Layout, UpdateConfig, lay_out
from jaxrl_llm.training.micro_batches import cut, fill
from jaxrl_llm.training.policy import with_value_head


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A transformer with a scalar head, frozen: the newest checkpoint of a DIR that was trained on pairs.

    r(x, y) = head(hidden state after the last token of y), EOS or the token at which y was cut off. The Bradley-Terry
    loss speaks of differences of r alone: r has a scale (in nats of preference) and no zero.

    Source: InstructGPT, arXiv 2203.02155 section 3.5.
    """

    path: str | Path
    step: int
    digest: str  # of the checkpoint of `step`
    model: Model
    params: Any = None  # until `load`

    @classmethod
    def find(cls, path: str | Path, tokenizer: Tokenizer, mesh: Any = None) -> "RewardModel":
        """The reward model of a DIR, checked and not yet loaded; tokenizer and mesh are the policy's.

        Raises:
          FileNotFoundError: there is no run or no checkpoint.
          ValueError: the run is of another objective, or of another tokenizer.
        """
        remedy = "read it, and if you trust it, train the reward model with it yourself"
        config: Any = recorded_config(path, remedy=remedy)
        if config.objective.name != "reward_model":
            raise ValueError(
                f"rewards.reward_model={path} holds a run of {config.objective.name!r}; give the DIR of a run of "
                "configs/reward_model.py"
            )
        if config.lora.rank:
            raise ValueError(
                f"rewards.reward_model={path} was trained with lora.rank={config.lora.rank}, but a reward model is "
                "read whole; train it with lora.rank=0"
            )
        model, own = model_settings(config)
        if own.fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"rewards.reward_model={path} reads the {own.vocab_size} tokens of another tokenizer than the policy, "
                f"which has {tokenizer.vocab_size}; train both on one task, or with one task.tokenizer"
            )
        return cls(path, *checkpoint_identity(path), Model(model, mesh))

    @property
    def shapes(self) -> dict[str, Any]:
        """Shape, dtype and sharding of every parameter, the head's included."""
        head = jax.eval_shape(lambda: with_value_head({}, self.model.config.hidden_size))
        mesh = self.model.mesh
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if mesh is None else sharding.replicated(mesh)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), head)
        return self.model.shapes() | placed

    def load(self) -> "RewardModel":
        """With its parameters on the mesh; raises ValueError if the checkpoint is damaged or of another model."""
        restored = read_part(self.path, self.step, {"params": self.shapes})
        return dataclasses.replace(self, params=restored["params"])

    def score(self, rollout: Rollout, updates: UpdateConfig) -> PerAnswer:
        """r of every answer of a rollout, float32: one answer a row, prompt first, padding on the right.

        updates: cut the rows into micro-batches of `micro_batch_rows` rows, or of as many as a minibatch has; with
        layout=packed several answers share a row, otherwise (padded, shared) each has one.
        """
        lengths = np.asarray(processes.fetch(rollout.segment_ids) != 0).sum(1)
        return _score(self.model, *self._given(self.params, rollout.tokens, lengths, updates))

    def trace(self, tokens: Any, updates: UpdateConfig) -> jax.stages.Traced:
        """The program of `score` for rows at their bound, from abstract tokens [b t]."""
        lengths = np.full(tokens.shape[0], tokens.shape[1])
        return _score.trace(self.model, *self._given(self.shapes, tokens, lengths, updates))

    def _given(self, params: Any, tokens: Any, lengths: np.ndarray, updates: UpdateConfig) -> tuple[Any, ...]:
        micro = updates.micro_batch_rows or len(lengths) // updates.minibatches
        layout = "packed" if updates.layout == "packed" else "padded"
        config = dataclasses.replace(updates, layout=layout, micro_batch_rows=micro)
        places = lay_out(np.arange(len(lengths)), lengths, tokens.shape[1], config)
        return layout, params, tokens, lengths.astype(np.int32), places


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    model: Model, rows: Rows, params: Any, tokens: Tokens, lengths: Int[Array | np.ndarray, "b"], layout: Layout
) -> PerAnswer:
    micro_batch = cut(tokens, layout, model.mesh)

    def of(i: Array) -> PerToken:
        hidden = model.apply(params, micro_batch(i), segment_ids=layout.segment_ids[i], rows=rows).hidden
        return scoring.values(params["value_head"], hidden)

    after = fill(jnp.zeros(tokens.shape, jnp.float32), of, layout, model.mesh)
    last = jnp.take_along_axis(after, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    return sharding.constrain(last, [None], model.mesh)
