"""Everything that a run is made of, from its settings alone: models, compiled functions, data, its first state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import tasks
from jaxrl_llm.ground import precision, sharding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import EXACT, Model
from jaxrl_llm.models.lora import adapter_axes, init_adapters
from jaxrl_llm.records.digests import digest
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.pass_rate import RATES, WHOLE, Evaluator, evaluated_at_once
from jaxrl_llm.rollout.rollout import RolloutEngine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run.agreement import check_rows
from jaxrl_llm.run.auto_layout import laid_out
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.optimizer import make_optimizer
from jaxrl_llm.training.policy import with_value_head
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.sources import Source
from jaxrl_llm.training.state import TrainState, make_state
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.warm_start import warm_start

# What only some configs use.
_USED = ByName(
    {
        "Answers": "jaxrl_llm.training.answers",
        "EpisodeEvaluator": "jaxrl_llm.rollout.episode_rates",
        "EpisodeRollouts": "jaxrl_llm.training.episode_rollouts",
        "EpisodesAhead": "jaxrl_llm.training.episode_rollouts",
        "GreedyRollouts": "jaxrl_llm.training.greedy_rollouts",
        "PairData": "jaxrl_llm.training.pairs",
        "Pairs": "jaxrl_llm.training.pairs",
        "RemoteEngine": "jaxrl_llm.rollout.remote",
        "RewardModel": "jaxrl_llm.run.reward_model",
        "RolloutsAhead": "jaxrl_llm.training.rollouts_ahead",
        "find_teacher": "jaxrl_llm.run.teachers",
    }
)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a run is made of, from its settings alone."""

    settings: Settings
    model: Model  # on the mesh of training
    sampler: Model  # the same on the mesh of rollouts, which may be another
    learner: Learner
    source: Source  # of the data that the objective reads
    teacher: Any = None  # a frozen model, with parameters once it is `started`; None: there is none

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Reads the held-out prompts, which are made where they are not there yet."""
        s = self.settings
        held_out = tasks.all_prompts(s.task, "test", limit=s.evaluation.prompts, data_dir=s.data_dir)
        width = s.task.row_length(s.answer_length) - s.answer_length
        asked = len(held_out["uid"]), s.evaluation.samples, width, s.answer_length
        slots = evaluated_at_once(self.sampler, *asked, s.rollout.slots, s.rows)
        shape, sampling = (s.evaluation.samples, s.answer_length, slots), s.evaluation.sampling
        return evaluator(self.sampler, s.task, held_out, *shape, sampling=sampling)

    def pass_rates(self, state: TrainState) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the policy's pass rates, also under the router of rollouts where that is another one."""
        params, router = state.policy.plain(self.model), self.settings.rollout.router
        rates, rows = self.evaluator(params)
        if router != EXACT:
            under = dataclasses.replace(self.evaluator, router=router)(params)[0]
            rates |= {f"eval/sampler_{name}": under[f"eval/{name}"] for name in RATES}
        return rates, rows

    @functools.cached_property
    def data(self) -> str:
        """The data that there are to learn from, in a line; raises ValueError where data are missing or do not fit."""
        _ = self.evaluator
        return self.source.read_data()

    def start(self, log: Callable[[str], None]) -> TrainState:
        """The state before the first update: warm-started, from the cache if it is there."""
        s = self.settings
        of, evaluate = self._warm_start_of, self.evaluator.pass_rate
        params = warm_start(self.model, s.task, s.warm_start, **of, data_dir=s.data_dir, evaluate=evaluate, log=log)
        return self.blank().replace(base=params) if s.lora.rank else self.state(params)

    @property
    def _warm_start_of(self) -> dict[str, Any]:
        """Inputs that the parameters before the first update depend on, beside model, task and their own block."""
        s = self.settings
        evaluated_on = {"prompts": s.evaluation.prompts, "samples": s.evaluation.samples, "tokens": s.answer_length}
        other = {} if self.sampler == self.model else {"mesh": str(self.sampler.mesh)}
        if s.evaluation.sampling != WHOLE:
            other["sampling"] = str(s.evaluation.sampling)
        return {"pretrained": s.pretrained, "evaluated_on": evaluated_on | other}

    def blank(self) -> TrainState:
        """A state of the structure that checkpoints have, with fresh parameters, or with adapters that change nothing.

        A separate critic has adapters of its own on the same base.
        """
        s = self.settings
        if s.lora.rank:
            key = jax.random.fold_in(jax.random.key(s.seed), 0)  # the steps take 1, 2, ...
            return self.state(init_adapters(s.lora, self.model, key), adapter_axes(s.lora, self.model))
        return self.state(self.model.init_sharded(jax.random.key(s.warm_start.seed)))

    def state(self, params: Any, axes: Any = None) -> TrainState:
        """The state of these parameters before the first update, with a value head or a critic if the run has one."""
        s, critic = self.settings, None
        if s.critic.kind != "none" or s.objective.learns_rewards:
            valued = with_value_head(jax.tree.map(lambda x: x.copy(), params), s.model.hidden_size)
            params, critic = (params, valued) if s.critic.kind == "separate" else (valued, None)
        scale = s.lora.scale if s.lora.rank else 1.0
        return make_state(self.model, params, self.learner.optimizer, critic, axes=axes, scale=scale)

    def reward_model(self) -> Any:
        """Found and checked, not loaded; only training asks for it, so that a DIR can be evaluated without it."""
        s = self.settings
        if "reward_model" not in s.rewards.weights:
            return None
        return _USED["RewardModel"].find(s.rewards.reward_model, s.task.tokenizer, self.model.mesh)

    @property
    def made_from(self) -> dict[str, Any]:
        """The files beside its config that a run depends on, for config.json."""
        found, made = self.reward_model(), {}
        if found is not None:
            made["reward_model"] = {"path": str(found.path), "step": found.step, "digest": found.digest}
        if self.teacher is not None:
            made["teacher"] = {"path": self.teacher.path, "identity": self.teacher.identity}
        return made

    def started(self, start: TrainState, folder: Path | None) -> "Run":
        """The run with any teacher; its source has any reward model and what it keeps of the start, in any `folder`."""
        source, found = self.source.started(start, folder), self.reward_model()
        teacher = None if self.teacher is None else self.teacher.load()
        if isinstance(source, Rollouts):
            if found is not None:
                source = dataclasses.replace(source, reward_model=found.load().score)
            if teacher is not None and "teacher_logprobs" in self.settings.objective.needs:
                source = dataclasses.replace(source, teacher=functools.partial(teacher.scored, self.learner))
        if source is self.source and teacher is None:
            return self
        return dataclasses.replace(self, source=source, teacher=teacher)


