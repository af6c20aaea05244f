"""Fork states of one run into arms: what one rollout does, with everything before it shared.

    python -m jaxrl_llm.sweep.branching --config FILE --workdir DIR --branches '{"first": 1, "every": 1, "rollouts": 1,
        "arms": {"GRPO": {"objective.name": "grpo"}, "GSPO": {"objective.name": "gspo"}}}' [--config.field=value ...]

A sweep with `branching` writes such lines (sweep.py). The config with its fields is the run of the trajectory; an arm
is the config with the arm's fields. From each chosen state every arm takes one or a few rollouts with the same prompts
and sampling keys, and is evaluated on the held-out prompts. The first rollout is sampled once for all arms that sample
it alike: they have the same parameters and keys. DIR holds what a run's DIR holds, of the trajectory, and

    branches.jsonl  of each state a row {"state": 4, "arm": "", "step": 0, "eval/greedy": ...} with its own evaluation,
                    and for every arm one row a rollout, the last of them with the evaluation of its end

The same command goes on from the newest checkpoint of the trajectory; rows that it will write again are cut.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm.config import loading, start_up
from jaxrl_llm.config.command_line import FAILED, REFUSED, Parser, complain, fields_and_rest
from jaxrl_llm.records import provenance
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.run_log import RunLog, add_rows, keep_rows, read_json, read_rows
from jaxrl_llm.run.trainer import Run, build, exported_params, update
from jaxrl_llm.sweep.forks import Plan, plan
from jaxrl_llm.training import collect
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.sources import Drawn
from jaxrl_llm.training.state import TrainState

__all__ = ["Trajectory", "main"]


@dataclasses.dataclass(frozen=True)
class _Sampled:
    """A verified rollout and where the prompts stand after it."""

    rollout: collect.Collected
    stream: dict[str, Any]


class Trajectory:
    """The runs of a trajectory and of its arms, in one process: they share the compiled rollout and evaluation."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.parent = build(plan.parent.settings)
        self.arms = {arm: build(setup.settings) for arm, setup in plan.arms.items()}
        self.stream = self.parent.source.stream()
        self.reference: Any = None

    def run(self, log: RunLog) -> dict[str, Any]:
        """Take the trajectory to its end, branch from its states, and return the last evaluation of a state."""
        settings, identity, branching = self.parent.settings, self.plan.identity, self.plan.branching
        self.parent, state = self.parent.start(log.note)
        self.arms = {arm: dataclasses.replace(run, base=self.parent.base) for arm, run in self.arms.items()}
        self._check_structures(state)
        if any("ref_logprobs" in run.settings.objective.needs for run in (self.parent, *self.arms.values())):
            self.reference = _copy(state.params)
        checkpoints, done = Checkpoints(log.workdir, settings.checkpoint.keep), 0
        if checkpoints.latest is not None:
            done, state, extra = checkpoints.restore(state, note=log.note)
            if extra["config_hash"] != identity:
                raise ValueError(f"{log.workdir} holds the checkpoint of other branches; use another --workdir")
            checkpoints.set_aside(after=done)
            self.stream.set_state(extra["stream"])
            log.note(f"resumed from rollout {done}")
        log.cut(done if checkpoints.latest is not None else -1)
        branches, writes = log.workdir / "branches.jsonl", jax.process_index() == 0
        if writes:
            keep_rows(branches, lambda row: row["state"] < done)
        before = [row for row in read_rows(branches) if not row["arm"]]
        evaluated = {name: x for name, x in before[-1].items() if name.startswith("eval/")} if before else {}
        states = branching.states(settings.steps)
        for step in range(done, settings.steps):
            place, sampled = self.stream.get_state(), {}
            after, values = self._rollout(self.parent, _copy(state), step + 1, sampled)
            ahead = self.stream.get_state()
            if step in states:
                evaluated = self._evaluated(state)
                rows = [{"state": step, "arm": "", "step": 0, **evaluated}]
                for arm, run in self.arms.items():
                    self.stream.set_state(place)
                    if arm == self.plan.baseline and branching.rollouts == 1:
                        taken = [{"step": 1, **values, **self._evaluated(after)}]
                    else:
                        taken = self._branch(run, state, step, sampled)
                    rows += [{"state": step, "arm": arm, **row} for row in taken]
                if writes:
                    add_rows(branches, rows)
            self.stream.set_state(ahead)
            state = after
            log.metrics(step + 1, values)
            if step + 1 == settings.steps or (step + 1) % settings.checkpoint.every == 0:
                extra = {"config_hash": identity, "stream": self.stream.get_state()}
                checkpoints.save(step + 1, state, extra)
        checkpoints.close()
        return evaluated

    def _branch(self, run: Run, state: TrainState, first: int, sampled: dict[Any, _Sampled]) -> list[dict[str, Any]]:
        """One row a rollout of a branch; one whose numbers are not finite ends it, without an evaluation."""
        rows, state = [], _copy(state)
        for i in range(1, self.plan.branching.rollouts + 1):
            try:
                state, values = self._rollout(run, state, first + i, sampled if i == 1 else {})
            except FloatingPointError as error:
                return [*rows, {"step": i, "failed": str(error)}]
            rows.append({"step": i, **values})
        rows[-1] |= self._evaluated(state)
        return rows

    def _rollout(
        self, run: Run, state: TrainState, step: int, sampled: dict[Any, _Sampled]
    ) -> tuple[TrainState, dict[str, Any]]:
        """A rollout with its updates and what they measured; `sampled` keeps it for those who sample alike."""
        source = run.source
        assert isinstance(source, Rollouts), "checked by the plan"
        how = (source.engine, source.sampling, source.rewards)
        if how not in sampled:
            asked = source.sample(self.stream, step, exported_params(run, state))
            sampled[how] = _Sampled(asked.finish(), self.stream.get_state())
        rollout = sampled[how].rollout
        self.stream.set_state(sampled[how].stream)
        epochs = source.layouts(rollout.trajectory, step)
        experience = source.scorer(state, self.reference, rollout.trajectory, epochs[0], run.base)
        drawn = Drawn(experience.batch, epochs, experience.metrics | rollout.sources, rollout.metrics)
        state, pending = update(run, state, drawn, step)
        pending.check()
        return state, pending.row()

    def _evaluated(self, state: TrainState) -> dict[str, Any]:
        return self.parent.evaluator(exported_params(self.parent, state))[0]

    def _check_structures(self, state: TrainState) -> None:
        for arm, run in self.arms.items():
            own = jax.eval_shape(run.blank)
            if jax.tree.structure(own) != jax.tree.structure(state):
                raise ValueError(
                    f"arm {arm!r} keeps another state than the trajectory (its optimizer has other parts); give both "
                    "the same optimizer.clip_norm and optimizer.schedule"
                )


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy(), tree)  # updates donate the state


