"""The objective gallery: of every recipe its equation, source, gradient weight and checks, read from the recipe itself.

python -m docs.site.gallery          the page on standard output
"""

import functools
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm import objectives
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.diagnostics import gradient_weights
from tests.reference import gradient_formulas, objective_loops, pair_loops

ROOT = Path(__file__).parents[2]
PARITY = ("tests/objectives/test_trl_parity.py", "tests/objectives/test_trl_preference_parity.py")
TITLES = {"rollouts": "From rollouts", "answers": "From given answers", "pairs": "From pairs"}
_ARXIV, _LINK = r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)"
_LENGTH = {"max_length": 1024}  # it has no default of its own
OLD = 0.25  # the probability that the old policy gave to the token of a plot; DPPO alone reads it
AGE = 3.0  # steps since it was sampled; A-3PO alone reads them
HEAD = """\
# Objective gallery

Every recipe of `objectives.names()` with its equation, its source, what it does to the gradient of a token, its
hyper-parameters and what it was checked against. Nothing here is typed by hand: equations, defaults and curves come
from the recipes, whose conventions are in [objectives](../objectives.md).

**The curves.** The gradient of the loss is the sum over tokens of `g A grad log pi`. A curve is g, by automatic
differentiation of the recipe at its defaults, for an answer of one token: 1 is REINFORCE, 0 a token that teaches
nothing. On a long answer a sequence ratio is that of the whole answer. A recipe on pairs has no ratio: its curve is
the push that a pair gives, minus the derivative of its loss by the difference D of the two scores. DPPO's token had
probability 0.25 before, A-3PO's is three steps old, and SAT's quantile is that of tokens near ratio 1.

**In the equations** `y` is an answer and `t` a token of it, `R` its reward, `A` its advantage, `sg` a stopped
gradient. What every recipe has besides (`kl_coef`, `entropy_coef`, `correction`, `std`, `baseline`) is
[listed once](../objectives.md#hyper-parameters).
"""


def page() -> str:
    text, common = HEAD, set.intersection(*(set(objectives.hyperparameters(n)) for n in objectives.names("rollouts")))
    sources, compared = _sources(), _compared_with_trl()
    for reads, title in TITLES.items():
        text += f"\n## {title}\n"
        for name in objectives.names(reads):
            objective = make(name)
            text += f"\n### {name}\n\n{re.sub(_ARXIV, _LINK, sources[name])}\n\n"
            text += f"```text\n{_equation(objective)}\n```\n\n{figure(name, objective)}\n"
            text += _hyperparameters(name, common | {"std", "baseline", "std_eps"})
            text += _checks(name, name in compared)
    return text


def make(name: str) -> objectives.AnyObjective:
    return objectives.make(name, **(_LENGTH if "max_length" in objectives.hyperparameters(name) else {}))


@functools.partial(jax.jit, static_argnums=0)
def weights(objective: objectives.Objective, ratios: jax.Array, advantage: float) -> jax.Array:
    """g of answers of one token with these ratios, [b]; SAT's quantile is that of nine tokens in ten near ratio 1."""
    near = jnp.exp(0.06 * jax.scipy.stats.norm.ppf((jnp.arange(9 * ratios.size) + 0.5) / (9 * ratios.size)))
    all_ratios = jnp.concatenate([ratios, near])[:, None]
    old, router = jnp.full(all_ratios.shape, jnp.log(OLD)), jnp.zeros((1, *all_ratios.shape, 1))
    batch = Batch.of(
        logprobs=old + jnp.log(all_ratios),
        old_logprobs=old,
        sampler_logprobs=old,
        age=jnp.full(all_ratios.shape, AGE),
        advantages=jnp.full(len(all_ratios), advantage),
        mask=jnp.ones(all_ratios.shape, bool),
        router_logprobs=router,
        old_router_logprobs=router,
    )
    return gradient_weights(objective.policy, batch)[: ratios.size, 0]


@functools.partial(jax.jit, static_argnums=0)
def push(objective: objectives.PairObjective, differences: jax.Array) -> jax.Array:
    """Minus the derivative of the loss of a pair by the difference of its scores, [p].

    The scores lie around 0; those that are log-probs, without a reference, around a number that leaves none above 0.
    """
    middle = 0.0 if "ref_logprobs" in objective.needs else -jnp.max(jnp.abs(differences)) / 2

    def loss(differences: jax.Array) -> jax.Array:
        return jnp.sum(objective.loss(jnp.stack([differences, -differences], axis=1) / 2 + middle, None))

    return -jax.grad(loss)(differences)


