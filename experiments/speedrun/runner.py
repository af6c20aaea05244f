"""One contestant of the race: rollout by rollout in turns, with its CPU seconds and its held-out accuracy."""

import argparse
import time

import jax

from experiments.performance.turns import Turns
from experiments.speedrun.race import fields_of, settings_of
from jaxrl_llm.config import start_up
from jaxrl_llm.run import assembly
from jaxrl_llm.run.trainer import take_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entry", required=True, help="JSON of fields")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    start_up.start_jax()
    run = assembly.build(settings_of(fields_of(given.entry), given.seed))
    turns = Turns()
    turns.begin()
    began = time.process_time()
    _rehearse(run)
    state, stream = run.start(print), run.source.stream()
    turns.end(cpu_s=time.process_time() - began, accuracy=run.pass_rates(state)[0]["eval/pass_at_1"])
    for step in range(1, run.settings.steps + 1):
        turns.begin()
        began = time.process_time()
        state, pending = take_step(run, state, stream, step)
        pending.row()
        jax.block_until_ready(state)
        seconds = time.process_time() - began
        pending.check()
        turns.end(cpu_s=seconds, accuracy=run.pass_rates(state)[0]["eval/pass_at_1"])


def _rehearse(run: assembly.Run) -> None:
    """The first rollout with its updates, and an evaluation, on a state that is thrown away: programs compile here."""
    state, pending = take_step(run, run.start(print), run.source.stream(), 1)
    pending.row()
    run.pass_rates(state)


if __name__ == "__main__":
    main()
