"""Supervised training to a given pass rate, cached so that several runs share exactly the same start."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax

from jaxrl_llm import models, objectives, tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.ground.machine import cache_folder, usable_cores
from jaxrl_llm.models import Model
from jaxrl_llm.records.saved_trees import load_tree, save_tree
from jaxrl_llm.tasks.messages import GIVEN
from jaxrl_llm.training.answers import Answers
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.training.state import make_state, settled
from jaxrl_llm.training.step import Learner

_BEGUN = 8  # rows whose environments tell whether they begin as those of an earlier warm start did


@dataclasses.dataclass(frozen=True)
class WarmStartConfig(Block, prefix="warm_start."):
    """Supervised training before RL, cached and shared by equal runs."""

    steps: int = declared(160, "most steps; 0: start from scratch", least=0)
    target_pass_rate: float = declared(
        0.0, "stop as soon as sampled pass@1 reaches it; 0: take all steps", least=0, below=1
    )
    evaluate_every: int = declared(20, "steps between reports, with pass rates if there is a target", least=1)
    batch_size: int = declared(64, "answers per step", least=1)
    learning_rate: float = declared(3e-3, least=0)
    seed: int = declared(0, "seed of its parameters and batches, independent of the run's seed")
    cache_dir: str = declared("", "empty: the user's cache folder")


def warm_start(
    model: Model,
    task: tasks.Task,
    config: WarmStartConfig,
    *,
    data_dir: str | None = None,
    pretrained: str = "",
    evaluate: Callable[[Any], float] | None = None,
    evaluated_on: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> Any:
    """Parameters after supervised training on the task's own answers; from the cache if they are there.

    Adam, gradient norm clipped at 1, -mean log p of the answer's tokens (EOS included) over the batch.

    Args:
      pretrained: path of the checkpoint that training starts from; "": fresh parameters.
      evaluate: params -> sampled pass rate; called every `evaluate_every` steps if there is a target.
      evaluated_on: what that rate depends on besides the parameters; with a target, the result depends on it too.
    """

    def untrained() -> Any:
        return models.load_params(pretrained, model) if pretrained else model.init_sharded(jax.random.key(config.seed))

    if not config.steps:
        return untrained()
    folder = cached_in(model, task, config, pretrained=pretrained, evaluated_on=evaluated_on, data_dir=data_dir)
    with _held(folder):
        there = folder.exists()
        if processes.everywhere(there):
            log(f"warm start: from {folder}")
            return load_tree(folder, model.shapes())
        if not processes.everywhere(not there):
            raise ValueError(f"{folder} is there for some processes only; set warm_start.cache_dir to a folder of all")
        params = _train(model, task, config, untrained(), data_dir, evaluate, log)
        save_tree(folder, params)
        return params


def cached_in(
    model: Model,
    task: tasks.Task,
    config: WarmStartConfig,
    *,
    pretrained: str = "",
    evaluated_on: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
) -> Path:
    """Return the folder of these parameters, named by a hash of everything that they depend on.

    Arguments as for `warm_start`.
    """
    mesh = model.mesh.shape_tuple if model.mesh is not None else None
    depends_on = {
        **{name: value for name, value in dataclasses.asdict(config).items() if name != "cache_dir"},
        "model": dataclasses.asdict(model.config),
        "data": tasks.data_name(task),
        "cores": len(usable_cores()) if mesh is None else str(mesh),
        "evaluated_on": dict(evaluated_on or {}) if config.target_pass_rate else None,
        "jax": jax.__version__,
    }
    depends_on |= {"pretrained": models.fingerprint(pretrained)} if pretrained else {}
    if task.environment is not None:
        some = tasks.all_prompts(task, "train", limit=_BEGUN, data_dir=data_dir)
        said = [(text, row) for text, row in zip(some["prompt"], some["row"], strict=True) if GIVEN in row]
        depends_on |= {"first_messages": said} if said else {}
    text = json.dumps(depends_on, sort_keys=True, default=str)
    root = Path(config.cache_dir) if config.cache_dir else cache_folder()
    return root / "warm_start" / hashlib.sha256(text.encode()).hexdigest()[:24]


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other run reads or writes the folder meanwhile; of several processes, the first holds the lock for all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder.parent} cannot be written ({error}); set warm_start.cache_dir") from error
    with filelock.FileLock(f"{folder}.lock") if jax.process_index() == 0 else contextlib.nullcontext():
        processes.wait_for_all("warm_start")
        yield


def _train(
    model: Model,
    task: tasks.Task,
    config: WarmStartConfig,
    params: Any,
    data_dir: str | None,
    evaluate: Callable[[Any], float] | None,
    log: Callable[[str], None],
) -> Any:
    """The same source, loss and step as a run of `sft`."""
    optimizer = make_optimizer(OptimizerConfig(config.learning_rate), config.steps)
    learner = Learner(model, objectives.make("sft"), optimizer, rows="padded")
    whole = UpdateConfig(minibatches=1)
    source = Answers(learner, task, data_dir, config.seed, config.batch_size, whole)
    state, stream, loss = settled(make_state(model, params, learner.optimizer)), source.stream(), float("nan")
    for step in range(1, config.steps + 1):
        drawn = source.next(stream, step, state)
        ((layout,),) = drawn.epochs
        state, metrics = learner.update(state, drawn.rollout, layout)
        if step % config.evaluate_every and step < config.steps:
            continue
        loss = M.finalize(processes.fetch(metrics))["loss/policy"]
        told, rate = f"warm start: step {step}/{config.steps}  loss {loss:.3f}", 0.0
        if config.target_pass_rate and evaluate is not None and step % config.evaluate_every == 0:
            rate = evaluate(state.trained.policy)
            told += f"  pass rate {rate:.3f}"
        log(told)
        if config.target_pass_rate and rate >= config.target_pass_rate:
            break
    log(f"warm start: done, loss {loss:.3f}")
    return state.trained.policy