def figure(name: str, objective: objectives.AnyObjective) -> str:
    """The curves as SVG in the colours of the page."""
    colours = {"#010203": "currentColor", "#040506": "var(--weight-positive)", "#070809": "var(--weight-negative)"}
    frame, positive, negative = colours
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    style |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), frame)
    with matplotlib.rc_context(style):
        picture = Figure(figsize=(5.0, 2.5), layout="constrained")
        axes = picture.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        if isinstance(objective, objectives.PairObjective):
            x = jnp.linspace(-8, 8, 161) / objective.loss.beta
            axes.plot(x, push(objective, x), color=positive, linewidth=2)
            axes.set(xlabel="difference of the scores D", ylabel="push")
            said = "push of a pair against the difference of its scores"
        else:
            x = _ratios(objective)
            axes.plot(x, weights(objective, x, 1.0), color=positive, linewidth=2, label="A > 0")
            if objective.reads == "rollouts":
                axes.plot(x, weights(objective, x, -1.0), color=negative, linewidth=2, dashes=(4, 2), label="A < 0")
            axes.axvline(1, color=frame, linewidth=0.6, alpha=0.5)
            axes.set(xlabel=f"ratio of the {objective.ratio.unit.replace('none', 'token')}", ylabel="gradient weight g")
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.ticklabel_format(useOffset=False)
            axes.legend(frameon=False)
            said = "gradient weight against the ratio, for positive and for negative advantages"
        file = io.StringIO()
        picture.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    for written, meant in colours.items():
        svg = svg.replace(written, meant)
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg .*?viewBox="([^"]*)".*?>', rf'<svg viewBox="\1" role="img" aria-label="{name}: {said}">', svg)
    return f'<figure class="weight">{" ".join(svg.split())}</figure>\n'


def _ratios(objective: objectives.Objective) -> jax.Array:
    """From almost 0 to past what the recipe bounds, or close around 1 where its bounds are close."""
    surrogate = objective.surrogate
    radius = 4 * max(getattr(surrogate, "clip_low", 1.0), getattr(surrogate, "clip_high", 1.0))
    if objective.ratio.unit == "sequence" and radius < 0.1:
        return jnp.linspace(1 - radius, 1 + radius, 401)
    return jnp.linspace(0.02, max(3.0, 1.2 * getattr(surrogate, "cap", 0.0)), 601)


def _equation(objective: objectives.AnyObjective) -> str:
    terms, letters = objective.formula()
    width = len("maximise  ")
    return "\n".join(["maximise  " + " ".join(terms), *(" " * width + letter for letter in letters)])


def _sources() -> dict[str, str]:
    """{recipe: source}, the last column of the tables of recipes."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("objectives.md", "preferences.md"))
    tables = "".join(re.findall(r"^\| recipe \|.*\| source \|\n((?:\|.*\n)+)", text, re.MULTILINE))
    sources = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", tables, re.MULTILINE))
    return {"sft": "The likelihood of given answers, as REINFORCE on answers that all earn 1.", **sources}


def _compared_with_trl() -> set[str]:
    return set(re.findall(r'\("(\w+)"[,)]', "".join((ROOT / path).read_text() for path in PARITY)))


def _hyperparameters(name: str, elsewhere: set[str]) -> str:
    own = {key: value for key, value in objectives.hyperparameters(name).items() if key not in elsewhere}
    if not own:
        return ""
    rows = [f"| `{key}` | {value} | {objectives.fields()[key].meaning} |" for key, value in own.items()]
    return "\n".join(["\n| hyper-parameter | default | meaning |", "| -- | -- | -- |", *rows, ""])


def _checks(name: str, trl: bool) -> str:
    lines = []
    if name in objective_loops.RECIPES:
        golden, derivation = objective_loops.GOLDEN[name]
        lines.append("value and gradient equal a loop in numpy written from the paper (`tests/reference`)")
        lines.append(f"by hand, loss {np.format_float_positional(golden, trim='-')}: {derivation}")
    if name in gradient_formulas.GRADIENTS:
        lines.append("gradient equal to a closed form, derived separately")
    if name in pair_loops.LOSSES:
        lines.append("value equal to a loop in Python written from the paper (`tests/reference/pair_loops.py`)")
    if name == "sft":
        lines.append("equal to `reinforce` with advantage 1 (`tests/objectives/test_preference.py`)")
    else:
        lines.append("gradient equal to finite differences")
    if trl:
        lines.append("value and gradient equal TRL's own loss on random inputs ([how](../objectives.md#against-trl))")
    return "\nChecked: " + "; ".join(lines) + ".\n"


if __name__ == "__main__":
    print(page())
