"""Doubts about a data set that one row alone does not show: {name of a warning: what is wrong, what to do}."""

import itertools
from collections.abc import Sequence

from jaxrl_llm.tasks import verifiers
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.golds import every, named
from jaxrl_llm.tasks.messages import whole
from jaxrl_llm.tasks.verifiers import are_right

_CROSSED = 1000  # different right answers, each of which is given to other rows
_FALSE = 0.02  # the least share of those that is doubtful when rewarded

Rows = Sequence[tuple[str, str, Row]]


def of_other_rows(task: Task, examples: Rows, most: int | None) -> dict[str, str]:
    """The doubt where a verifier by name rewards right answers of other rows; each counts once in any spelling.

    most: rows that it is asked about.
    """
    distinct = {"".join(gold.split()).casefold(): (prompt, gold, row) for prompt, gold, row in reversed(examples)}
    rows = list(distinct.values())[::-1][: most or _CROSSED]
    questions = [
        (prompt, other, gold, row)
        for i, (prompt, gold, row) in enumerate(rows if named(task.verify) else [])
        for step in range(1, min(4, len(rows)))
        if (other := rows[(i + step) % len(rows)][1]) not in every(gold, row)
        and (verifiers.gold_number(other) is None or verifiers.gold_number(other) != verifiers.gold_number(gold))
    ]
    wrong = list(itertools.compress(questions, are_right(task, questions)))
    if len(wrong) < max(2, _FALSE * len(questions)):
        return {}
    return {
        "wrong_answers_rewarded": f"{len(wrong)} of {len(questions)} times the verifier of {task.name} rewards the "
        f"right answer of another row ({wrong[0][1]!r:.60} where {wrong[0][2]!r:.60} is right); choose another "
        "verifier, or bring the right answers into the form that it reads"
    }


def of_repeated(task: Task, examples: Rows, most: int | None) -> dict[str, str]:
    """The doubt where prompts occur with different right answers, to a verifier by name or else by their texts.

    most: such prompts that are looked at.
    """
    first: dict[str, tuple[int, str, Row]] = {}
    pairs = []
    for i, (prompt, gold, row) in enumerate(examples, 1):
        place, known, of = first.setdefault(whole(prompt, row), (i, gold, row))
        if not {one.strip() for one in every(gold, row)} & {one.strip() for one in every(known, of)}:
            pairs.append((place, i, (prompt, gold, known, of)))
    pairs = pairs[:most]
    agree = are_right(task, [question for *_, question in pairs]) if named(task.verify) else [False] * len(pairs)
    found = [pair for pair, same in zip(pairs, agree, strict=True) if not same]
    if not found:
        return {}
    place, other, (prompt, gold, known, _) = found[0]
    return {
        "answers_disagree": f"{len(found)} of {len(examples)} rows of {task.name} repeat a prompt with another right "
        f"answer (the first: {prompt!r:.60} has {known!r:.40} in row {place} of train, {gold!r:.40} in row {other}); "
        "correct them, or give all right answers of a prompt as a list"
    }
