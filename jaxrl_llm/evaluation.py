"""python -m jaxrl_llm.evaluation --workdir DIR: mean reward, pass@1, pass@k and samples of a finished or running DIR.

Reads the DIR's own config.json and newest checkpoint (or --step), writes nothing into it but evaluation.jsonl.
"""

import json
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict

from jaxrl_llm import provenance, tasks
from jaxrl_llm.checkpointing import Checkpoints
from jaxrl_llm.rollout.pass_rate import Evaluator, pass_at_k
from jaxrl_llm.run_log import read_json
from jaxrl_llm.settings import validate
from jaxrl_llm.trainer import build

__all__ = ["main"]

_WORKDIR = flags.DEFINE_string("workdir", None, "The DIR of a run.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; default: the newest.")
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "train"], "Prompts of which split.")
_PROMPTS = flags.DEFINE_integer("prompts", 128, "How many prompts.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Answers a prompt.", lower_bound=1)
_KS = flags.DEFINE_list("k", ["1", "4", "16"], "Values of k for pass@k.")
_SHOW = flags.DEFINE_integer("show", 5, "Prompts printed with their answers.", lower_bound=0)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; see --help")
    logging.set_verbosity(logging.ERROR)
    try:
        return _evaluate(Path(str(_WORKDIR.value)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _evaluate(workdir: Path) -> int:
    recorded = read_json(workdir / "config.json")
    if recorded is None:
        raise FileNotFoundError(f"{workdir} holds no run (no config.json); give --workdir of a run")
    ks = [int(k) for k in _KS.value if int(k) <= _SAMPLES.value]
    if not ks or min(ks) < 1:
        raise ValueError(f"--k={_KS.value} needs a value between 1 and --samples={_SAMPLES.value}")
    provenance.start_jax()
    settings = validate(ConfigDict(recorded["config"]))
    run = build(settings)
    step, state, _ = Checkpoints(workdir, settings.checkpoint.keep).restore(run.blank(), _STEP.value)
    prompts = tasks.all_prompts(settings.task, _SPLIT.value, limit=_PROMPTS.value, data_dir=settings.data_dir)
    evaluator = Evaluator(run.model, settings.task, prompts, _SAMPLES.value, settings.answer_length)
    found, rows = evaluator(state.params)
    solved = settings.task.solved
    right = [sum(reward >= solved for reward in row["sampled_reward"]) for row in rows]
    result = {"step": step, "split": _SPLIT.value, "prompts": len(rows)}
    result |= {name: found[name] for name in ("eval/greedy", "eval/greedy_reward", "eval/reward")}
    result |= {f"eval/pass_at_{k}": pass_at_k(right, _SAMPLES.value, k) for k in ks}
    for row in rows[: _SHOW.value]:
        answers = "  ".join(f"{text}{'' if reward >= solved else ' ✗'}" for text, reward in _pairs(row)[:4])
        print(f"{row['prompt']}  greedy: {row['greedy']}{'' if row['reward'] >= solved else ' ✗'}   sampled: {answers}")
    print(json.dumps(result))
    with open(workdir / "evaluation.jsonl", "a") as log:
        log.write(json.dumps(result) + "\n")
    return 0


def _pairs(row: dict) -> list[tuple[str, float]]:
    return list(zip(row["sampled"], row["sampled_reward"], strict=True))


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    app.run(main)