def main(arguments: Sequence[str] | None = None) -> int:
    """Branch off the trajectory of a DIR, or resume it; returns the exit code (see command_line.py)."""
    parser = Parser(prog="python -m jaxrl_llm.sweep.branching", description="Fork states of one run into arms.")
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument("--workdir", required=True, help="DIR of the trajectory; the same command resumes it")
    parser.add_argument("--branches", required=True, help="JSON: first, every, rollouts and the fields of each arm")
    with contextlib.ExitStack() as stack:
        try:
            fields, rest = fields_and_rest(sys.argv[1:] if arguments is None else arguments)
            given = parser.parse_args(rest)
            planned = plan(given.config, fields, given.branches)
            start_up.start_jax()
            steps = planned.parent.settings.steps
            log = stack.enter_context(RunLog(given.workdir, steps, write=start_up.is_first()))
            recorded = read_json(log.workdir / "config.json")
            if recorded is not None and recorded["config_hash"] != planned.identity:
                raise ValueError(f"{log.workdir} holds other branches; give another --workdir")
            trajectory = Trajectory(planned)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            return complain(error, REFUSED)
        try:
            source = loading.find(given.config)
            record = provenance.describe(planned.parent.config, planned.identity, source)
            log.write_config(record | {"arms": {arm: setup.config for arm, setup in planned.arms.items()}})
            log.result(trajectory.run(log))
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from the newest checkpoint")
            return 130
        except (ValueError, OSError, FloatingPointError) as error:
            return complain(error, FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
