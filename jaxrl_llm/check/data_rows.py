"""Rows of a check that need no model: the doubts of the data, template, special tokens, lengths, right answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.check.doubts import Hopeless, examples, of_run
from jaxrl_llm.check.findings import LOOK, OK, STOP, Finding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.blocks import Settings
from jaxrl_llm.tasks import PublishedTokenizer, Row, Task
from jaxrl_llm.tasks.golds import named
from jaxrl_llm.tasks.verifiers import submit

_OF_ENVIRONMENTS = ByName({"as_read": "jaxrl_llm.tasks.environments.reading"})
_GOLD = 64  # right answers that the verifier is asked about
_ANSWER = "ANSWER"
_NAMES = {
    "prompt_altered": "chat template",
    "answers_missing": "right answers",
    "answers_too_long": "right answers",
    "answers_unrewarded": "right answers",
    "answers_not_numbers": "right answers",
    "answers_disagree": "right answers",
    "wrong_answers_rewarded": "verifier",
    "splits_overlap": "train and test",
    "learning_rate": "learning rate",
    "fresh_weights": "weights",
}

Examples = Sequence[tuple[str, str, Row]]  # prompt, right answer, other fields


def examples_of(run: Run) -> Examples:
    """The first of the train split, too long ones among them."""
    task = run.settings.task
    found = examples(task, "train", 512)
    return found if task.environment is None else _OF_ENVIRONMENTS["as_read"](task, found)


def rows(run: Run, examples: Examples) -> list[Finding]:
    """The rows that need no model."""
    task = run.settings.task
    found = [
        template(task),
        special_tokens(task, examples),
        tokenizer_of(run, examples),
        prompt_lengths(task, examples),
        *doubts(run),
        best(run.settings),
    ]
    return [row for row in found if row is not None]


def doubts(run: Run) -> list[Finding]:
    """One row for each doubt that a run warns of or refuses before its first step."""
    try:
        warnings: Mapping[str, str] = of_run(run).doubts
    except Hopeless as error:
        return [_told(error.doubt, str(error), STOP)]
    except ValueError as error:
        return [_told("learning_rate", str(error), STOP)]
    return [_told(name, text, LOOK) for name, text in warnings.items()]


def _told(doubt: str, text: str, verdict: str) -> Finding:
    seen, _, remedy = text.rpartition("; ")
    return Finding(_NAMES.get(doubt, doubt), seen or text, verdict, remedy if seen else "")


def best(s: Settings) -> Finding | None:
    """Name the checkpoint that stays for its evaluation, and when that ends the run; None where none does."""
    config = s.checkpoint
    if not config.best:
        return None
    patience, evaluations = config.early_stopping_patience, -(-s.steps // s.evaluation.every)
    which = "highest" if config.best_mode == "max" else "lowest"
    seen = f"the one with the {which} {config.best} stays beside the newest {config.keep}"
    if patience:
        seen += f"; {patience} evaluations without a better one end the run, which has {evaluations}"
    if patience < evaluations:
        return Finding("best checkpoint", seen)
    return Finding("best checkpoint", seen, LOOK, "lower checkpoint.early_stopping_patience or evaluation.every")


def template(task: Task) -> Finding:
    """Check that prompts end where the turn of the answer begins, and that sampling knows its end."""
    tokenizer, name = task.tokenizer, "chat template"
    if not (task.prompting.chat and isinstance(tokenizer, PublishedTokenizer)):
        unused = isinstance(tokenizer, PublishedTokenizer) and tokenizer.template
        return Finding(name, "prompts are plain text" + (": the tokenizer's template is not used" if unused else ""))
    asked = {"role": "user", "content": "QUESTION"}
    given = {"role": "assistant", "content": _ANSWER}
    options = dict(task.prompting.chat_options)
    bare = tokenizer.chat([asked], add_generation_prompt=False, **options)
    opened = tokenizer.chat([asked], **options)
    whole = tokenizer.chat([asked, given], add_generation_prompt=False, **options)
    before, found, after = whole.rpartition(_ANSWER)
    if not found:
        return Finding(
            name, "the template drops what an assistant has said", LOOK, "correct chat_template.jinja of the tokenizer"
        )
    header = before.removeprefix(bare).strip()
    if opened == bare and before.startswith(bare) and header:
        return Finding(
            name,
            f"a prompt ends before the turn of its answer, which the template begins with {header!r:.40}",
            STOP,
            "take the checkpoint's own chat_template.jinja, one that heeds add_generation_prompt",
        )
    ids = tokenizer.encode(after)
    if ids and not set(ids) & set(tokenizer.end_ids):
        backend: Any = getattr(tokenizer, "backend")  # noqa: B009 (of `tokenizers`, untyped)
        ends = " or ".join(repr(backend.id_to_token(i)) for i in tokenizer.end_ids)
        return Finding(
            name,
            f"the template ends an answer with {after.strip()!r:.30}, and sampling with {ends}",
            STOP,
            "name the token that ends an answer in generation_config.json (eos_token_id), or take the checkpoint's own "
            "tokenizer",
        )
    return Finding(name, f"prompts end with {opened[-24:]!r}, answers with {after.strip()!r:.30}")


def special_tokens(task: Task, examples: Examples) -> Finding:
    """Look for special tokens in the texts of the data, which are read as those tokens."""
    name = "special tokens"
    if not isinstance(task.tokenizer, PublishedTokenizer):
        return Finding(name, "no text is read as a special token")
    backend: Any = getattr(task.tokenizer, "backend")  # noqa: B009 (of `tokenizers`, untyped)
    added = backend.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    holds = [[text for text in special if text in prompt] for prompt, *_ in examples]
    named = list(dict.fromkeys(text for one in holds for text in one))
    seen = f"{sum(map(bool, holds))} of {len(holds)} prompts name one of {len(special)}"
    if not named:
        return Finding(name, seen)
    shown = ", ".join(map(repr, named[:3]))
    remedy = "take them out of the data: they are read as those tokens, so that a text could end its own turn"
    return Finding(name, f"{seen}: {shown}", LOOK, remedy)


def tokenizer_of(run: Run, examples: Examples) -> Finding | None:
    """Compare the tokens of prompts with those of the checkpoint's own tokenizer; None where it has none."""
    s, name = run.settings, "tokenizer"
    if not s.pretrained or not examples:
        return None
    try:
        own = tasks.load_tokenizer(s.pretrained)
    except (OSError, ValueError, ImportError):  # the checkpoint has none
        return None
    prompting = s.task.prompting
    texts = [prompting.text(s.task.tokenizer, prompt) for prompt, *_ in examples[:8]]
    other = [text for text in texts if prompting.encode(own, text) != prompting.encode(s.task.tokenizer, text)]
    remedy = "leave task.tokenizer empty, so that the checkpoint's own is used"
    if other:
        return Finding(
            name, f"reads {len(other)} of {len(texts)} prompts in other tokens than the checkpoint's", STOP, remedy
        )
    if own.end_ids != s.task.tokenizer.end_ids:
        return Finding(
            name, f"ends answers with {s.task.tokenizer.end_ids}, the checkpoint's with {own.end_ids}", LOOK, remedy
        )
    return Finding(name, f"that of the checkpoint, {own.vocab_size} ids for a model of {s.model.vocab_size}")


