"""Pairs of the start's own answers: to each prompt a right and a wrong one of its samples, as JSONL for DPO.

    python -m experiments.preferences.own_pairs --config configs/dpo.py --out pairs.jsonl --seed 0 [--config.FIELD=...]

The answers come from the start of the runs of this folder (start.py), or of the fields that are given; prompts are
those of the train split, and one without both a right and a wrong sample gives no pair.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.preferences.start import START
from jaxrl_llm import tasks
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.config.command_line import fields_and_rest
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import Settings, validate

__all__ = ["own_pairs"]


def own_pairs(s: Settings, prompts: int, samples: int) -> list[dict[str, str]]:
    """{"prompt", "chosen", "rejected"} of every prompt with a right and a wrong answer among its samples."""
    run = build(s)
    state = run.start(print)
    asked = tasks.all_prompts(s.task, "train", limit=prompts, data_dir=s.data_dir)
    evaluator = Evaluator(run.model, s.task, asked, samples, s.answer_length, s.rollout.slots)

    def fits(text: str) -> bool:
        """Return True if the text can be written as an answer again, the end included."""
        return bool(text) and tasks.UNKNOWN not in text and len(s.task.ids_of_answer(text)) <= s.answer_length

    pairs = []
    for row in evaluator(state.policy.plain(run.model))[1]:
        answers = [one for one in zip(row["sampled"], row["sampled_reward"], strict=True) if fits(one[0])]
        right = [text for text, reward in answers if reward >= s.task.solved]
        wrong = [text for text, reward in answers if reward < s.task.solved]
        if right and wrong:
            pairs.append({"prompt": row["prompt"], "chosen": right[0], "rejected": wrong[0]})
    return pairs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the warm start")
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    fields, rest = fields_and_rest(sys.argv[1:] if arguments is None else list(arguments))
    given = parser.parse_args(rest)
    start_up.start_jax()
    start = [(name, str(value)) for name, value in (START | {"warm_start.seed": given.seed}).items()]
    settings = validate(loading.load(loading.find(given.config), [*start, *fields]))
    pairs = own_pairs(settings, given.prompts, given.samples)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{given.out}: {len(pairs)} pairs of {given.prompts} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
