"""Suggestions for a mistyped field of a config."""

import difflib
from collections.abc import Iterable

# Names that other libraries give to these fields.
_ELSEWHERE = {
    "batch_size": "rollout.prompts",
    "beta": "objective.kl_coef",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "gradient_accumulation_steps": "updates.micro_batch_rows",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "optimizer.clip_norm",
    "max_steps": "steps",
    "num_epochs": "updates.epochs",
    "num_generations": "rollout.group_size",
    "num_iterations": "updates.epochs",
}


def unknown_field(path: str, known: Iterable[str]) -> str:
    """ "config has no field 'optimizer.lr'; did you mean 'optimizer.learning_rate'?"

    Looks for the word in other blocks, for names of other libraries, for words of which it is the initials, and last
    for a near miss, first among the fields of its block. Both arguments have the form `field` or `block.field`.
    """
    known = list(known)
    block, _, word = path.rpartition(".")
    blocks = sorted({field.partition(".")[0] for field in known if "." in field})
    if block and block.partition(".")[0] not in blocks:
        close = difflib.get_close_matches(block, blocks, n=1)
        hint = f"did you mean {close[0]!r}?" if close else _meant(word, known)
        return f"config has no block {block!r}; {hint or 'its blocks are ' + ', '.join(blocks)}"
    own = [field for field in known if field.rpartition(".")[0] == block] + ([] if block else blocks)
    hint = _meant(word, own) or _meant(word, known)
    return f"config has no field {path!r}; {hint or 'it has ' + ', '.join(sorted(own))}"


def _meant(word: str, fields: list[str]) -> str:
    names = {field: field.rpartition(".")[2] for field in fields}
    same = [field for field, name in names.items() if name == word]
    initials = [field for field, name in names.items() if "".join(part[0] for part in name.split("_")) == word]
    elsewhere = [field for field in names if field == _ELSEWHERE.get(word)]
    near = difflib.get_close_matches(word, names.values(), n=1)
    meant = same or elsewhere or initials or [field for field, name in names.items() if name in near]
    return f"did you mean {' or '.join(map(repr, meant[:3]))}?" if meant else ""
