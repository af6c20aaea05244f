"""Fork states of one run into arms: what one rollout does, with everything before it shared.

    python -m jaxrl_llm.sweep.branching --config FILE --workdir DIR --branches '{"first": 1, "every": 1, "rollouts": 1,
        "arms": {"GRPO": {"objective.name": "grpo"}, "GSPO": {"objective.name": "gspo"}}}' [--config.field=value ...]

A sweep with `branching` writes such lines (docs/sweeps.md). The config with its fields is the run of the trajectory; an
arm is the config with the arm's fields. DIR holds what a run's DIR holds, of the trajectory, and

    branches.jsonl  of each state a row {"state": 4, "arm": "", "step": 0, "eval/greedy": ...} with its own evaluation,
                    and for every arm one row a rollout, the last of them with the evaluation of its end, and those
                    that `evaluate` names with their own

The same command goes on from the newest checkpoint of the trajectory; rows that it will write again are cut.
"""

import dataclasses
import sys
from typing import Any

import jax

from jaxrl_llm.check import doubts
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.config.command_line import Parser, fields_and_rest
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.ground.machine import folder_of_its_own
from jaxrl_llm.records import provenance
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.recorded import first_day, saved_hash
from jaxrl_llm.records.run_log import RunLog, add_rows, keep_rows, read_json, read_rows
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.trainer import take_step
from jaxrl_llm.sweep.forks import Plan, plan
from jaxrl_llm.training import collect
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class _Shared(Rollouts):
    """The first rollout of every arm: sampled once for all that sample alike, since they have the same parameters."""

    # {how: (draw, where the prompts stand after it)} of the state that the arms fork from
    sampled: dict[Any, tuple[collect.Draw, Any]] = dataclasses.field(default_factory=dict)

    def sample(self, stream: Any, step: int, state: TrainState) -> collect.Draw:
        how = (self.engine, self.sampling, self.rewards)
        if how not in self.sampled:
            draw = super().sample(stream, step, state)
            self.sampled[how] = (draw, stream.get_state())
        draw, after = self.sampled[how]
        stream.set_state(after)
        return draw


def _sharing(run: Run, sampled: dict[Any, Any]) -> Run:
    """The run, whose source looks into `sampled` first."""
    source = run.source
    assert isinstance(source, Rollouts), "checked by the plan"
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return dataclasses.replace(run, source=_Shared(**fields, sampled=sampled))