def build(s: Settings, devices: Sequence[Any] | None = None, *, trains: bool = True) -> Run:
    """The compiled functions and fixed data of a run.

    Args:
      devices: of another machine, to compile for it without data.
      trains: otherwise a run that is only opened, on whatever devices there are.

    Raises:
      ValueError: the mesh does not fit the devices, or the devices not the rows; data are missing or do not fit.
    """
    mesh = sharding.make_mesh(s.mesh.shape, devices, s.mesh.dcn_shape)
    precision.set_products((s.model.dtype, s.rollout.dtype), sharding.platform(mesh))
    s = laid_out(s, mesh)
    if trains:
        check_rows(s, mesh.size)
    sampling, shape = mesh, s.rollout.mesh_shape
    if shape:
        sampling = sharding.mesh_of_same_devices(mesh, shape, "rollout.mesh_shape")
    model, sampler = Model(s.model, mesh), Model(s.model, sampling)
    teacher = _USED["find_teacher"](s, mesh) if s.teacher.path and trains else None
    critic_rate = s.critic.learning_rate if s.critic.kind == "separate" else None
    layout: Any = s.updates.layout
    learner = Learner(
        model=model,
        objective=s.objective,
        # A run that is told to hold parameters in bfloat16 saves the memory of masters; `update/moved` watches it.
        optimizer=make_optimizer(s.optimizer, s.updates.updates_per_rollout * s.steps, critic_rate, masters=False),
        temperature=s.rollout.temperature,
        aux_coef=s.updates.aux_coef,
        router_bias_rate=s.updates.router_bias_rate,
        rows=layout,
        answer_tokens=_answer_tokens(s),
        divergence=teacher.divergence(s) if teacher and "teacher_divergence" in s.objective.needs else None,
    )
    run = Run(s, model, sampler, learner, _source_of(s, learner, sampler), teacher)
    if devices is None:  # data that are missing or do not fit are found now, not at the step that needs them
        _ = run.data
    return run


