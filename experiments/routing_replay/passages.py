"""Supervise an upcycled checkpoint on text for minutes: the language reference of Python, which every installation has.

    python -m jaxrl_llm.upcycle --from SMOLLM2.gguf --to runs/smollm2_8_experts --experts 8 --chosen 2 --redraw 0.5
    python -m experiments.routing_replay.passages --from runs/smollm2_8_experts --to runs/smollm2_8_experts_text

Of each passage of 480 characters the first 120 are the prompt and the others the answer that is learnt. With 690 M
parameters it takes 14 GB of memory.
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm import tasks
from jaxrl_llm.config import start_up
from jaxrl_llm.models import load_pretrained, read_published, save_pretrained
from jaxrl_llm.training.warm_start import WarmStartConfig, warm_start

LENGTH, PROMPT = 480, 120  # characters


def passages() -> Iterator[dict[str, str]]:
    for _, text in sorted(pydoc_data.topics.topics.items()):
        for start in range(0, len(text) - LENGTH + 1, LENGTH):
            passage = text[start : start + LENGTH]
            yield {"prompt": passage[:PROMPT], "answer": passage[PROMPT:]}


def supervise(source: Path, to: Path, steps: int, rows: int) -> None:
    """Write the checkpoint that so many steps make of the source, in the Hugging Face layout."""
    model = load_pretrained(source, dtype="float32")[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages()))
        task = tasks.make(
            "jsonl",
            tokenizer=tasks.load_tokenizer(source),
            path=str(folder / "rows.jsonl"),
            prompt_length=64,
            answer_length=192,
        )
        config = WarmStartConfig(
            steps=steps, batch_size=rows, learning_rate=1e-4, evaluate_every=10, cache_dir=str(folder)
        )
        params = warm_start(model, task, config, data_dir=str(folder), pretrained=str(source))
    save_pretrained(params, model.config, to, published=read_published(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", required=True, type=Path, dest="source", help="an upcycled checkpoint")
    parser.add_argument("--to", required=True, type=Path, help="a folder without a checkpoint")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=8, help="passages a step")
    given = parser.parse_args()
    start_up.start_jax()
    supervise(given.source, given.to, given.steps, given.rows)


if __name__ == "__main__":
    main()
