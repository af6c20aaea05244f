"""docs/audited_captures.md: what `audit` prints for five stored captures of TRL's GRPOTrainer.

`python -m tests.reference.audited_page` writes the page anew.
"""

import re
from pathlib import Path

import jax

from jaxrl_llm.audit.capture import read
from jaxrl_llm.audit.opinion import opinion
from jaxrl_llm.audit.opinion_page import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "audited_captures.md"
CAPTURES = {  # TRL's settings, and what to look at
    "grpo-0": (
        '`loss_type="grpo"`, first pass',
        "Every ratio is 1, so that five recipes and every clip range give this gradient. The class is printed, and "
        "nothing\nis guessed.",
    ),
    "ga2_dapo-3": (
        '`loss_type="dapo"`, two micro-batches a step',
        "The divisor is the tokens of the generation batch, which only `batch_tokens` tells, and `accumulation` is 2.",
    ),
    "gspo_kl-1": (
        '`importance_sampling_level="sequence"`, `beta=0.05`',
        "TRL multiplies k3 by the ratio that the policy term uses, here that of the answer.",
    ),
    "dr_kl-1": (
        '`loss_type="dr_grpo"`, `beta=0.04`, `max_completion_length=40`',
        "The gradient itself tells the constant length; no answer is 40 tokens long.",
    ),
    "gdpo-1": (
        'two reward functions, `multi_objective_aggregation="normalize_then_sum"`',
        "Advantages are GDPO's, the loss is GRPO's.",
    ),
}
_ROUNDING = re.compile(r" *-?\d\.\de-\d\d")  # differences of rounding are another machine's, too


def text() -> str:
    parts = [
        "# Five captures of TRL, audited\n",
        "`audit` identified each of these batches of TRL 1.16's `GRPOTrainer` without being told its settings, from\n"
        "the arrays alone, and found no fault in any. The captures are in `tests/golden/captures`;\n"
        "[A second opinion](audit.md) explains the columns and how to save a batch of your own.\n",
    ]
    for name, (settings, what) in CAPTURES.items():
        with jax.enable_x64(True):
            made = opinion(read(ROOT / "tests" / "golden" / "captures" / f"{name}.safetensors"))
        parts += [f"## {settings}\n", f"{what}\n", f"```text\n{table(made)}\n```\n"]
    return "\n".join(parts)


def without_rounding(page: str) -> str:
    """The page without the sizes of rounding errors, and without line breaks."""
    return " ".join(_ROUNDING.sub(" ~", page).split())


if __name__ == "__main__":
    PAGE.write_text(text())
