"""Our own run of the comparison: the trainer's parts, step by step in turns, with rewards and CPU seconds."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from experiments.performance.turns import Turns
from jaxrl_llm.check.fits import fits
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.run import assembly, settings
from jaxrl_llm.training.state import settled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="JSON of compare.py: the configuration and its overrides")
    work = json.loads(Path(parser.parse_args().work).read_text())
    start_up.start_jax()
    s = settings.validate(loading.load(loading.find(work["config"]), work["overrides"]))
    run = assembly.build(s)
    print(" ".join(fits(run).lines()), file=sys.stderr)
    state = settled(run.start(print))
    source: Any = run.source
    source = dataclasses.replace(source, engine=dataclasses.replace(source.engine, end_ids=tuple(work["end_ids"])))
    stream, turns = run.source.stream(), Turns()
    for step in range(1, s.steps + 1):
        turns.begin()
        clock, marks = time.perf_counter(), [time.process_time()]
        rollout = source.judged(source.sample(stream, step, state)).rollout
        marks.append(time.process_time())
        layouts = source.layouts(rollout, step)
        batch, _ = source.scorer.experience(source.scorer.score(state, None, rollout, layouts[0]))
        marks.append(time.process_time())
        for layout in (layout for epoch in layouts for layout in epoch):
            state, _ = run.learner.update(state, batch, layout)
        jax.block_until_ready(state)
        marks.append(time.process_time())
        turns.end(
            rollout_cpu_s=marks[1] - marks[0],
            score_cpu_s=marks[2] - marks[1],
            train_cpu_s=marks[3] - marks[2],
            wall_s=time.perf_counter() - clock,
            reward=rollout.metrics["reward/mean"],
        )


if __name__ == "__main__":
    main()
