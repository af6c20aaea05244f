"""Whole runs in their smallest form: settings, a DIR, and what the tests read from it."""

import contextlib
import importlib
import io
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import RunLog, plain, read_rows, write_json
from jaxrl_llm.run import assembly, trainer
from jaxrl_llm.run.settings import config_hash, validate


def make_config(folder, name="grpo", **changes):
    """The smoke config of a recipe with fields set by path, data and warm starts in `folder`."""
    config = importlib.import_module(f"configs.{name}").get_config("smoke")
    defaults = {
        "task.data_dir": str(Path(folder) / "data"),
        "warm_start.cache_dir": str(Path(folder) / "cache"),
        "warm_start.steps": 50,
        "rollout.prompts": 16,
        "rollout.group_size": 8,
        "optimizer.learning_rate": 1e-3,
        "evaluation.prompts": 16,
        "evaluation.every": 100,
        "steps": 4,
    }
    with config.unlocked():
        config.update_from_flattened_dict(defaults | changes)
    return config


def train(workdir, config, start=None):
    """Run or resume the DIR; returns the last evaluation and what was printed. `start` replaces the warm start."""
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        if start is not None:
            stack.enter_context(mock.patch.object(assembly, "warm_start", return_value=start))
        log = stack.enter_context(RunLog(workdir, config.steps, stream=said))
        found = trainer.train(assembly.build(validate(config)), log, config_hash(config))
    return found, said.getvalue()


def start_of(config):
    """The warm-started parameters of a run, on the host."""
    return jax.device_get(assembly.build(validate(config)).start(print).trained.policy)


def final_state(workdir, config):
    """(step, state) of the newest checkpoint."""
    step, saved, _ = Checkpoints(workdir).restore(assembly.build(validate(config)).blank().saved())
    return step, jax.device_get(saved)


def metrics(workdir):
    """Rows of metrics.jsonl without what depends on the clock."""
    timed = ("time/", "rollout/tokens_per_s")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in read_rows(Path(workdir) / "metrics.jsonl")
    ]


def samples(workdir):
    return read_rows(Path(workdir) / "samples.jsonl")


def assert_resumes_as(straight, workdir):
    """The run of `straight` (config, DIR, last evaluation, ...), stopped in `workdir` after step 2, ends as it did.

    Row 2 is left out: a run ends with an evaluation, and the shorter one ended there.
    """
    config, whole, evaluation, *_ = straight
    shorter = config.copy_and_resolve_references()
    shorter.steps = 2
    train(workdir, shorter)
    assert train(workdir, config)[0] == evaluation
    (_, ours), (_, theirs) = (final_state(place, config) for place in (workdir, whole))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    rows, expected = ([row for row in metrics(place) if row["step"] != 2] for place in (workdir, whole))
    assert rows == expected


def assert_parts_are_the_whole(folder, make):
    """The run of `make(steps=...)`, ended after step 1 and gone on to 3, is the one without a break."""
    whole, parts = make(steps=3), make(steps=1)
    train(folder / "whole", whole)
    train(folder / "parts", parts)
    train(folder / "parts", whole)
    (step, state), (last, wanted) = (final_state(folder / part, whole) for part in ("parts", "whole"))
    assert step == last == 3
    jax.tree.map(np.testing.assert_array_equal, state, wanted)


def write_config(workdir, config):
    """Write config.json, from which commands open a DIR."""
    Path(workdir).mkdir(parents=True, exist_ok=True)
    held = {"format": FORMAT, "config": plain(config.to_dict()), "config_hash": config_hash(config)}
    write_json(Path(workdir) / "config.json", held)


def untrained(workdir, config):
    """The DIR of a run at step 1 that has learned nothing; returns its run and its state."""
    run = assembly.build(validate(config))
    state = run.start(lambda text: None)
    write_config(workdir, config)
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, state.saved(), {})
    checkpoints.close()
    return run, state
