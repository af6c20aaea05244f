"""python -m jaxrl_llm.evaluation --workdir DIR | --checkpoint PATH [--config NAME]: pass@1, pass@k and samples.

A DIR is evaluated on the held-out prompts of its own config, at its newest intact checkpoint (or --step), and nothing
but evaluation.jsonl is written into it. With --config, a DIR or a published checkpoint is evaluated on the task of that
config, which may be one that the config's file registers.

A DIR that learnt from pairs is judged on its held-out pairs too, a reward model on these alone.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.command_line import FAILED, Parser, check_folders, complain, fields_and_rest
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.config.policy_arguments import add_policy
from jaxrl_llm.ground.machine import refuse_links
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.ground.terminal import visible

if TYPE_CHECKING:  # whatever imports JAX is imported once the command line is known to be right
    from jaxrl_llm.rollout.sampling import Sampling
    from jaxrl_llm.run.loaded import LoadedPolicy
    from jaxrl_llm.run.settings import TaskSettings

# How answers are sampled: the type of each field of `Sampling` that a flag sets, and what it means.
_SAMPLING = {
    "temperature": (float, "of the sampled answers, beside a greedy one"),
    "top_k": (int, "sample from this many tokens; 0: all"),
    "top_p": (float, "sample from the tokens with this much probability; 1: all"),
    "min_p": (float, "drop tokens below this share of the largest probability; 0: none"),
}


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Evaluate a DIR or a checkpoint; returns the exit code (see command_line.py)."""
    parser = Parser(
        prog="jaxrl-llm evaluate",
        description="Mean reward, pass@1, pass@k and samples of a DIR or a checkpoint.",
        epilog="fields of --config are set with --config.block.field=value,\nfor example --config.task.data_dir=PATH",
    )
    add_policy(parser)
    parser.add_argument("--config", help="NAME[:variant] or file of the task; default: the task of the DIR")
    parser.add_argument("--split", choices=("test", "train"), default="test", help="prompts of which split")
    parser.add_argument("--prompts", type=int, default=128, help="how many prompts")
    parser.add_argument("--samples", type=int, default=16, help="answers a prompt")
    for name, (kind, told) in _SAMPLING.items():
        default = f"default: evaluation.{name} of the DIR or of --config"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{told}; {default}")
    parser.add_argument("--k", default="1,4,16", help="values of k for pass@k")
    parser.add_argument("--show", type=int, default=5, help="prompts printed with their answers")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument(
        "--record", type=Path, help="write all episodes to FILE.jsonl or, with routes, FILE.msgpack, as verifiers does"
    )
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)

    from jaxrl_llm.config import listed, loading

    ks = _checked(given, fields)
    source = None if given.config is None else loading.find(given.config)
    listed.check_names(path for path, _ in fields)

    from absl import logging

    from jaxrl_llm.config import start_up
    from jaxrl_llm.records.run_log import add_rows, plain

    logging.set_verbosity(logging.ERROR)
    config = None if source is None else loading.load(source, fields)
    log = None if given.workdir is None else given.workdir / "evaluation.jsonl"
    if log is not None:
        refuse_links(log.parent)
    if log is not None and log.parent.is_dir() and not os.access(log if log.exists() else log.parent, os.W_OK):
        print(f"warning: {log} cannot be written, so the result is printed only", file=sys.stderr)
        log = None
    start_up.start_jax()
    policy, target = _policy_and_task(given, config)
    result: dict[str, Any] = {} if policy.step is None else {"step": policy.step}
    result |= {"task": target.task.name, "split": given.split}
    asked = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    sampling = dataclasses.replace(target.evaluation, **asked).sampling
    objective = None if policy.run is None or config is not None else policy.run.settings.objective
    if objective is not None and objective.reads == "pairs" and given.split != "test":
        raise ValueError(f"--split={given.split}: pairs are evaluated on those held out; leave it out")
    halves: dict[str, float] = {}
    if objective is None or not objective.learns_rewards:
        result |= {name: getattr(sampling, name) for name in _SAMPLING}
        metrics, halves = _answers(policy, target, given, ks, sampling)
        result |= metrics
    if objective is not None and objective.reads == "pairs":
        result |= _pairs(policy, given)
    print(visible(f"{target.task.sentence}\n{_table(result, halves, str(sampling) if 'prompts' in result else '')}"))
    try:
        if given.json is not None:
            given.json.write_text(f"{json.dumps(plain(result))}\n")
        if log is not None:
            add_rows(log, [result])
    except OSError as error:
        where = f"{given.json}: " if error.filename is None and error.errno is not None else ""  # of a full disk
        return complain(OSError(f"{where}{error} (the result above is whole, and only not recorded)"), FAILED)
    return 0