def prompt_lengths(task: Task, examples: Examples) -> Finding:
    """Lengths of the prompts, and how many are dropped as too long."""
    lengths = np.array([len(task.ids_of_prompt(prompt, row)) for prompt, _, row in examples])
    over, bound = int((lengths > task.prompt_length).sum()), task.prompt_length
    seen = (
        f"longest of {len(lengths)}: {lengths.max()} tokens, bound {bound}; {over} dropped ({over / len(lengths):.0%})"
    )
    if not over:
        return Finding("prompts", seen)
    remedy = f"raise the bound (rollout.max_prompt_length): the 95th percentile is {np.quantile(lengths, 0.95):.0f}"
    return Finding("prompts", seen, LOOK if over / len(lengths) > 0.01 else OK, remedy)


def right_answers(task: Task, examples: Examples, best: float) -> Finding:
    """Rewards that the verifier gives right answers; best: the highest reward of a sampled answer.

    A rule of the user's own may ask for more than the bare right answer: that it gives those nothing is a fault where
    nothing else is rewarded either.
    """
    if task.environment is not None:
        return Finding("verifier", f"an environment judges episodes; the best one sampled gets {best:g}")
    asked = [(prompt, gold, gold, row) for prompt, gold, row in examples[:_GOLD]]
    verdicts = submit(task, asked).result()
    good = sum(verdict.reward >= task.solved for verdict in verdicts)
    errors = [verdict.error for verdict in verdicts if verdict.error]
    seen = f"{good} of {len(verdicts)} right answers get at least {task.solved:g}"
    seen += f"; {len(errors)} fail, the first: {errors[0]:.80}" if errors else ""
    if good == len(verdicts):
        return Finding("verifier", seen)
    first = next(i for i, verdict in enumerate(verdicts) if verdict.reward < task.solved)
    seen += f"; {asked[first][1]!r:.40} to {asked[first][0]!r:.40} gets {verdicts[first].reward:g}"
    remedy = "correct the verifier or the right answers"
    if good:
        return Finding("verifier", seen, LOOK, remedy)
    if named(task.verify) or not best >= task.solved:
        return Finding("verifier", seen, STOP, f"{remedy}: nothing is rewarded, so nothing can be learned")
    return Finding("verifier", f"{seen}; of the sampled answers some are rewarded", OK)
