"""Write clips.json, which `branch` reads: at each rate the clip range at which GRPO clips as many tokens as GSPO.

    python experiments/routing_replay/clips.py runs/routing_replay/clips

The share of tokens clipped falls with the range, log-linearly between the ranges that `clips` tried: the range is read
off that line at GSPO's share (beyond the ends the last piece is continued). Shares are means over the branches.
"""

import json
import sys
from pathlib import Path

import numpy as np

from jaxrl_llm.reporting.read import CLIPPED, Study, load


def clip_ranges(study: Study) -> dict[str, float]:
    """{"lr 0.0001": clip_high, ...}, rounded to three digits.

    Raises:
        ValueError: a rate lacks an arm.
    """
    found = {}
    for condition in study.conditions:
        shares = {
            arm: float(np.mean([run.average(CLIPPED) for run in study.select(arm, condition)] or [np.nan]))
            for arm in study.arms
        }
        tried = sorted((float(arm.removeprefix("GRPO clip ")), arm) for arm in study.arms if "clip" in arm)
        at = np.log([shares[arm] for _, arm in tried])
        if not np.all(np.isfinite([*at, shares["GSPO"]])):
            raise ValueError(f"{condition} has no branches of some arm; let the sweep end first")
        where = np.log(shares["GSPO"])
        piece = int(np.clip(np.searchsorted(-at, -where) - 1, 0, len(at) - 2))
        (x0, _), (x1, _) = tried[piece], tried[piece + 1]
        slope = np.log(x1 / x0) / (at[piece + 1] - at[piece])
        found[condition] = float(f"{x0 * np.exp(slope * (where - at[piece])):.3g}")
    return found


def main() -> None:
    path = Path(__file__).with_name("clips.json")
    try:
        path.write_text(json.dumps(clip_ranges(load(sys.argv[1])), indent=1) + "\n")
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"usage: clips.py DIR of `clips` ({error})")
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()