def _table(result: Mapping[str, Any], halves: Mapping[str, float], sampling: str) -> str:
    """Every metric in words, with half of its interval over prompts where it is a mean over them."""
    from jaxrl_llm.report.names import in_words
    from jaxrl_llm.report.page import text_table

    split, rows = result["split"], []
    for key, value in result.items():
        if key.startswith("eval/"):
            words = in_words(key) if split == "test" else in_words(key).replace("held-out", "training")
            values = value if isinstance(value, list) else [value]
            shown = ["" if one is None else f"{one:.3f}" for one in values]
            shown[-1] += f" ± {halves[key]:.3f}" if key in halves else ""
            starts = range(0, len(shown), 5)  # so many of a list side by side
            rows += [["" if start else words, ", ".join(shown[start : start + 5])] for start in starts]
    told = (result["task"], f"{result['prompts']} {split} prompts" if "prompts" in result else "")
    told += (f"step {result['step']}" if "step" in result else "",)
    footer = [f"sampled: at {sampling}"] if sampling else []
    footer += ["±: half of the 95 % t interval over prompts"] if halves else []
    return "\n".join([text_table([", ".join(filter(None, told)), "value"], rows), *footer])


def _answers(
    policy: "LoadedPolicy", target: "TaskSettings", given: argparse.Namespace, ks: list[int], sampling: "Sampling"
) -> tuple[dict[str, Any], dict[str, float]]:
    """How often the policy is right, with half of each t interval over prompts; prints a few of its answers."""
    import numpy as np

    from jaxrl_llm import tasks
    from jaxrl_llm.records.progress import told
    from jaxrl_llm.report.statistics import half_width
    from jaxrl_llm.rollout.pass_rate import evaluated_at_once, pass_at_k
    from jaxrl_llm.run.assembly import evaluator
    from jaxrl_llm.run.forecast import sampling as work_of

    task = target.task
    prompts = tasks.all_prompts(task, given.split, limit=given.prompts, data_dir=target.data_dir)
    model = policy.model if policy.run is None else policy.run.sampler
    slots = target.slots
    if policy.run is not None and target.task is policy.run.settings.task:  # another task has lengths of its own
        width = task.row_length(target.answer_length) - target.answer_length
        asked = len(prompts["uid"]), given.samples, width, target.answer_length
        slots = evaluated_at_once(model, *asked, target.slots, policy.run.settings.rows)
    evaluate = evaluator(model, task, prompts, given.samples, target.answer_length, slots, sampling=sampling)
    if given.record is not None:
        if task.environment is None:
            raise ValueError(f"--record={given.record}: task {task.name!r} has no environment; use --json")
        evaluate = dataclasses.replace(evaluate, record=given.record)
    with told(lambda text: print(text, file=sys.stderr, flush=True)) as progress:
        answers = len(prompts["uid"]) * (given.samples + 1)
        progress.expected["evaluating"] = work_of(
            model, task.prompt_length * len(prompts["uid"]), answers * target.answer_length, slots or answers
        )
        _, rows = evaluate(policy.params)
    right = [sum(reward >= task.solved for reward in row["sampled_reward"]) for row in rows]
    for row in rows[: given.show]:
        print(_readable(row, task.solved))
    named = rows[0].get("rewards", {})
    each = {
        "eval/greedy": [row["reward"] >= task.solved for row in rows],
        "eval/greedy_reward": [row["reward"] for row in rows],
        "eval/reward": [sum(row["sampled_reward"]) / given.samples for row in rows],
        **{f"eval/reward_{name}": [np.mean(row["sampled_rewards"][name]) for row in rows] for name in named},
        **{f"eval/pass_at_{k}": [pass_at_k([count], given.samples, k) for count in right] for k in ks},
    }
    means = {name: float(np.mean(values)) for name, values in each.items()}
    halves = {name: float(half_width(values)) for name, values in each.items()} if len(rows) > 1 else {}
    return {"prompts": len(rows)} | means, halves