class Trajectory:
    """The runs of a trajectory and of its arms, in one process: they share the compiled rollout and evaluation."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.parent = build(plan.parent.settings)
        self.arms = {arm: build(setup.settings) for arm, setup in plan.arms.items()}

    def run(self, log: RunLog) -> dict[str, Any]:
        """Take the trajectory to its end, branch from its states, and return the last evaluation of a state."""
        settings, identity, branching = self.parent.settings, self.plan.identity, self.plan.branching
        state, folder = self.parent.start(log.note), log.workdir / "reference"
        self._check_structures(state)
        parent = self.parent.started(state, folder)
        arms = {arm: run.started(state, folder) for arm, run in self.arms.items()}
        stream = parent.source.stream()
        checkpoints, done = Checkpoints(log.workdir, settings.checkpoint.keep), 0
        if checkpoints.latest is not None:
            done, saved, extra = checkpoints.restore(state.saved(), note=log.note)
            if extra["config_hash"] != identity:
                raise ValueError(f"{log.workdir} holds the checkpoint of other branches; use another --workdir")
            state = state.restored(saved)
            checkpoints.set_aside(after=done)
            stream.set_state(extra["stream"])
            log.note(f"resumed from rollout {done}")
        log.cut(done if checkpoints.latest is not None else -1, first=1)
        branches, writes = log.workdir / "branches.jsonl", jax.process_index() == 0
        if writes and (said := keep_rows(branches, lambda row: row["state"] < done)):
            log.note(said)
        before = [row for row in read_rows(branches) if not row["arm"]]
        evaluated = {name: x for name, x in before[-1].items() if name.startswith("eval/")} if before else {}
        states = branching.states(settings.steps)
        for step in range(done, settings.steps):
            place, sampled = stream.get_state(), {}
            after, values = _taken(_sharing(parent, sampled), _copy(state), stream, step + 1)
            if step in states:
                evaluated = self._evaluated(state)
                rows = [{"state": step, "arm": "", "step": 0, **evaluated}]
                for arm, run in arms.items():
                    if arm == self.plan.baseline and branching.rollouts == 1:
                        taken = [{"step": 1, **values, **self._evaluated(after)}]
                    else:
                        taken = self._branch(run, state, _forked(run, parent, place), step, sampled)
                    rows += [{"state": step, "arm": arm, **row} for row in taken]
                if writes:
                    add_rows(branches, rows)
            state = after
            log.metrics(step + 1, values)
            if step + 1 == settings.steps or (step + 1) % settings.checkpoint.every == 0:
                extra = {"config_hash": identity, "stream": stream.get_state()}
                checkpoints.save(step + 1, state.saved(), extra)
        checkpoints.close()
        return evaluated

    def _branch(
        self, run: Run, state: TrainState, stream: Any, first: int, sampled: dict[Any, Any]
    ) -> list[dict[str, Any]]:
        """One row a rollout of a branch; one whose numbers are not finite ends it, without an evaluation."""
        rows, state, branching = [], _copy(state), self.plan.branching
        for i in range(1, branching.rollouts + 1):
            try:
                state, values = _taken(run if i > 1 else _sharing(run, sampled), state, stream, first + i)
            except FloatingPointError as error:
                return [*rows, {"step": i, "failed": str(error)}]
            evaluated = self._evaluated(state) if i in (*branching.evaluate, branching.rollouts) else {}
            rows.append({"step": i, **values, **evaluated})
        return rows

    def _evaluated(self, state: TrainState) -> dict[str, Any]:
        return self.parent.pass_rates(state)[0]

    def _check_structures(self, state: TrainState) -> None:
        for arm, run in self.arms.items():
            own = jax.eval_shape(run.blank)
            if jax.tree.structure(own) != jax.tree.structure(state.replace(base=None)):
                raise ValueError(
                    f"arm {arm!r} keeps another state than the trajectory (its optimizer has other parts); give both "
                    "the same optimizer.clip_norm and optimizer.schedule"
                )


def _taken(run: Run, state: TrainState, stream: Any, step: int) -> tuple[TrainState, dict[str, Any]]:
    """A step of a run and its row, checked; times are left out, since arms share a rollout."""
    state, pending = take_step(run, state, stream, step)
    pending.check()
    timed = ("time/", "rollout/tokens_per_s")
    return state, {name: value for name, value in pending.row().items() if not name.startswith(timed)}


def _forked(run: Run, parent: Run, place: dict[str, Any]) -> Any:
    """A stream of an arm's own that goes on where the trajectory's stands.

    What rewards carry from rollout to rollout (a steered coefficient of the KL, the centre of a reward model's scores)
    is the trajectory's if the arm is rewarded alike; otherwise it begins anew.
    """
    stream = run.source.stream()
    ours: Any = run.settings
    theirs: Any = parent.settings
    alike = (ours.rewards, ours.objective.advantage) == (theirs.rewards, theirs.objective.advantage)
    stream.set_state(place if alike else stream.get_state() | {"prompts": place["prompts"]})
    return stream


def _copy(state: TrainState) -> TrainState:
    """Updates overwrite all of a state but its base."""
    return jax.tree.map(lambda x: x.copy(), state.replace(base=None)).replace(base=state.base)


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Branch off the trajectory of a DIR, or resume it; returns the exit code (see command_line.py)."""
    parser = Parser(prog="python -m jaxrl_llm.sweep.branching", description="Fork states of one run into arms.")
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument("--workdir", required=True, help="DIR of the trajectory; the same command resumes it")
    parser.add_argument(
        "--branches", required=True, help="JSON: first, every, rollouts, evaluate and the fields of each arm"
    )
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)
    workdir = folder_of_its_own(given.workdir)
    start_up.start_jax()
    planned = plan(given.config, fields, given.branches, first_day(workdir, workdir))
    if saved_hash(workdir) != planned.identity:
        recorded = read_json(workdir / "config.json")
        if steps_of(workdir) or (recorded or {}).get("config_hash", planned.identity) != planned.identity:
            raise ValueError(f"{workdir} holds other branches; give another --workdir")
    with RunLog(workdir, planned.parent.settings.steps, write=start_up.is_first()) as log:
        trajectory = Trajectory(planned)
        found = doubts.of_run(trajectory.parent)  # raises where every result would be wrong
        guard.started, guard.workdir = True, log.workdir
        record = provenance.describe(planned.parent.config, planned.identity, loading.find(given.config))
        log.write_config(record | {"arms": {arm: setup.config for arm, setup in planned.arms.items()}})
        log.warn(found.doubts)
        log.result(trajectory.run(log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
