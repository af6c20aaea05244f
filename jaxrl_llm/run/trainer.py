"""The training loop, read from top to bottom: draw a batch, update N times, log, evaluate, checkpoint."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.machine import Stopped, interruptible
from jaxrl_llm.models import Model
from jaxrl_llm.models.lora import Attached, adapter_axes, init_adapters, merged
from jaxrl_llm.records.checkpointing import Checkpoints, digest
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.run.batches import source_of
from jaxrl_llm.run.memory import Memory, needed
from jaxrl_llm.run.opening import closing, opening
from jaxrl_llm.run.reward_model import RewardModel
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.optimizer import make_optimizer, make_schedule
from jaxrl_llm.training.pending import Pending
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.routing_diagnostics import diagnose
from jaxrl_llm.training.sources import Drawn, Source, learn
from jaxrl_llm.training.state import TrainState, join, make_state, with_value_head
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.warm_start import warm_start

__all__ = ["Run", "Stopped", "base_digest", "build", "check_base", "exported_params", "train", "update"]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a run is made of, from its settings alone.

    model: on the mesh of training. sampler: the same model on the mesh of rollouts, which may be another.
    source: of the data that the objective reads.
    base: the frozen parameters under the adapters of LoRA, once `start` has loaded them; None without adapters.
    """

    settings: Settings
    model: Model
    sampler: Model
    learner: Learner
    source: Source
    base: Any = None

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Reads the held-out prompts, which are made where they are not there yet."""
        s = self.settings
        held_out = tasks.all_prompts(s.task, "test", limit=s.evaluation.prompts, data_dir=s.data_dir)
        return Evaluator(self.sampler, s.task, held_out, s.evaluation.samples, s.answer_length, s.rollout.slots)

    @functools.cached_property
    def data(self) -> str:
        """What there is to learn from, in a line; raises ValueError where data are missing or do not fit."""
        _ = self.evaluator
        return self.source.read_data()

    def start(self, log: Callable[[str], None]) -> tuple["Run", TrainState]:
        """(the run with its base, the state before the first update): warm-started, from the cache if it is there."""
        s = self.settings
        evaluated_on: dict[str, Any] = {
            "prompts": s.evaluation.prompts,
            "samples": s.evaluation.samples,
            "tokens": s.answer_length,
        }
        if self.sampler != self.model:
            evaluated_on["mesh"] = str(self.sampler.mesh)
        params = warm_start(
            self.model,
            s.task,
            s.warm_start,
            data_dir=s.data_dir,
            pretrained=s.pretrained,
            evaluate=self.evaluator.pass_rate,
            evaluated_on=evaluated_on,
            log=log,
        )
        if s.lora.rank:
            return dataclasses.replace(self, base=params), self.blank()
        return self, self._state(params)

    def blank(self) -> TrainState:
        """A state of the structure that checkpoints have, with fresh parameters, or with adapters that change nothing.

        A separate critic has adapters of its own on the same base.
        """
        s = self.settings
        if s.lora.rank:
            key = jax.random.fold_in(jax.random.key(s.seed), 0)  # the steps take 1, 2, ...
            return self._state(init_adapters(s.lora, self.model, key), adapter_axes(s.lora, self.model))
        return self._state(self.model.init_sharded(jax.random.key(s.warm_start.seed)))

    def _state(self, params: Any, axes: Any = None) -> TrainState:
        s, learner = self.settings, self.learner
        if s.critic.kind == "none" and not s.objective.learns_rewards:
            return make_state(self.model, params, learner.optimizer, axes=axes)
        valued = with_value_head(jax.tree.map(lambda x: x.copy(), params), s.model.hidden_size)
        if s.critic.kind != "separate":
            return make_state(self.model, valued, learner.optimizer, axes=axes)
        return make_state(self.model, params, learner.optimizer, valued, learner.critic_optimizer, axes)

    def memory(self) -> Memory:
        """What training needs of each device."""
        found = self.reward_model()
        state = jax.eval_shape(self.blank)
        return needed(self.settings, self.learner, self.sampler, state, 0 if found is None else found.bytes)

    def reward_model(self) -> RewardModel | None:
        """Found and checked, not loaded; only training asks for it, so that a DIR can be evaluated without it.

        Raises:
          FileNotFoundError, ValueError: see `RewardModel.find`.
        """
        s = self.settings
        if "reward_model" not in s.rewards.weights:
            return None
        return RewardModel.find(s.rewards.reward_model, s.task.tokenizer, self.model.mesh)

    @property
    def made_from(self) -> dict[str, Any]:
        """What beside its config a run depends on, for config.json."""
        found = self.reward_model()
        if found is None:
            return {}
        return {"reward_model": {"path": str(found.path), "step": found.step, "digest": found.digest}}

    def with_reward_model(self) -> "Run":
        """The run whose source has loaded the reward model; the same run where there is none."""
        found, source = self.reward_model(), self.source
        if found is None or not isinstance(source, Rollouts):
            return self
        return dataclasses.replace(self, source=dataclasses.replace(source, reward_model=found.load()))


def build(s: Settings, devices: Sequence[Any] | None = None) -> Run:
    """The compiled functions and fixed data of a run; devices: of another machine, to compile for it without data."""
    mesh = sharding.make_mesh(s.mesh.shape, devices)
    model, sampler = Model(s.model, mesh), Model(s.model, _sampling_mesh(s, mesh))
    n = s.updates.updates_per_rollout
    critic = dataclasses.replace(s.optimizer, learning_rate=s.critic.learning_rate, router_factor=1.0)
    learner = Learner(
        model=model,
        objective=s.objective,
        optimizer=make_optimizer(s.optimizer, n * s.steps),
        critic_optimizer=make_optimizer(critic, n * s.steps) if s.critic.kind == "separate" else None,
        temperature=s.rollout.temperature,
        aux_coef=s.updates.aux_coef,
        packed=s.updates.layout != "padded",
        shared_prompt=s.updates.layout == "shared",
        combine=Attached(s.lora.scale) if s.lora.rank else join,
    )
    run = Run(s, model, sampler, learner, source_of(s, learner, sampler))
    if devices is None:  # data that are missing or do not fit are found now, not at the step that needs them
        _ = run.data
    return run


def _sampling_mesh(s: Settings, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh of rollouts over the devices of training's, by default the same."""
    shape = s.rollout.mesh_shape
    if not shape:
        return mesh
    other = sharding.mesh_of_same_devices(mesh, shape, "rollout.mesh_shape")
    if s.objective.reads == "rollouts" and s.rows % sharding.row_shards(other):
        raise ValueError(
            f"rollout.mesh_shape={shape} spreads answers over {sharding.row_shards(other)} devices, which must divide "
            f"the {s.rows} of a rollout; change rollout.mesh_shape, rollout.prompts or rollout.group_size"
        )
    return other


