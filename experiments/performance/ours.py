"""jaxrl_llm on a workload: its own rollout engine, scorer and learner, as `trainer.py` puts them together."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.performance import workload as workloads
from experiments.performance.turns import Turns
from experiments.performance.workload import Workload
from jaxrl_llm import objectives
from jaxrl_llm.config import start_up
from jaxrl_llm.models import Model, ModelConfig, Rows
from jaxrl_llm.rollout import engine as engine_module
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import UpdateConfig, lay_out
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import TrainState, make_state, settled
from jaxrl_llm.training.step import Learner

__all__ = ["Options", "System", "timed_step"]

_DIGITS = (2 + ord("0") - 32, 2 + ord("9") - 32)  # token ids of the digits: 2 + place in printable ASCII


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings that a sweep varies beside the workload."""

    replay: str = "off"
    record_routing: bool = True
    slots: int = 0
    layout: Rows = "padded"
    micro_batch_rows: int = 0
    dtype: str = "float32"
    experts: str = "auto"
    numerics: str = "fast"


class System:
    """Model, optimizer state and the compiled functions of one workload."""

    def __init__(self, workload: Workload, options: Options = Options()):
        self.workload, self.options = workload, options
        w = workload
        config = ModelConfig(
            vocab_size=w.V,
            num_hidden_layers=w.L,
            hidden_size=w.d,
            intermediate_size=w.ff,
            num_attention_heads=w.H,
            num_key_value_heads=w.KV,
            head_dim=w.hd,
            num_experts=w.E,
            num_experts_per_tok=w.k,
            moe_intermediate_size=w.ff,
            param_dtype=options.dtype,
            dtype=options.dtype,
            experts_implementation=options.experts,
            numerics=options.numerics,
        )
        model = Model(config)
        self.learner = Learner(
            model=model,
            objective=objectives.make("grpo"),
            optimizer=optax.adamw(1e-4),
            rows=options.layout,
        )
        first_forward = options.replay == "off"
        self.scorer = Scorer(self.learner, ReplayConfig(options.replay, "experts"), w.G, first_forward)
        self.engine = Engine(
            model,
            Sampling(),
            w.G,
            w.C,
            end_ids=(w.V,),  # outside the vocabulary: never sampled, an answer ends at its limit
            slots=options.slots,
            dtype=options.dtype,
            record_routing=options.record_routing and w.E > 0,
        )
        rows = options.micro_batch_rows
        self.update = UpdateConfig(minibatches=1, micro_batch_rows=rows, layout=options.layout, length_buckets=4)
        self.state = settled(make_state(model, model.init_sharded(jax.random.key(0)), self.learner.optimizer))

    def rollout(self, step: int) -> Rollout:
        """Sampled answers to NP prompts, waited for."""
        w = self.workload
        prompts = np.asarray([[ord(c) - 30 for c in text] for text in w.prompts(w.NP, seed=step)], np.int32)
        lengths = np.full(w.NP, w.P, np.int32)
        limits = np.asarray(w.answer_lengths(), np.int32)
        key = jax.random.key(step)
        trajectory = self.engine.generate(self.state.trained.policy, prompts, lengths, np.arange(w.NP), key, limits)
        return jax.block_until_ready(trajectory)

    def rewarded(self, trajectory: Rollout) -> Rollout:
        tokens, mask = np.asarray(trajectory.tokens), np.asarray(trajectory.loss_mask)
        digits = (tokens >= _DIGITS[0]) & (tokens <= _DIGITS[1]) & mask
        rewards = digits.sum(1) / np.maximum(mask.sum(1), 1)
        return trajectory.replace(rewards=jnp.asarray(rewards, jnp.float32))

    def experience(self, trajectory: Rollout) -> tuple[Any, Any]:
        """The scored batch (no scoring pass for one update a rollout without replay) and its micro-batches."""
        lengths = (np.asarray(trajectory.segment_ids) != 0).sum(1)
        layout = lay_out(np.arange(self.workload.rows), lengths, trajectory.tokens.shape[1], self.update)
        scored = self.scorer.score(self.state, None, trajectory, [layout])
        return self.scorer.experience(scored)[0], layout

    def compiled(self, phase: str) -> tuple[Callable[[], Any], str]:
        """A function that runs the compiled update (or rollout) once more, and the text of its program."""
        trajectory = self.rewarded(self.rollout(0))
        if phase == "rollout":
            w = self.workload
            args = (self.state.trained.policy, np.ones((w.NP, w.P), np.int32), np.full(w.NP, w.P, np.int32))
            args = (*args, np.arange(w.NP), np.asarray(w.answer_lengths(), np.int32), jax.random.key(0))
            program = engine_module._generate.lower(self.engine, w.P, *args).compile()
            return lambda: program(*args), program.as_text() or ""
        batch, layout = self.experience(trajectory)
        program = self.learner.trace_update(self.state, batch, layout).lower().compile()

        def run() -> TrainState:
            self.state, _ = program(self.state.replace(base=None), self.state.base, batch.by_token, layout, None)
            return self.state

        return run, program.as_text() or ""

    def train(self, batch: Any, layout: Any) -> TrainState:
        self.state, _ = self.learner.update(self.state, batch, layout)
        return jax.block_until_ready(self.state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    for field in dataclasses.fields(Options):
        kind = (lambda text: text == "True") if isinstance(field.default, bool) else type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    workload = workloads.load(arguments.pop("workload"))
    start_up.start_jax()
    turns, step = Turns(), 0
    system = System(workload, Options(**arguments))
    while True:
        turns.begin()
        turns.end(**timed_step(system, step))
        step += 1


def timed_step(system: System, step: int) -> dict[str, float]:
    """One rollout, its scoring and one update; CPU seconds of each."""
    clock, marks = time.perf_counter(), [time.process_time()]
    trajectory = system.rollout(step)
    marks.append(time.process_time())
    batch, layout = jax.block_until_ready(system.experience(system.rewarded(trajectory)))
    marks.append(time.process_time())
    system.train(batch, layout)
    marks.append(time.process_time())
    return {
        "rollout_cpu_s": marks[1] - marks[0],
        "score_cpu_s": marks[2] - marks[1],
        "train_cpu_s": marks[3] - marks[2],
        "tokens": int(np.sum(trajectory.loss_mask)),
        "wall_s": time.perf_counter() - clock,
    }


if __name__ == "__main__":
    main()
