"""Doubts about a run before its first step, {name of a warning: what is wrong, what to do}: data that can be read and
still spoil every result, learning rates, fresh weights behind the tokenizer of a checkpoint."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.check import fresh_weights
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.tasks import verifiers
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.golds import NOTHING, every, named
from jaxrl_llm.tasks.messages import EARLIER, whole
from jaxrl_llm.tasks.splits import parts
from jaxrl_llm.tasks.verifiers import are_right
from jaxrl_llm.training.optimizer import rate_doubts

if TYPE_CHECKING:
    from jaxrl_llm.check.split_table import Numbers

_OF_DATA_SETS = ByName(
    {
        "numbers_of": "jaxrl_llm.check.split_table",
        "of_other_rows": "jaxrl_llm.check.row_doubts",
        "of_repeated": "jaxrl_llm.check.row_doubts",
        "table": "jaxrl_llm.check.split_table",
    }
)
_READ = 50_000  # rows of a split of a data set, from its start
_DRAWN = 256  # examples of a task that draws them
_ISOLATED = 64  # right answers of a split about which a verifier in worker processes is asked
_RENDERED = 8  # prompts

Drawn = Sequence[tuple[str, str, Row]]


class Hopeless(ValueError):
    """Every result would be wrong; `doubt` names the doubt."""

    def __init__(self, doubt: str, text: str):
        super().__init__(text)
        self.doubt = doubt


@dataclasses.dataclass(frozen=True)
class Survey:
    """Doubts, and the numbers of each split of a data set ({} where the task draws its examples)."""

    doubts: Mapping[str, str]
    splits: Mapping[str, "Numbers"]

    def table(self) -> list[str]:
        """The numbers as lines of at most 69 characters; none where the task draws its examples."""
        return _OF_DATA_SETS["table"](self.splits) if self.splits else []


def of_run(run: Run) -> Survey:
    """The doubts about a run and the numbers of its data.

    Raises:
        ValueError: every result would be wrong; `Hopeless` where the data are the reason.
    """
    s = run.settings
    rates = {"optimizer.learning_rate": s.optimizer.learning_rate}
    if s.critic.kind == "separate":
        rates["critic.learning_rate"] = s.critic.learning_rate
    if s.warm_start.steps:
        rates["warm_start.learning_rate"] = s.warm_start.learning_rate
    found = fresh_weights.doubts(s) | rate_doubts(rates)
    rewarded = s.objective.reads == "rollouts" and "verifier" in s.rewards.weights and not s.teacher.path
    data = survey(s.task, s.answer_length, rewarded=rewarded)
    return Survey(found | dict(data.doubts), data.splits)


def survey(task: Task, answer_length: int, *, rewarded: bool = True) -> Survey:
    """Survey the data of a task whose answers have at most `answer_length` tokens, the end included.

    Right answers are read by a verifier that has a name; what a rule of the user's own wants to see, only it knows.

    Args:
        rewarded: whether training lives on the verifier's rewards.

    Raises:
        Hopeless: every result would be wrong, since the model never sees the prompt (prompt_altered), or no answer can
          be rewarded (answers_unrewarded).
    """
    train, test = (examples(task, split, _READ) for split in ("train", "test"))
    asked = {"train": _asked(task, train), "test": _asked(task, test)}
    found, hopeless = _of_answers(task, [*asked["train"], *asked["test"]], answer_length)
    of_train = len(asked["train"])
    if rewarded and hopeless is not None and hopeless.issuperset(range(of_train)):
        raise Hopeless("answers_unrewarded", f"no answer can be rewarded: {'; '.join(found.values())}")
    splits = {}
    for name, drawn, others in (("train", train, ()), ("test", test, train)):
        if task.source is None:
            break
        places = range(of_train) if name == "train" else range(of_train, of_train + len(asked["test"]))
        reached = None if hopeless is None else 1 - len(hopeless.intersection(places)) / max(1, len(places))
        complete = len(drawn) < _READ
        splits[name] = _OF_DATA_SETS["numbers_of"](
            task, answer_length, drawn, complete=complete, reached=reached, others=others
        )
    if rewarded and task.source is not None:
        most = _ISOLATED if task.isolated else None
        found |= _OF_DATA_SETS["of_other_rows"](task, asked["train"], most)
        found |= _OF_DATA_SETS["of_repeated"](task, train, most)
    return Survey(_of_prompts(task, train) | found | _of_splits(task, train, test), splits)


def examples(task: Task, split: str, most: int) -> Drawn:
    """The first ones of a split; a task that draws its examples has some of train, which no two splits share."""
    if task.source is None:
        assert task.sample is not None
        rng = np.random.default_rng(0)
        return [parts(task, task.sample(rng)) for _ in range(min(most, _DRAWN))] if split == "train" else []
    size = {"train": task.train_size, "test": task.test_size}[split]
    return [parts(task, draw) for draw in itertools.islice(task.source.read()[split], min(size or most, most))]


def _asked(task: Task, examples: Drawn) -> Drawn:
    """The examples whose right answers are looked at, evenly over the split."""
    in_workers = task.isolated and named(task.verify)
    return examples[:: -(-len(examples) // _ISOLATED) or 1] if in_workers else examples


def _of_prompts(task: Task, examples: Drawn) -> dict[str, str]:
    if not task.prompting.chat:  # then `Prompting` itself has seen to it
        return {}
    asked = {prompt: row.get(EARLIER, ()) for prompt, _, row in reversed(examples)}  # the first row of each prompt
    prompts = list(dict.fromkeys(prompt for prompt, *_ in examples))[:_RENDERED]
    texts = {prompt: task.prompting.text(task.tokenizer, prompt, asked[prompt]) for prompt in prompts}
    remedy = "correct chat_template.jinja of the tokenizer, or set task.chat=False"
    if len(texts) > 1 and len(set(texts.values())) == 1:
        raise Hopeless(
            "prompt_altered",
            f"the chat template drops the prompt: {prompts[0]!r:.60} and {prompts[1]!r:.60} are both read as "
            f"{texts[prompts[0]]!r:.80}; {remedy}",
        )
    lost = [prompt for prompt, text in texts.items() if prompt.strip() not in text]
    if not lost:
        return {}
    return {"prompt_altered": f"the chat template changes the prompt {lost[0]!r:.60}; read samples.jsonl, {remedy}"}


def _of_answers(task: Task, examples: Drawn, answer_length: int) -> tuple[dict[str, str], set[int] | None]:
    """The warnings, and the examples whose right answer a verifier by name never rewards; None of another verifier."""
    golds = [every(gold, row) for _, gold, row in examples]
    questions = [
        (i, (prompt, one, gold, row))
        for i, (prompt, gold, row) in enumerate(examples if named(task.verify) else [])
        for one in golds[i]
    ]
    read = {i for i, _ in itertools.compress(questions, are_right(task, [question for _, question in questions]))}
    bounded = bool(questions) or task.source is None
    missing = [i for i, (_, gold, _) in enumerate(examples) if task.source and gold.strip() in NOTHING]
    long = [i for i in range(len(examples)) if bounded and not any(_fits(task, one, answer_length) for one in golds[i])]
    by_number = golds if named(task.verify) == "numeric" else []
    words = {i for i, each in enumerate(by_number) if all(verifiers.gold_number(one) is None for one in each)}
    unrewarded = {*range(len(examples))} - read if questions else set()
    over = f"have more than {answer_length} tokens with EOS; raise rollout.max_new_tokens, or the task's bound"
    found = {
        "answers_missing": (missing, "are empty or null; name the field that holds them"),
        "answers_too_long": (long, over),
        "answers_unrewarded": (
            sorted(unrewarded - words),
            "get no reward from their own verifier; correct them, or choose another verifier",
        ),
        "answers_not_numbers": (
            sorted(words.difference(missing)),
            "are no number, so that `numeric` rewards none or wrong ones; correct them, or set "
            "task.options.verifier=math",
        ),
    }
    told = {
        name: f"{len(which)} of {len(examples)} right answers of {task.name} {what} (the first: "
        f"{examples[which[0]][1]!r:.60} to {examples[which[0]][0]!r:.60})"
        for name, (which, what) in found.items()
        if which
    }
    return told, {*missing, *long, *unrewarded} if questions else None


def _fits(task: Task, gold: str, answer_length: int) -> bool:
    quick = 2 * len(gold.encode()) < answer_length  # hardly any tokenizer makes two tokens of a byte
    return quick or len(task.ids_of_answer(gold)) <= answer_length


def _of_splits(task: Task, train: Drawn, test: Drawn) -> dict[str, str]:
    known = {whole(prompt, row) for prompt, _, row in train}
    shared = [prompt for prompt, _, row in test if whole(prompt, row) in known]
    if not shared:
        return {}
    return {
        "splits_overlap": f"{len(shared)} of {len(test)} test prompts of {task.name} are train prompts too (the first: "
        f"{shared[0]!r:.60}), so that evaluation measures memory; give the test split prompts of its own"
    }
