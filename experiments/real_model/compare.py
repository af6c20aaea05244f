"""The same run in TRL: equal model, prompts and settings, in turns step by step on one core.

    python -m experiments.real_model.compare --seed 0 --steps 20 --core 1 --json OUT.json
    python -m experiments.real_model.compare --table experiments/real_model/results/trl_*.json
    python -m experiments.real_model.compare --lengths 128+96 --steps 3 --core 1 --layout padded --json OUT.json
    python -m experiments.real_model.compare --by_lengths experiments/real_model/results/lengths_*.json

Each system is a process of its own. The checkpoint is exported to the Hugging Face layout, which transformers loads;
the prompts are those that our run draws, in its order. The random numbers that sample the answers differ. Of longer
rows the floor of a training step is its products on padded rows over the rate of float32 products on that core, numpy's
or XLA's; that of a rollout is what its decode must read over the bandwidth of that core, and the prompts' products.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from experiments.performance.environments import python_of
from experiments.performance.turns import ROOT, Runner
from jaxrl_llm.report.statistics import paired_difference

__all__ = ["describe", "medians"]

CONFIG = "configs/smollm2_sums_grpo.py"
_SHORTEST = 23  # tokens of a prompt of the config, at most
_LAST = 5  # steps whose mean reward is compared


def export(folder: Path) -> None:
    """The checkpoint of the config with its tokenizer, in the Hugging Face layout."""
    from jaxrl_llm.models import load_pretrained, read_published, save_pretrained
    from jaxrl_llm.tasks import load_tokenizer

    path = _settings([])[1]
    model, params = load_pretrained(path)
    save_pretrained(params, model.config, folder, published=read_published(path))
    tokenizer = load_tokenizer(path)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | dict(tokenizer.special_tokens)))


def longer(lengths: str) -> list[tuple[str, str]]:
    """Two prompts of PROMPT tokens, four answers of ANSWER tokens each: "PROMPT+ANSWER" -> fields of the config.

    Raises:
      ValueError: not of this form, or shorter than the prompts of the config are.
    """
    prompt, _, answer = lengths.partition("+")
    if not (prompt.isdecimal() and answer.isdecimal() and int(prompt) >= _SHORTEST and int(answer) > 1):
        raise ValueError(f"lengths={lengths!r} is not PROMPT+ANSWER with at least {_SHORTEST}+2 tokens; set --lengths")
    from configs.smollm2_sums_grpo import TEMPLATE

    template = TEMPLATE.replace("?", "?" + " one" * (int(prompt) - _SHORTEST), 1)
    sizes = {"rollout.prompts": "2", "rollout.group_size": "4", "rollout.max_prompt_length": prompt}
    return [("task.template", template), ("rollout.max_new_tokens", answer), *sizes.items()]


def work(model: Path, seed: int, steps: int, layout: str, lengths: str, lora_rank: int) -> dict[str, Any]:
    """The settings of both programs; the prompts of every step are those of our stream, or longer (`longer`)."""
    from jaxrl_llm import tasks

    overrides = [("seed", str(seed)), ("steps", str(steps)), ("updates.layout", layout), ("lora.rank", str(lora_rank))]
    overrides.append(("updates.minibatches", "1"))  # TRL's default: on-policy
    overrides += longer(lengths) if lengths else []
    s, _ = _settings(overrides)
    stream = tasks.prompts(s.task, "train", seed=s.seed, batch_size=s.rollout.prompts, data_dir=s.data_dir)
    batches = [next(stream) for _ in range(steps)]
    return {
        "config": CONFIG,
        "overrides": overrides,
        "model": str(model),
        "prompts": [s.task.prompting.text(s.task.tokenizer, p) for batch in batches for p in batch["prompt"]],
        "answers": [answer for batch in batches for answer in batch["answer"]],
        # Outside the vocabulary no token ends an answer: each has its full length.
        "end_ids": [s.model.vocab_size] if lengths else list(s.task.tokenizer.end_ids),
        "rows": s.rows,
        "group_size": s.rollout.group_size,
        "max_new_tokens": s.answer_length,
        "lora": (s.lora.rank, s.lora.alpha),
        "seed": seed,
        "steps": steps,
        **{name: getattr(s.optimizer, name) for name in ("learning_rate", "b1", "b2", "eps", "clip_norm")},
    }


def _settings(overrides: Sequence[tuple[str, str]]) -> tuple[Any, str]:
    from jaxrl_llm.config import loading
    from jaxrl_llm.run import settings

    s = settings.validate(loading.load(loading.find(CONFIG), overrides))
    return s, s.pretrained


def measure(
    seed: int, steps: int, core: int | None, python: str, layout: str, lengths: str, apart: bool, lora_rank: int
) -> dict[str, Any]:
    """Rewards and CPU seconds of every step of both systems, turn by turn, or apart, which takes less memory."""
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    programs = {
        "ours": (sys.executable, "-m", "experiments.real_model.ours"),
        "trl": (python, "-m", "experiments.real_model.peer_trl"),
    }
    rows: dict[str, list[dict[str, Any]]] = {system: [] for system in programs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder / "model")
        (folder / "work.json").write_text(json.dumps(work(folder / "model", seed, steps, layout, lengths, lora_rank)))
        for together in [[system] for system in programs] if apart else [list(programs)]:
            with ExitStack() as stack:
                runners = {}
                for system in together:
                    command = [*programs[system], "--work", str(folder / "work.json")]
                    runner = Runner(system, command, core, environment, folder / f"{system}.log")
                    runners[system] = stack.enter_context(runner)
                for step, (system, runner) in itertools.product(range(steps), runners.items()):
                    rows[system].append(runner.step())
                    print(f"{system} {step + 1}: {rows[system][-1]}", file=sys.stderr, flush=True)
    s = _settings([("lora.rank", str(lora_rank)), *(longer(lengths) if lengths else [])])[0]
    return {
        "seed": seed,
        "lengths": lengths,
        "layout": layout,
        "lora_rank": lora_rank,
        "floor_s": floor(s),
        "rollout_floor_s": rollout_floor(s),
        **rows,
    }


def floor(s: Any) -> float:
    """Seconds of the products of a training step on padded rows: 6 x tokens x the parameters that each passes (4 x
    those that are frozen), of the head for answers alone, and attention's products over half of a row's pairs."""
    config, time = s.model, s.task.prompt_length + s.answer_length
    head = config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * time
    passed = (config.active_parameters - head) * time + head * s.answer_length
    products = (4 if s.lora.rank else 6) * passed + 6 * attention * time
    return s.rows * products / (1e9 * _rate())


def rollout_floor(s: Any) -> float:
    """Seconds of a rollout of full answers: the prompts' products, and the longer of the decode's products and reads.
    It reads every weight in each token step, and the filled cache, a prompt's once a group."""
    config, prompt, steps = s.model, s.task.prompt_length, s.answer_length - 1  # the first token is the prompt's
    head, width = config.vocab_size * config.hidden_size, config.num_hidden_layers * config.head_dim
    attention, written = 2 * config.num_attention_heads * width, steps * (steps + 1) / 2
    prefill = 2 * (config.active_parameters - head) * prompt + 2 * head + attention * prompt**2
    decode = 2 * config.active_parameters * steps + 2 * attention * (steps * prompt + written)
    columns = s.rollout.prompts * steps * prompt + s.rows * written
    read = 4 * (config.active_parameters * steps + 2 * config.num_key_value_heads * width * columns)
    rate = 1e9 * _rate()
    return s.rollout.prompts * prefill / rate + max(s.rows * decode / rate, read / (1e9 * _bandwidth()))


