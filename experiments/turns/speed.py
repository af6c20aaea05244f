"""Sampled tokens a second over turns, ours and TRL's, on one core: python -m experiments.turns.speed

Both play 256 episodes of the same turns, answers and observations with the first parameters of
`configs/turns.py:guess`, in turn within each repeat. TRL 1.16 (`EXTRAS=bench`) plays by `GRPOTrainer._tool_call_loop`,
unchanged: every answer counts as a call of one tool whose result has the tokens of an observation. Its parser and its
chat template are left out.
"""

# pyright: reportMissingImports=false

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from configs import turns
from experiments.performance.workload import make_tokenizer
from jaxrl_llm import models, tasks
from jaxrl_llm.rollout.episodes import play
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate


class Case(NamedTuple):
    """Episodes by turns, and tokens of an answer and of an observation; ragged: answers end where an end is drawn."""

    turns: int
    answer: int
    observed: int
    ragged: bool = False


CASES = [Case(1, 15, 0), Case(5, 3, 2), Case(1, 96, 0), Case(3, 32, 2), Case(3, 32, 65), Case(4, 48, 9, ragged=True)]
REPEATS = 5
Play = Callable[[tasks.Prompts, int], int]  # plays episodes for these prompts with a seed; returns the sampled tokens
_CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "say", "arguments": {}}}]}


class Saying:
    """Say the same to every answer."""

    text = ""

    def init(self, row: Any) -> None:
        pass

    def step(self, answer: str) -> tuple[str, float, bool]:
        return self.text, 0.0, False

    def close(self) -> None:
        pass


def ours(run: Any, params: Any, case: Case, shares: list[float]) -> Play:
    """Play with the engine; the share of time that environments took goes to `shares`."""
    source: Any = run.source
    # Behind an answer that was cut off, an end is put before the observation.
    said = type("Said", (Saying,), {"text": "h" * max(0, case.observed - 1)})
    bounds = {"turns": case.turns, "answer_length": case.answer, "observation_length": case.observed}
    task = dataclasses.replace(source.task, environment=said, verify_truncated=True, **bounds)
    ends = source.engine.end_ids if case.ragged else (run.model.config.vocab_size,)
    engine = dataclasses.replace(source.engine, max_new_tokens=case.answer, end_ids=ends)
    weights, _ = engine.take_weights(params)

    def played(batch: tasks.Prompts, seed: int) -> int:
        began = time.monotonic()
        rollout, table = play(engine, weights, task, batch, jax.random.key(seed))
        sampled = int(np.asarray(rollout.loss_mask).sum())
        shares.append(table.seconds / (time.monotonic() - began))
        return sampled

    return played


def trl_trainer(run: Any, params: Any, folder: str) -> Any:
    """TRL's trainer of the same model, which never ends an answer."""
    models.save_pretrained(params, run.model.config, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=run.source.prompts * run.source.engine.group_size,
        num_generations=run.source.engine.group_size,
        max_completion_length=512,
        report_to=[],
    )
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, completions, **_: [0.0 for _ in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * run.source.prompts),
        processing_class=make_tokenizer(97),
    )
    grpo_trainer.parse_response = lambda *_, **__: _CALL
    trainer._sync_tool_dicts = trainer._async_tool_dicts = [{"say": lambda: ""}] * config.per_device_train_batch_size
    return trainer


def theirs(trainer: Any, case: Case) -> Play:
    trainer.generation_config.max_new_tokens = case.answer
    trainer.max_tool_calling_iterations = case.turns - 1
    trainer._get_tool_suffix_ids = lambda _: [5] * case.observed

    def played(batch: tasks.Prompts, seed: int) -> int:
        torch.manual_seed(seed)
        group, held = trainer.num_generations, zip(batch["tokens"], batch["lengths"], strict=True)
        prompts = [tokens[:n].tolist() for tokens, n in held for _ in range(group)]
        ids, _ = trainer._generate_single_turn(prompts, None, {}, group)
        said = [[dict(_CALL)] for _ in ids]
        mask, *_ = trainer._tool_call_loop([[] for _ in ids], prompts, ids, said, None, None, {})
        return sum(map(sum, mask))

    return played


def main() -> None:
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    run = assembly.build(validate(turns.get_config("guess")))
    source: Any = run.source
    params = run.model.init_sharded(jax.random.key(0))
    print("| turns | answer | observed | tokens | tokens a CPU second | TRL's | ours over TRL's | environments |")
    print("| -- | -- | -- | -- | -- | -- | -- | -- |")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(run, params, folder)
        for case in CASES:
            shares = list[float]()
            players = [ours(run, params, case, shares)] + ([] if case.ragged else [theirs(trainer, case)])
            prompts = tasks.prompts(source.task, "train", seed=0, batch_size=source.prompts, data_dir=source.data_dir)
            rates, sampled = list[list[float]](), 0
            for repeat in range(REPEATS + 1):  # the first one compiles
                batch, found = next(prompts), list[float]()
                for player in players:
                    start, tokens = time.process_time(), player(batch, repeat)
                    found.append(tokens / (time.process_time() - start))
                    sampled = sampled if len(found) > 1 else tokens
                    assert case.ragged or tokens == sampled == case.turns * case.answer * len(batch["tokens"]) * 8
                rates.append(found)
            own, *peer = ([one[k] for one in rates[1:]] for k in range(len(players)))
            cells = [f"{statistics.median(own):.0f}", "", ""]
            if peer:
                ratios = sorted(a / b for a, b in zip(own, peer[0], strict=True))
                cells[1] = f"{statistics.median(peer[0]):.0f}"
                cells[2] = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
            figures = [case.turns, f"{'up to ' * case.ragged}{case.answer}", case.observed, sampled, *cells]
            print(f"| {' | '.join(map(str, figures))} | {statistics.median(shares[1:]):.1%} |", flush=True)


if __name__ == "__main__":
    main()
