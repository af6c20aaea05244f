"""The training loop, read from top to bottom: collect, score, update N times, log, evaluate, checkpoint."""

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxrl_llm import metrics as M
from jaxrl_llm import processes, sharding, tasks
from jaxrl_llm.checkpointing import Checkpoints, digest, load_tree, save_tree
from jaxrl_llm.memory import Memory, needed
from jaxrl_llm.models.lora import Attached, adapter_axes, init_adapters, merged
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.opening import closing, opening
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.run_log import RunLog
from jaxrl_llm.settings import Settings
from jaxrl_llm.training import collect
from jaxrl_llm.training.checks import check_updates
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import Layout, groups_of, lay_out, minibatches
from jaxrl_llm.training.optimizer import make_optimizer, make_schedule
from jaxrl_llm.training.routing_diagnostics import diagnose
from jaxrl_llm.training.state import TrainState, join, make_state, with_value_head
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.warm_start import warm_start

__all__ = ["Run", "Stopped", "base_digest", "build", "check_base", "exported_params", "layouts", "train"]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a run is made of, from its settings alone.

    base: the frozen parameters under the adapters of LoRA, once `start` has loaded them; None without adapters.
    """

    settings: Settings
    model: Model
    learner: Learner
    scorer: Scorer
    engine: Engine
    base: Any = None

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Reads the held-out prompts, which are made where they are not there yet."""
        s = self.settings
        held_out = tasks.all_prompts(s.task, "test", limit=s.evaluation.prompts, data_dir=s.data_dir)
        return Evaluator(self.model, s.task, held_out, s.evaluation.samples, s.answer_length, s.rollout.slots)

    def read_data(self) -> None:
        """Raises ValueError where prompts are missing or longer than the run allows."""
        s = self.settings
        if s.rollout.max_prompt_length:
            tasks.all_prompts(s.task, "train", data_dir=s.data_dir)
        _ = self.evaluator

    def start(self, log: Callable[[str], None]) -> tuple["Run", TrainState]:
        """(the run with its base, the state before the first update): warm-started, from the cache if it is there."""
        s = self.settings
        params = warm_start(
            self.model,
            s.task,
            s.warm_start,
            data_dir=s.data_dir,
            pretrained=s.pretrained,
            evaluate=self.evaluator.pass_rate,
            evaluated_on={"prompts": s.evaluation.prompts, "samples": s.evaluation.samples, "tokens": s.answer_length},
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
        if s.critic.kind == "none":
            return make_state(self.model, params, learner.optimizer, axes=axes)
        valued = with_value_head(jax.tree.map(lambda x: x.copy(), params), s.model.hidden_size)
        if s.critic.kind == "head":
            return make_state(self.model, valued, learner.optimizer, axes=axes)
        return make_state(self.model, params, learner.optimizer, valued, learner.critic_optimizer, axes)

    def memory(self) -> Memory:
        """What training needs of each device."""
        return needed(self.settings, self.learner, jax.eval_shape(self.blank))

    def prompts(self) -> tasks.PromptStream:
        s = self.settings
        return tasks.prompts(s.task, "train", seed=s.seed, batch_size=s.rollout.prompts, data_dir=s.data_dir)


def build(s: Settings, devices: Sequence[Any] | None = None) -> Run:
    """The compiled functions and fixed data of a run; devices: of another machine, to compile for it without data."""
    mesh = sharding.make_mesh(s.mesh.shape, devices)
    model = Model(s.model, mesh)
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
    # One update a rollout, nothing to replay and no values: its own forward is pi_old.
    first_forward = n == 1 and s.replay.mode == "off" and not {"values", "router_logprobs"} & s.objective.needs
    run = Run(
        settings=s,
        model=model,
        learner=learner,
        scorer=Scorer(learner, s.replay, s.rollout.group_size, first_forward),
        engine=Engine(
            model,
            s.rollout.sampling,
            s.rollout.group_size,
            s.answer_length,
            s.task.tokenizer.end_ids,
            slots=s.rollout.slots,
            dtype=s.rollout.dtype,
            record_routing=s.model.num_moe_layers > 0,
            record_router_logits=s.replay.mode == "R3" and s.replay.what == "logits",
        ),
    )
    if devices is None:  # data that are missing or do not fit are found now, not at the step that needs them
        run.read_data()
    return run


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


class Stopped(KeyboardInterrupt):
    """A signal ended the run: saved, after a step and its checkpoint, or at once."""

    def __init__(self, text: str, number: int, saved: bool = False):
        super().__init__(text)
        self.signal, self.saved = number, saved


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
    log.note(opening(settings, run.model, run.memory(), log.workdir))
    checkpoints = Checkpoints(log.workdir, settings.checkpoint.keep)
    (run, state), stream, first = run.start(log.note), run.prompts(), 0
    base, reference = base_digest(run), _reference(run, state, log)
    if checkpoints.latest is not None:
        first, state, extra = checkpoints.restore(state, note=log.note)
        if extra["config_hash"] != config_hash:
            raise ValueError(f"{log.workdir} holds the checkpoint of another config; use another --workdir")
        check_base(base, extra)
        checkpoints.set_aside(after=first)
        stream.set_state(extra["stream"])
        log.note(f"resumed from step {first}")
    log.cut(first if checkpoints.latest is not None else -1)
    late: _Late | None = None
    evaluated = (
        run.evaluator(exported_params(run, state))[0] if first >= settings.steps > 0 else {}
    )  # complete before it began
    if first == 0:
        evaluated = _evaluate(run, state, log, 0)
        log.metrics(0, evaluated)
    with _interruptible() as interrupted:
        for step in range(first + 1, settings.steps + 1):
            state, current = _step(run, state, reference, stream, step)
            if step == first + 1:
                current.host["time/to_first_update_s"] = time.monotonic() - began
            if late is not None:
                late.write(log, settings)
            late = current
            last = step == settings.steps
            if last or step % settings.evaluation.every == 0:
                evaluated = _evaluate(run, state, log, step)
                late.host |= evaluated
            stop = processes.largest(interrupted())
            if last or stop or step % settings.checkpoint.every == 0:
                late.write(log, settings)
                late = None
                extra = {"config_hash": config_hash, "base": base, "stream": stream.get_state()}
                checkpoints.save(step, state, extra)
            if stop and not last:
                checkpoints.close()
                raise Stopped(f"stopped after step {step}", stop, saved=True)
    checkpoints.close()
    log.screen.end(closing(log.workdir))
    return evaluated


@dataclasses.dataclass
class _Late:
    """The metrics of a step, fetched while the next one runs."""

    step: int
    host: dict[str, Any]
    scored: dict[str, M.Metric]
    updates: list[dict[str, M.Metric]]
    samples: list[dict[str, Any]]

    def write(self, log: RunLog, settings: Settings) -> None:
        scored, updates = processes.fetch((self.scored, self.updates))
        each = [M.finalize(update) for update in updates]
        values = M.finalize(M.merge([scored, *updates])) | {
            key: value
            for key, value in each[0].items()
            if key.startswith("check/")  # only the first update's
        }
        name = "routing/flips_old_current_by_layer"
        if name in values:
            values["routing/flips_old_current_by_update"] = [update[name] for update in each]  # pyright: ignore
            # The first update has the same parameters as the scoring pass, so any difference is rounding.
            values["routing/flips_numeric"] = each[0]["routing/flips_old_current"]
        log.metrics(self.step, {**values, **self.host})
        # Adapters are merged in the dtype of the weights: in bfloat16 that is what is sampled from.
        merged_dtype = settings.model.param_dtype if settings.lora.rank else "float32"
        check_updates(
            self.step,
            M.finalize(scored),
            each,
            dtype=settings.model.dtype,
            sampler_dtype=settings.rollout.dtype if merged_dtype == "float32" else merged_dtype,
            truncated=settings.rollout.allow_truncated,
            answers=settings.rows,
        )
        log.samples(self.step, self.samples)


def _step(
    run: Run, state: TrainState, reference: Any, stream: tasks.PromptStream, step: int
) -> tuple[TrainState, _Late]:
    """One rollout and its N updates. The policies score the answers while the verifier still looks at them."""
    s, start = run.settings, time.monotonic()
    key = jax.random.fold_in(jax.random.key(s.seed), step)
    params = exported_params(run, state)
    asked = collect.begin(run.engine, params, stream, s.task, key, s.dynamic_sampling, s.rewards, samples=s.log.samples)
    del params  # of adapters this is a copy
    sampled = time.monotonic()
    epochs = layouts(s, asked.trajectory, step)
    scores = run.scorer.score(state, reference, asked.trajectory, epochs[0], run.base)
    dispatched = time.monotonic()
    rollout = asked.finish()
    waited = time.monotonic() - dispatched
    experience = run.scorer.experience(rollout.trajectory, scores)
    every = s.log.diagnostics_every
    diagnosed = bool(every) and step % every == 0 and experience.batch.routing.scored is not None
    old_params = jax.tree.map(lambda x: x.copy(), state.params) if diagnosed else None
    updates = []
    for layout in (layout for epoch in epochs for layout in epoch):
        state, metrics = run.learner.update(state, experience.batch, layout, run.base)
        updates.append(metrics)
    scored = experience.metrics
    if diagnosed:
        scored = scored | diagnose(run.learner, state.params, old_params, experience.batch, epochs[0], run.base)
    jax.block_until_ready(state.updates)
    n = s.updates.updates_per_rollout
    host = rollout.metrics | {
        # of the last update
        "optimizer/learning_rate": float(np.asarray(make_schedule(s.optimizer, n * s.steps)(n * step - 1))),
        "rollout/tokens_per_s": rollout.tokens / (sampled - start),
        "time/rollout_s": sampled - start,
        "time/update_s": time.monotonic() - sampled,
        "time/verifier_s": waited,
    }
    return state, _Late(step, host, scored, updates, rollout.samples)


def layouts(s: Settings, trajectory: Trajectory, step: int) -> list[list[Layout]]:
    """The micro-batches of every minibatch, by epoch; each epoch has a permutation of its own."""
    held, masks = (np.asarray(x) != 0 for x in processes.fetch((trajectory.segment_ids, trajectory.loss_mask)))
    lengths = held.sum(1)
    groups = groups_of(masks, lengths, s.rollout.group_size, s.answer_length)
    return [
        [
            lay_out(rows, lengths, held.shape[1], s.updates, groups)
            for rows in minibatches(
                np.random.default_rng([s.seed, step, epoch]), s.rows, s.rollout.group_size, s.updates
            )
        ]
        for epoch in range(s.updates.epochs)
    ]


def _evaluate(run: Run, state: TrainState, log: RunLog, step: int) -> dict[str, Any]:
    metrics, rows = run.evaluator(exported_params(run, state))
    log.samples(step, [row | {"split": "test"} for row in rows[: run.settings.log.samples]])
    return metrics


def _reference(run: Run, state: TrainState, log: RunLog) -> Any:
    """pi_ref = the policy before the first update, kept in the DIR so that a resume uses the same one.

    With adapters it is the base, that is adapters that change nothing: no file is needed, and the program that scores
    the policy serves it too.
    """
    if "ref_logprobs" not in run.settings.objective.needs:
        return None
    if run.base is not None:
        return jax.tree.map(lambda x: x.copy(), state.params)
    folder = log.workdir / "reference"
    save_tree(folder, state.params)
    return load_tree(folder, state.params)


@contextmanager
def _interruptible() -> Iterator[Callable[[], int]]:
    """Gives the number of the signal that asked to stop, 0 so far.

    Ctrl-C and SIGTERM end the run after its current step; a second one ends it at once.
    """
    asked = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise Stopped("stopped at once", number)
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