def _rate() -> float:
    """GFLOP/s of products on one core."""
    return _of_core("gemm_gflops")


def _bandwidth() -> float:
    """GB/s that one core reads."""
    return _of_core("read_gb_s")


def _of_core(measured: str) -> float:
    """A figure of `workload`, in a process that has one thread for numpy's products."""
    program = f"from experiments.performance.workload import {measured}; print({measured}())"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", program], env=os.environ | threads, capture_output=True, check=True)
    return float(found.stdout)


def by_lengths(runs: Sequence[dict[str, Any]]) -> str:
    """Lengths, layout, and CPU seconds of the best step after the first; TRL's over ours, and ours over the floor. What
    was not measured, of TRL or of a rollout's floor, is left empty."""
    compared = "TRL | times the floor"
    head = f"| tokens | rows | rollout s | {compared} | training step s | {compared} | peak GB | TRL |"
    lines = [head, "|---" * 10 + "|"]
    for run in runs:
        best, peaks = {}, {}
        for system in ("ours", "trl"):
            steps = run.get(system, [])
            best[system] = [min((s[name] for s in steps[1:]), default=0) for name in ("rollout_cpu_s", "train_cpu_s")]
            peaks[system] = max((s["peak_rss_mb"] for s in steps), default=0)
        rank = run.get("lora_rank", 0)
        cells = [run["lengths"] or "21+6", run["layout"] + (f", LoRA {rank}" if rank else "")]
        for ours, trl, least in zip(*best.values(), (run.get("rollout_floor_s"), run["floor_s"]), strict=True):
            cells += [f"{ours:.2f}", f"{trl / ours:.2f}x" if trl else "", f"{ours / least:.2f}" if least else ""]
        times = f"{peaks['trl'] / peaks['ours']:.2f}x" if peaks["trl"] else ""
        cells += [f"{peaks['ours'] * 2**20 / 1e9:.1f}", times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def medians(runs: Sequence[dict[str, Any]], system: str) -> list[float]:
    """Seconds of a rollout, of scoring and of a training step after the first, and the peak memory in MB."""
    steps = [step for run in runs for step in run[system][1:]]
    names = ("rollout_cpu_s", "score_cpu_s", "train_cpu_s")
    return [*(float(np.median([step[name] for step in steps])) for name in names), max(s["peak_rss_mb"] for s in steps)]


def describe(runs: Sequence[dict[str, Any]]) -> str:
    """Two tables: CPU seconds of a step (median after the first, over all seeds) and mean reward by seed.

    Ratios are of each seed by itself: a machine that is busier in one seed moves the medians over all of them apart.
    """
    lines = ["| | rollout s | scoring s | train step s | peak memory MB |", "|---|---|---|---|---|"]
    for system in ("ours", "trl"):
        rollout, score, train, memory = medians(runs, system)
        lines.append(f"| {system} | {rollout:.2f} | {score:.2f} | {train:.2f} | {memory:.0f} |")
    for run in runs:
        ours, trl = medians([run], "ours"), medians([run], "trl")
        rollout, _, train, memory = (
            one / other if other else float("nan") for other, one in zip(ours, trl, strict=True)
        )
        lines.append(f"| trl / ours, seed {run['seed']} | {rollout:.2f} | | {train:.2f} | {memory:.2f} |")
    lines += ["", f"| seed | ours, last {_LAST} steps | trl | difference |", "|---|---|---|---|"]
    for run in runs:
        ours, trl = (np.mean([step["reward"] for step in run[system]][-_LAST:]) for system in ("ours", "trl"))
        lines.append(f"| {run['seed']} | {ours:.3f} | {trl:.3f} | {ours - trl:+.3f} |")
    # Both see the same prompts in the same step: steps are pairs. Those of one seed follow from one another, since both
    # policies train on; seeds do not.
    rewards = {system: [step["reward"] for run in runs for step in run[system]] for system in ("ours", "trl")}
    seeds = [run["seed"] for run in runs for _ in run["ours"]]
    for label, clusters in (("steps, as if independent", None), ("seeds, their steps as clusters", seeds)):
        d = paired_difference(rewards["ours"], rewards["trl"], clusters)
        if d.n > 1:
            lines.append(f"\ndifference over {d.n} {label}: {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--core", type=int, help="core of both; default: none")
    layouts = ("auto", "padded", "packed", "shared")
    parser.add_argument("--layout", default="auto", choices=layouts, help="rows of our training step")
    parser.add_argument("--lengths", default="", help="PROMPT+ANSWER tokens instead of sums; answers of full length")
    parser.add_argument("--lora_rank", type=int, default=0, help="of adapters on every matrix; 0: all is trained")
    parser.add_argument("--apart", action="store_true", help="ours to its end, then TRL, which takes less memory")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--trl_python", help="an interpreter with TRL; default: an environment is made for it")
    parser.add_argument("--table", type=Path, nargs="+", help="results to describe instead of a run")
    parser.add_argument("--by_lengths", type=Path, nargs="+", help="results of several lengths, a line each")
    given = parser.parse_args()
    if given.by_lengths:
        print(by_lengths([json.loads(path.read_text()) for path in given.by_lengths]))
        return
    if not given.table:
        if given.steps < 2:
            parser.error(f"--steps {given.steps} leaves none after the first, which compiles; give at least 2")
        python = given.trl_python or python_of("trl")
        run = measure(
            given.seed, given.steps, given.core, python, given.layout, given.lengths, given.apart, given.lora_rank
        )
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(run) + "\n")
    print(describe([json.loads(path.read_text()) for path in given.table] if given.table else [run]))


if __name__ == "__main__":
    main()