def exported_params(run: Run, state: TrainState) -> Any:
    """The whole policy of a state in plain parameters, as it samples, is evaluated and is exported.

    A value head stays out; adapters are merged into the base of the run, by one program.
    """
    if run.base is not None:
        return merged(run.model, run.base, state.params, run.settings.lora.scale)
    return {name: x for name, x in state.params.items() if name != "value_head"}


def base_digest(run: Run) -> str | None:
    """A digest of the frozen base under the adapters; None without adapters."""
    return None if run.base is None else digest(run.base)


def check_base(own: str | None, extra: Mapping[str, Any]) -> None:
    """Raises ValueError when a checkpoint's adapters were trained on another base than the run's own."""
    if own != extra.get("base"):
        raise ValueError(
            "the frozen base of this run is not the one that the checkpoint's adapters were trained on, and nothing "
            "else keeps it; bring back the warm start's folder (warm_start.cache_dir), or the machine and versions "
            "that config.json records"
        )


def train(run: Run, log: RunLog, config_hash: str) -> dict[str, Any]:
    """Train to `settings.steps`, from the newest checkpoint of the DIR if there is one; returns the last evaluation.

    A damaged checkpoint is named and set aside, and the one before it is used.

    Raises:
      FloatingPointError: a loss or gradient is not finite; the message has the step.
      ValueError: a run-time check failed, or the checkpoint belongs to another run.
      OSError: a checkpoint or a log could not be written; the checkpoints before it stay.
      Stopped: Ctrl-C or SIGTERM, after the current step and its checkpoint.
    """
    began, settings = time.monotonic(), run.settings
    log.note(opening(settings, run.model, run.sampler, run.memory(), run.data, log.workdir))
    checkpoints = Checkpoints(log.workdir, settings.checkpoint.keep)
    run, state = run.with_reward_model().start(log.note)
    stream, first = run.source.stream(), 0
    base, reference = base_digest(run), run.source.reference(state, run.base, log.workdir / "reference")
    if checkpoints.latest is not None:
        first, state, extra = checkpoints.restore(state, note=log.note)
        if extra["config_hash"] != config_hash:
            raise ValueError(f"{log.workdir} holds the checkpoint of another config; use another --workdir")
        check_base(base, extra)
        checkpoints.set_aside(after=first)
        stream.set_state(extra["stream"])
        log.note(f"resumed from step {first}")
    log.cut(first if checkpoints.latest is not None else -1)
    late: Pending | None = None
    evaluated: dict[str, Any] = {}
    if first >= settings.steps > 0:  # complete before it began
        evaluated = _evaluate(run, state, reference)[0]
    if first == 0:
        evaluated, rows = _evaluate(run, state, reference)
        log.samples(0, rows)
        log.metrics(0, evaluated)
    with interruptible() as interrupted:
        for step in range(first + 1, settings.steps + 1):
            state, current = _step(run, state, reference, stream, step)
            if step == first + 1:
                current.host["time/to_first_update_s"] = time.monotonic() - began
            if late is not None:
                late.write(log)
            late = current
            last = step == settings.steps
            if last or step % settings.evaluation.every == 0:
                evaluated, rows = _evaluate(run, state, reference)
                log.samples(step, rows)
                late.host |= evaluated
            stop = processes.largest(interrupted())
            if last or stop or step % settings.checkpoint.every == 0:
                late.write(log)
                late = None
                extra = {"config_hash": config_hash, "base": base, "stream": stream.get_state()}
                checkpoints.save(step, state, extra)
            if stop and not last:
                checkpoints.close()
                raise Stopped(f"stopped after step {step}", stop, saved=True)
    checkpoints.close()
    log.screen.end(closing(log.workdir))
    return evaluated


