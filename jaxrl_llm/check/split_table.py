"""A data set in numbers and as a table: rows, lengths, what is dropped, repeated, shared, out of reach."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.messages import whole

_OF_ENVIRONMENTS = ByName({"as_read": "jaxrl_llm.tasks.environments.reading"})
_ROOM = 8  # times the longest right answer: a bound above that is noted
MEASURED = 1000  # rows of a split whose tokens are counted, evenly over it

Numbers = Mapping[str, int | float | bool | None]


def numbers_of(
    task: Task,
    answer_length: int,
    examples: Sequence[tuple[str, str, Row]],
    *,
    complete: bool,
    reached: float | None,
    others: Sequence[tuple[str, str, Row]] = (),
) -> Numbers:
    """The numbers of a split.

    Args:
        answer_length: bound on the tokens of an answer, the end included.
        complete: whether `examples` are all rows of the split; otherwise its first ones.
        reached: the share of its right answers that the verifier rewards; None where only the verifier knows.
        others: the examples of the other split; how many prompts are among theirs too is `shared`.
    """
    some = examples[:: -(-len(examples) // MEASURED) or 1]
    read = some if task.environment is None else _OF_ENVIRONMENTS["as_read"](task, some)
    prompts = [len(task.ids_of_prompt(prompt, row)) for prompt, _, row in read]
    answers = [len(task.ids_of_answer(gold)) for _, gold, _ in some]
    asked, known = [whole(prompt, row) for prompt, _, row in examples], {whole(p, row) for p, _, row in others}
    return {
        "rows": len(examples),
        "complete": complete,
        "measured": len(some),
        "prompt_median": round(statistics.median(prompts or [0])),
        "prompt_longest": max(prompts, default=0),
        "prompt_bound": task.prompt_length,
        "prompts_dropped": sum(n > task.prompt_length for n in prompts),
        "answer_median": round(statistics.median(answers or [0])),
        "answer_longest": max(answers, default=0),
        "answer_bound": answer_length,
        "repeated": len(asked) - len(set(asked)),
        "shared": sum(one in known for one in asked),
        "reached": reached,
    }


def table(splits: Mapping[str, Numbers]) -> list[str]:
    """The numbers of one split or two as lines of at most 69 characters."""
    given = list(splits.values())
    cells: dict[str, list[Any]] = {"": list(splits)}
    cells["rows"] = [f"{n['rows']}{'' if n['complete'] else ' or more'}" for n in given]
    for kind in ("prompt", "answer"):
        names = [f"{kind}_{of}" for of in ("median", "longest", "bound")]
        cells[f"{kind}'s tokens: median, most, bound"] = [", ".join(str(n[name]) for name in names) for n in given]
    cells["prompts dropped, too long"] = [n["prompts_dropped"] for n in given]
    cells["prompts that stand there twice"] = [n["repeated"] for n in given]
    cells["prompts that are in train too"] = ["", *(n["shared"] for n in given[1:])]
    if all(n["reached"] is not None for n in given):
        cells["right answers found right"] = [f"{100 * (n['reached'] or 0):.3g} %" for n in given]
    lines = [f"{name:<37}" + "".join(f"{cell:>16}" for cell in row) for name, row in cells.items()]
    if some := [
        f"{n['measured']} of {split}" for split, n in splits.items() if (n["measured"] or 0) < (n["rows"] or 0)
    ]:
        lines.append(f"(tokens and drops: of {' and '.join(some)}, evenly chosen)")
    longest, bound = max(n["answer_longest"] or 0 for n in given), max(n["answer_bound"] or 0 for n in given)
    if bound >= max(_ROOM * longest, 32):
        lines += [
            f"(right answers have at most {longest} tokens, the bound is {bound}: lower",
            "rollout.max_new_tokens, if nothing is to stand before them)",
        ]
    return lines
