"""Cost of exact numerics in scoring, by width, tokens of a tile and type: CPU seconds over those of fast.

python -m experiments.numerics.tile_costs --json OUT.json [--widths 64,256,512] [--rows 8,16,32,64] [--repeats 5]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.numerics.sources import parameters, scored
from jaxrl_llm.config import start_up
from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.models.exact import tiles

_TOKENS = (32, 32)  # rows and their length


def model_of(width: int, dtype: str, numerics: str) -> Model:
    """Two layers of eight experts, of which a token uses two."""
    return Model(
        ModelConfig(
            vocab_size=512,
            num_hidden_layers=2,
            hidden_size=width,
            num_attention_heads=width // 16,
            num_key_value_heads=width // 32,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=width,
            dtype=dtype,
            numerics=numerics,
        )
    )


def scoring(width: int, dtype: str, numerics: str) -> Callable[[], Any]:
    """A compiled score of the same tokens."""
    model = model_of(width, dtype, numerics)
    params = parameters(model, 0)
    tokens = np.random.default_rng(0).integers(1, 512, _TOKENS).astype(np.int32)
    segments = np.ones_like(tokens)

    def run() -> Any:
        return jax.block_until_ready(scored(model, params, tokens, segments))

    run()
    return run


def cpu_ms(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The best of so many turns of each, one after the other."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--widths", default="64,256,512")
    parser.add_argument("--rows", default="8,16,32,64")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    start_up.start_jax()
    found = []
    for width in map(int, given.widths.split(",")):
        for dtype in ("float32", "bfloat16"):
            for rows in map(int, given.rows.split(",")):
                tiles.ROWS = rows
                ms = cpu_ms({name: scoring(width, dtype, name) for name in ("fast", "exact")}, given.repeats)
                found.append({"width": width, "dtype": dtype, "rows": rows, **ms, "ratio": ms["exact"] / ms["fast"]})
                print({name: round(x, 2) if isinstance(x, float) else x for name, x in found[-1].items()}, flush=True)
                jax.clear_caches()  # what was traced with other tiles
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