def _step(run: Run, state: TrainState, reference: Any, stream: Any, step: int) -> tuple[TrainState, Pending]:
    """One batch of the source and the N updates that learn from it."""
    s, start = run.settings, time.monotonic()
    exported = functools.partial(exported_params, run, state)
    drawn = run.source.next(stream, step, state, reference, run.base, exported)
    state, pending = update(run, state, drawn, step)
    jax.block_until_ready(state.updates)
    n = s.updates.updates_per_rollout
    pending.host |= {
        # of the last update
        "optimizer/learning_rate": float(np.asarray(make_schedule(s.optimizer, n * s.steps)(n * step - 1))),
        "time/update_s": time.monotonic() - start - drawn.host.get("time/rollout_s", 0.0),
    }
    return state, pending


def update(run: Run, state: TrainState, drawn: Drawn, step: int) -> tuple[TrainState, Pending]:
    """The state after the N updates that learn from a batch, and what is measured on the way, still on the devices."""
    s, every = run.settings, run.settings.log.diagnostics_every
    diagnosed = bool(every) and step % every == 0 and drawn.batch.routing.scored is not None
    old_params = jax.tree.map(lambda x: x.copy(), state.params) if diagnosed else None
    learner = run.learner.critic_only if step <= s.critic.warmup_steps else run.learner
    state, updates = learn(learner, state, drawn, run.base)
    scored = drawn.metrics
    if diagnosed:
        scored = scored | diagnose(run.learner, state.params, old_params, drawn.batch, drawn.epochs[0], run.base)
    bounds = {
        "dtype": s.model.dtype,
        "sampler_dtype": s.sampler_precision,
        "truncated": s.rollout.allow_truncated,
        "answers": s.rows,
    }
    return state, Pending(step, dict(drawn.host), scored, updates, drawn.samples, bounds)


def _evaluate(run: Run, state: TrainState, reference: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What held-out data say of a state, and answers to read: the source's own, and pass rates of a policy."""
    metrics, rows = run.source.evaluate(state, reference, run.base)
    if not run.settings.objective.learns_rewards:
        rates, answers = run.evaluator(exported_params(run, state))
        metrics, rows = metrics | rates, rows + answers[: run.settings.log.samples]
    return metrics, [row | {"split": "test"} for row in rows]
