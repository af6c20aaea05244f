"""Rollouts of each family on a real vLLM server for CPUs, from a tiny random checkpoint, and what they show.

    python -m tests.reference.served_families [FAMILY ...]

prints the rows of a table of docs/models.md, with the environment of `make vllm`. A run takes two rollouts in float32
and, of a mixture, replays the experts that the server recorded (R3). Sizes are the smallest that vLLM computes on CPUs.
"""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.main import train
from jaxrl_llm.models import Model, save_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import from_published
from jaxrl_llm.run.tokenizer_files import tokenizer_files
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer
from tests.reference import tiny_run
from tests.reference.trained_families import FIELDS, GOLDENS, ONE_EACH, REWARD

ENVIRONMENT = Path(os.environ.get("JAXRL_VLLM", ".venv-vllm"))
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_head_dim": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rotary_dim": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def served(family: str, folder: Path) -> str:
    """Train two steps on answers of a server; returns the family's row, or why there is none."""
    golden, checkpoint = GOLDENS[family]["config"], folder / "checkpoint"
    sizes = {name: size for name, size in SIZES.items() if golden.get(name) is not None}
    if "qk_rope_head_dim" in sizes:
        sizes["head_dim"] = SIZES["qk_rope_head_dim"]
    config = from_published(golden | sizes)
    wide = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, Model(config).init(jax.random.key(0)))
    save_pretrained(wide, config, checkpoint)
    for name, content in tokenizer_files(CharTokenizer("0123456789=abcdefghijk")).items():
        (checkpoint / name).write_bytes(content)
    (folder / "reward.py").write_text(REWARD)
    fields = FIELDS | {
        "rewards.functions": (f"{folder}/reward.py:small",),
        "model.pretrained": str(checkpoint),
        "rollout.engine": "vllm",
        "rollout.launch": str(ENVIRONMENT),
        "rollout.temperature": 2.0,  # the most that vLLM takes
        "steps": 2,
    }
    mixture = "moe" in config.kinds
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train("pretrained", folder / "run", fields | ({"replay.mode": "R3"} if mixture else {}))
    except Exception as error:
        return f"| `{family}` | no | {' '.join(str(error).split())[:300]} |"
    rows = [row for row in tiny_run.metrics(folder / "run") if "reward/total" in row]
    gap, flips = (max(row.get(name, np.nan) for row in rows) for name in ("mismatch/max", "routing/flips_sampler_old"))
    return f"| `{family}` | {gap:.1e} | {f'{flips:g}' if mixture else ''} |"


if __name__ == "__main__":
    for family in sys.argv[1:] or ONE_EACH:
        with tempfile.TemporaryDirectory() as place:
            print(served(family, Path(place)), flush=True)
