"""The opinion as a table of 80 columns and as a page in Markdown."""

import textwrap
from collections.abc import Iterator
from typing import Any

from jaxrl_llm import objectives
from jaxrl_llm.audit.opinion import Opinion
from jaxrl_llm.audit.search import Fit
from jaxrl_llm.ground.terminal import visible

_ORDER = ("aggregation", "clip_low", "clip_high", "dual_clip", "kl_coef", "kl_estimator")
_CONVENTIONS = {"aggregation", "ratio", "accumulation", "max_length", "empty_answers", "tokens_of"}  # tell fits apart


def classes(made: Opinion) -> list[tuple[Fit, dict[str, str]]]:
    """The fits, those of one objective that differ only in settings that the batch leaves open as one.

    Returns the first fit of each class, and its settings as text.
    """
    out: dict[Any, list[Fit]] = {}
    for fit in made.fits:
        same = [other.settings for other in made.fits if other.objective == fit.objective]
        varied = {key for row in same for key in row if len({str(other.get(key)) for other in same}) > 1}
        left_open = (varied | fit.open.keys()) - _CONVENTIONS
        shape = {key: value for key, value in fit.settings.items() if key not in left_open}
        out.setdefault((fit.objective, str(shape)), []).append(fit)
    return [(fits[0], _texts(fits)) for fits in out.values()]


def _texts(fits: list[Fit]) -> dict[str, str]:
    keys = dict.fromkeys(key for fit in fits for key in fit.settings)
    ordered = sorted(keys, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    values = {key: dict.fromkeys(_text(fit.settings[key]) for fit in fits if key in fit.settings) for key in ordered}
    return {key: fits[0].open.get(key) or " or ".join(told) for key, told in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(_text(one) for one in value)
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _listed(texts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_text(text)}" for key, text in texts.items())


def _off(fit: Fit) -> list[str]:
    """How far loss and gradient are off."""
    gradient = "-" if fit.gradient_difference is None else f"{fit.gradient_difference:.1e}"
    return [f"{fit.loss_difference:.1e}", gradient]


def table(made: Opinion) -> str:
    """A table of at most 80 columns: fits or nearest misses, advantages, faults."""
    lines = textwrap.wrap(_verdict(made), 80)
    if made.fits:
        lines += ["", f"{'objective':12}{'loss off':>11}{'gradient off':>14}  settings"]
    for fit, texts in classes(made)[:12]:
        defaults = objectives.hyperparameters(fit.objective)
        of_advantages = ("std", "std_eps", "baseline")
        told = {key: x for key, x in texts.items() if key not in of_advantages and x != _text(defaults.get(key))}
        loss, gradient = _off(fit)
        head = f"{fit.objective:12}{loss:>11}{gradient:>14}  {visible(_listed(told))}"
        lines += textwrap.wrap(head, 80, subsequent_indent=" " * 39)
    lines += ["", *textwrap.wrap(_advantages(made), 80)]
    for told in made.scores:
        lines += textwrap.wrap(told, 80, subsequent_indent="  ")
    for name, evidence in made.faults:
        lines += ["", *textwrap.wrap(f"FAULT {name}: {visible(evidence)}", 80, subsequent_indent="  ")]
    return "\n".join([*lines, *([] if made.faults else ["", "no fault found"]), *textwrap.wrap(_unread(made), 80)])


def _verdict(made: Opinion) -> str:
    names = list(dict.fromkeys(fit.objective for fit in made.fits))
    told = f"{', '.join(names)}{': this batch cannot tell them apart' if len(names) > 1 else ''}"
    if made.reproduced and made.fits[0].gradient_difference is None:
        return f"the loss alone, in {len(made.fits)} way{'s' * (len(made.fits) > 1)}, is that of {told}"
    if made.reproduced:
        return f"loss and gradient are those of {told}"
    if made.fits:
        return "no objective reproduces loss and gradient; the nearest:"
    if not made.capture.has("reported_dlogprobs"):
        return "no objective gives this loss; save reported_dlogprobs, which tells more"
    return "nothing was reproduced; see the faults"


def _advantages(made: Opinion) -> str:
    told = "; or ".join(_listed(one.settings) for one in made.conventions)
    return f"advantages: {told or 'not told by the capture, or reproduced by no convention'}"


def _unread(made: Opinion) -> str:
    names = ", ".join(made.capture.unknown)
    return f"not read, as the schema does not have them: {names}" if names else ""


def page(made: Opinion, name: str) -> str:
    """The page: verdict, the class of fits with every setting, the formula of the best, advantages and faults."""
    return "\n".join(_page(made, name)) + "\n"


def _page(made: Opinion, name: str) -> Iterator[str]:
    mask, found = made.capture.mask, classes(made)
    yield from (f"# Audit of {_cell(name)}", "", f"{_sentence(_verdict(made))}.", "")
    yield f"The batch has {len(mask)} answers of up to {mask.shape[1]} tokens, {mask.sum()} of which count."
    if made.faults:
        yield from _rows("Faults", ("fault", "evidence"), [(f"`{name}`", said) for name, said in made.faults])
    if found:
        heads = "objective", "loss off", "gradient off", "settings"
        rows = [(fit.objective, *_off(fit), _listed(texts)) for fit, texts in found]
        yield from _rows("Fits" if made.reproduced else "Nearest misses", heads, rows)
        yield from ("", "`loss off` is the reported loss minus the replayed one, `gradient off` the norm of the "
                    "difference over the reported norm.")  # fmt: skip
    if len(found) > 1 and made.reproduced:
        yield from ("", "This batch cannot tell these apart. A second pass over the same answers, in which ratios are "
                    "no longer 1, tells more.")  # fmt: skip
    yield from ("", "## Advantages", "", f"{_sentence(_cell(_advantages(made)))}.")
    if made.scores:
        yield from ("", "## Log-probs against the model", "", *(f"- {_cell(told)}" for told in made.scores))
    if made.capture.unknown:
        yield from ("", f"{_sentence(_unread(made))}.")


def _rows(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    for row in (heads, ["--"] * len(heads), *rows):
        yield f"| {' | '.join(map(_cell, row))} |"


def _sentence(text: str) -> str:
    """The text with a capital in front; names in it keep theirs."""
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("\n", " ")
