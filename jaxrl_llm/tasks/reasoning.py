"""Any of the generated tasks of the library reasoning-gym, with its own verifier."""

import ast
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.ground.ranges import suggestion
from jaxrl_llm.tasks.base import Draw, Task
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import ByteTokenizer

_INDICES = 2**31 - 1
_SIZE = 20_000  # entries of a data set that makes all of them at once; others make any entry from its index
_NO_SETTINGS: Mapping[str, Any] = {}


def reasoning_gym(
    *,
    dataset: str = "chain_sum",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    prompt_length: int = 256,
    answer_length: int = 256,
) -> Task:
    """`dataset` of `reasoning_gym.create_dataset` with its own `settings`, such as {"min_digits": 2}."""
    written = json.dumps(dict(settings), sort_keys=True)

    def sample(rng: np.random.Generator) -> Draw:
        index = int(rng.integers(_INDICES))
        entry = _entry(dataset, written, index)
        return entry["question"], str(entry["answer"] or ""), {"index": index}

    _dataset(dataset, written)  # so that a mistake shows at the start
    return Task(
        name="reasoning_gym",
        prompt_length=prompt_length,
        answer_length=answer_length,
        tokenizer=ByteTokenizer(),
        sample=sample,
        drop_long=True,
        verify=ReasoningGymVerifier(dataset, written),
        isolated=True,
        asks=f"Solve puzzles of reasoning-gym's {dataset}",
    )


@dataclasses.dataclass(frozen=True)
class ReasoningGymVerifier:
    """The data set's own score, in [0, 1], of what stands in the last <answer> of a text, or of a text without one.

    The entry is made again from its index.
    """

    dataset: str
    settings: str  # JSON

    def load(self) -> None:
        _dataset(self.dataset, self.settings)
        evaluate_no_code()

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        from reasoning_gym.utils import extract_answer

        given = extract_answer(answer)
        entry = _entry(self.dataset, self.settings, row["index"])
        return _dataset(self.dataset, self.settings).score_answer(answer.strip() if given is None else given, entry)


def evaluate_no_code() -> None:
    """Let no scorer of the library run an answer: some give it to Python's `eval`, some to sympy's `parse_expr`, which
    evaluates it too. For a worker process, where the library's names may change.
    """
    import sympy
    from sympy.parsing import sympy_parser

    parse = sympy_parser.parse_expr

    def formula(text: str, **options: Any) -> Any:
        words = re.findall("[A-Za-z]{2,}", text)
        if not _PLAIN.fullmatch(text) or not _FUNCTIONS.issuperset(words):
            raise ValueError("it is no formula")
        return parse(text, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym"):
            names = vars(module)
            names["eval"] = _literal  # before the builtin
            if names.get("parse_expr") is parse:
                names["parse_expr"] = formula
    sympy.parse_expr = formula


# A formula has names of one letter or of these functions: what evaluates text or reaches into objects has others.
_PLAIN = re.compile(r"[0-9A-Za-z\s.,+*/^()!-]*")
_FUNCTIONS = {"sqrt", "exp", "log", "ln", "abs", "Abs", "pi"} | {
    f"{a}{name}{h}" for a in ("", "a") for name in ("sin", "cos", "tan", "cot", "sec", "csc") for h in ("", "h")
}
_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
_LITERAL += (ast.Load,)


def _literal(text: str) -> Any:
    """The value of constants, of lists of them and of arithmetic."""
    tree = ast.parse(text.strip(), mode="eval")
    if not all(isinstance(node, _LITERAL) for node in ast.walk(tree)):
        raise ValueError("it is no literal")
    return eval(compile(tree, "answer", "eval"))


def _entry(name: str, settings: str, index: int) -> Any:
    dataset = _dataset(name, settings)
    try:
        return dataset[index]
    except IndexError:
        return dataset[index % _SIZE]


@functools.lru_cache(maxsize=4)
def _dataset(name: str, settings: str) -> Any:
    try:
        import reasoning_gym as library
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("the task reasoning_gym needs its library; pip install 'jaxrl_llm[tasks]'") from error
    if name not in DATASETS:
        raise ValueError(
            f"reasoning_gym.dataset={name!r} is unknown{suggestion(name, DATASETS)}; "
            f"there are {', '.join(sorted(DATASETS))}"
        )
    given = json.loads(settings)
    try:
        if name == "composite":
            given["datasets"] = [DatasetSpec(**one) for one in given.get("datasets", ())]
        return library.create_dataset(name, seed=0, size=_SIZE, **given)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning_gym.settings={settings} do not fit {name!r} ({error}); correct them") from error