def evaluator(model: Model, task: tasks.Task, *fields: Any, sampling: Sampling) -> Evaluator:
    """The `Evaluator` of these fields, or of episodes if the task has an environment."""
    kind = Evaluator if task.environment is None else _USED["EpisodeEvaluator"]
    return kind(model, task, *fields, sampling=sampling)


def _answer_tokens(s: Settings) -> int:
    """The most tokens of answers in a row of a rollout; 0 where there is no bound but the row."""
    if s.objective.reads != "rollouts" or s.updates.layout == "packed":
        return 0
    return s.sampled_length * (s.rollout.group_size if s.updates.layout == "shared" else 1)


def _source_of(s: Settings, learner: Learner, sampler: Model) -> Source:
    """The source of the data that the objective reads, made from the settings; sampler: the model of rollouts."""
    shared: dict[str, Any] = {"task": s.task, "data_dir": s.data_dir, "seed": s.seed, "updates": s.updates}
    if s.objective.reads == "pairs":
        return _USED["Pairs"](learner, _pair_data(s), s.seed, s.rollout.prompts, s.updates, samples=s.log.samples)
    shared["reference_dtype"] = s.reference_dtype
    if s.objective.reads == "answers":
        data = _pair_data(s) if s.preference.file else None
        return _USED["Answers"](learner=learner, answers=s.rows, data=data, **shared)
    # One update a rollout, nothing to replay and no values: its own forward is pi_old.
    once = s.updates.updates_per_rollout == 1 and s.replay.mode == "off"
    first_forward = once and not {"values", "router_logprobs", "old_logprobs"} & s.objective.needs
    kind = Rollouts if s.task.environment is None else _USED["EpisodeRollouts"]
    if s.greedy_last:
        kind = _USED["GreedyRollouts"]
    if s.rollout.lag:
        kind = _USED["RolloutsAhead" if s.task.environment is None else "EpisodesAhead"]
        shared |= {"lag": s.rollout.lag, "last": s.steps}
    return kind(
        engine=_engine_of(s, learner, sampler),
        scorer=Scorer(learner, s.replay, s.rollout.group_size, first_forward),
        prompts=s.rollout.prompts,
        sampling=s.dynamic_sampling,
        rewards=s.rewards,
        samples=s.log.samples,
        read_all=s.rollout.max_prompt_length > 0,
        **shared,
    )


def _pair_data(s: Settings) -> Any:
    return _USED["PairData"](s.task, s.preference, s.data_dir, s.answer_length, held_out=s.evaluation.prompts)


def _engine_of(s: Settings, learner: Learner, sampler: Model) -> RolloutEngine:
    if s.rollout.engine == "vllm":
        return _USED["RemoteEngine"](
            learner.model,
            s.rollout.sampling,
            s.rollout.group_size,
            s.task.row_length(s.answer_length) - s.answer_length,
            s.answer_length,
            s.task.tokenizer.end_ids,
            s.rollout.servers,
            launch=s.rollout.launch,
            weights_dir=s.rollout.weights_dir,
            weights_by=s.rollout.weights_by,
            deadline_s=s.rollout.deadline_s,
            dtype=s.rollout.dtype,
            at_once=s.rollout.slots or s.rows,
            needs_routes=s.replay.mode == "R3",
            rows_on=learner.model.mesh,
        )
    return Engine(
        sampler,
        dataclasses.replace(s.rollout.sampling, greedy_last=s.greedy_last),
        s.rollout.group_size,
        s.answer_length,
        s.task.tokenizer.end_ids,
        slots=s.rollout.slots,
        prompt_buckets=s.rollout.prompt_buckets,
        dtype=s.rollout.dtype,
        router=s.rollout.router,
        record_routing=s.model.num_moe_layers > 0,
        record_router_logits=s.replay.mode == "R3" and s.replay.what == "logits",
        record_kept=s.rollout.records_kept,
        rows_on=learner.model.mesh,
    )


def base_digest(state: TrainState) -> str | None:
    """A digest of the frozen base under the adapters; None without adapters."""
    return None if state.base is None else digest(state.base)


def check_base(own: str | None, extra: Mapping[str, Any]) -> None:
    """Raises ValueError when a checkpoint's adapters were trained on another base than the run's own."""
    if own != extra.get("base"):
        raise ValueError(
            "the frozen base of this run is not the one that the checkpoint's adapters were trained on, and nothing "
            "else keeps it; bring back the warm start's folder (warm_start.cache_dir), or the machine and versions "
            "that config.json records"
        )
