"""A program with the manners of jaxrl_llm.main and no learning: it logs, resumes, refuses, crashes and waits as told.

Run as `python -m fake_program --config=FILE --workdir=DIR --config.field=value ...`. It takes `steps`, `seed` and the
fields below: crash.at, diverge.at and wait.at (steps), wait.for (a file whose appearance ends the wait), wait.stubborn
(no signal ends it but a second one).
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from jaxrl_llm.ground.signals import end_at_once, interruptible
from jaxrl_llm.records import run_log
from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.sweep.__main__ import Program
from jaxrl_llm.sweep.__main__ import main as sweep


class NoTensorBoard:
    """Stands in for TensorBoard, whose library takes ten times as long to load as such a run takes."""

    def __init__(self, workdir):
        self.config = self.metrics = self.cut = self.close = lambda *_: None


def parse(overrides):
    pairs = (one.removeprefix("--config.").split("=", 1) for one in overrides)
    fields = {"steps": "4", "crash.at": "-1", "diverge.at": "-1", "wait.at": "-1"} | dict(pairs)
    if "broken" in fields:
        raise ValueError("broken=1 is refused; remove it")
    kept = {key: value for key, value in fields.items() if key not in ("steps", "checkpoint.keep")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    return fields, (digest, int(fields["steps"]))


PROGRAM = Program("fake_program", lambda config, overrides: parse(overrides)[1])


def main(arguments):
    run_log.TensorBoard = NoTensorBoard  # in the processes of runs; tests import this file too
    workdir = Path(next(one for one in arguments if one.startswith("--workdir=")).removeprefix("--workdir="))
    fields, (digest, steps) = parse([one for one in arguments if one.startswith("--config.")])
    with RunLog(workdir, steps) as log:
        done = max((row["step"] for row in read_rows(workdir / "metrics.jsonl")), default=-1)
        log.cut(done)
        log.write_config({"config_hash": digest, "config": fields})
        with open(workdir / "starts.txt", "a") as starts:
            affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
            machine = {"cores": affinity, "threads": os.environ["OMP_NUM_THREADS"], "process": os.getpid()}
            starts.write(json.dumps({"from": done, **machine}) + "\n")
        for step in range(done + 1, steps + 1):
            if step == int(fields["crash.at"]):
                raise RuntimeError(f"told to crash at step {step}")
            if step == int(fields["diverge.at"]):
                sys.exit(f"error: step {step}, update 1 of 4: the loss or gradient is not finite (loss nan)")
            with interruptible() if "wait.stubborn" in fields else contextlib.nullcontext():
                while step == int(fields["wait.at"]) and not Path(fields["wait.for"]).exists():
                    (workdir / "waits").touch()
                    time.sleep(0.02)
            log.metrics(step, {"reward/mean": step / 10, "time/at": time.time()})
        log.result({})
    return 0


if __name__ == "__main__":
    # `python -m fake_program sweep ...` is the sweep's own command line over this program.
    if sys.argv[1] == "sweep":
        end_at_once()
        sys.exit(sweep(sys.argv[2:], PROGRAM))
    sys.exit(main(sys.argv[1:]))