def _pairs(policy: "LoadedPolicy", given: argparse.Namespace) -> dict[str, Any]:
    """How the DIR's held-out pairs are ordered; prints a few of them with their rewards."""
    assert policy.run is not None
    from jaxrl_llm.records.places import root_of

    metrics, rows = policy.run.source.started(None, root_of(given.workdir) / "reference").evaluate(policy.state)
    for row in rows[: given.show]:
        shown = "{prompt}  {chosen}: {reward_chosen:.2f}   {rejected}: {reward_rejected:.2f}".format(**row)
        print(visible(shown))
    return metrics


def _checked(given: argparse.Namespace, fields: list[tuple[str, str]]) -> list[int]:
    """The values of k, once all arguments fit."""
    for name, low in (("prompts", 1), ("samples", 1), ("show", 0)):
        in_range(f"--{name}", getattr(given, name), least=low)
    if not re.fullmatch(r"\d+(,\d+)*", given.k):
        raise ValueError(f"--k={given.k} must be whole numbers separated by commas, for example 1,4,16")
    ks = [k for k in map(int, given.k.split(",")) if k <= given.samples]
    if not ks or min(ks) < 1:
        raise ValueError(f"--k={given.k} needs a value between 1 and --samples={given.samples}")
    if given.record is not None and given.record.suffix not in (".jsonl", ".msgpack"):
        raise ValueError(f"--record={given.record} must end in .jsonl or .msgpack")
    check_folders(json=given.json, record=given.record)
    if given.config is None and given.checkpoint is not None:
        raise ValueError(f"--checkpoint={given.checkpoint} has no task; name a config that has one: --config=NAME")
    if given.config is None and fields:
        raise ValueError(f"--config.{fields[0][0]} is a field of no config; name the config too: --config=NAME")
    return ks


def _policy_and_task(given: argparse.Namespace, config: Any) -> "tuple[LoadedPolicy, TaskSettings]":
    """The policy, and the task of the config (ConfigDict), or without one that of the DIR."""
    from jaxrl_llm.ground import sharding
    from jaxrl_llm.run import loaded
    from jaxrl_llm.run.settings import TaskSettings, task_settings

    if config is None:
        policy = loaded.from_arguments(given, rewards=True)
        assert policy.run is not None
        s = policy.run.settings
        return policy, TaskSettings(s.task, s.data_dir, s.answer_length, s.rollout.slots, s.evaluation)
    mesh = sharding.make_mesh(config.mesh.shape, dcn_shape=config.mesh.dcn_shape)
    if config.rollout.mesh_shape:
        mesh = sharding.mesh_of_same_devices(mesh, config.rollout.mesh_shape, "rollout.mesh_shape")
    policy = loaded.from_arguments(given, tokenizer=config.task.tokenizer, day=config.task.date, mesh=mesh)
    return policy, task_settings(config, policy.tokenizer)


def _readable(row: dict[str, Any], solved: float) -> str:
    """A prompt with its answers; ✗ marks a wrong one."""
    answers = zip([row["greedy"], *row["sampled"]], [row["reward"], *row["sampled_reward"]], strict=True)
    greedy, *sampled = (f"{text}{'' if reward >= solved else ' ✗'}" for text, reward in answers)
    told = f"{row['prompt']}  greedy: {greedy}   sampled: {'  '.join(sampled[:4])}"
    return visible(told.replace("\n", "\\n"))


if __name__ == "__main__":
    sys.exit(main())
