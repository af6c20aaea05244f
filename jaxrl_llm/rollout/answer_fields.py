"""The fields of what a server says: each has a type, a range and a length, which are held here and nowhere else.

In: the bytes of an answer and what was asked. Out: typed arrays, or `Unreadable` with the field, what it holds and what
it may hold.
"""

import base64
import binascii
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

# The log-prob of the least positive float32, which a drawn token cannot be below; vLLM writes -9999 for log 0, which a
# token of a prompt may have. Above 0 is what rounding does to a log-softmax.
_DRAWN, _GIVEN, _ROUNDING = -104.0, -9999.0, 1e-4
_FIXED_BYTES, _TOKEN_BYTES, _EXPERT_BYTES = 2**18, 1024, 12  # of JSON, the last of an int64 in base64
_CHANCE = math.log(1e-9)  # of equal experts for all tokens, below which they are no router's


class Unreadable(ValueError):
    """An answer whose field has another type, range or length than it should."""


@dataclasses.dataclass(frozen=True)
class RouteFormat:
    """The record of routing that an answer must have."""

    layers: int  # with experts
    chosen: int  # experts of a token
    experts: int
    dtype: Any  # of the record
    record: Literal["required", "optional", "ignored"] = "required"
    # log of the chance that one token has the most frequent experts in every layer; 0: nothing is known of it.
    alike: float = 0.0


@dataclasses.dataclass(frozen=True)
class Question:
    """A question to a server, and what its answer is held against."""

    prompt: Sequence[int]  # p token ids
    sampling: Mapping[str, Any]  # of vLLM
    vocab_size: int
    labels: Mapping[str, int]  # {label: version} of all weights that were sent
    least: int  # the oldest version that may answer
    routes: RouteFormat | None  # None: a dense model

    @property
    def scores_prompt(self) -> bool:
        return "prompt_logprobs" in self.sampling

    @property
    def most_bytes(self) -> int:
        """Return the most bytes of an answer in JSON."""
        experts = self.routes.layers * self.routes.chosen if self.routes else 0
        return most_bytes(len(self.prompt) + self.sampling["max_tokens"], experts)


@dataclasses.dataclass(frozen=True)
class Answer:
    """n tokens of an answer to a prompt of p, every value of which is in its range."""

    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n], under the distribution that the tokens were drawn from
    versions: np.ndarray  # int32[n], of the weights that sampled each token
    experts: np.ndarray | None  # [p + n - 1, layers, k] of every token that was fed; None: not asked for, or not given
    prompt_logprobs: np.ndarray  # float32[p - 1] at temperature 1, or [0]: of the prompt's tokens but the first


class _Numbers(NamedTuple):
    """The type and range of a list of numbers."""

    dtype: Any  # of the array that comes out; a float's may hold integers, an integer's no floats
    least: float
    most: float
    length: range


def _fields(asked: Question, n: int) -> dict[str, _Numbers]:
    """The numbers of an answer of n tokens; weight_versions and routed_experts have a check of their own."""
    every, given = range(n, n + 1), range(len(asked.prompt) - 1, len(asked.prompt)) if asked.scores_prompt else range(1)
    return {
        "token_ids": _Numbers(np.int32, 0, asked.vocab_size - 1, every),
        "logprobs.token_id": _Numbers(np.int32, 0, asked.vocab_size - 1, every),
        "logprobs.logprob": _Numbers(np.float32, _DRAWN, _ROUNDING, every),
        "prompt_logprobs": _Numbers(np.float32, _GIVEN, _ROUNDING, given),
    }


def most_bytes(tokens: int, experts: int = 0) -> int:
    """The most bytes of an answer about so many tokens, each with so many experts, in JSON."""
    return _FIXED_BYTES + tokens * (_TOKEN_BYTES + _EXPERT_BYTES * experts)


def _loaded(data: bytes) -> Any:
    """The JSON value of these bytes, {} of none."""
    try:
        return json.loads(data.decode()) if data else {}
    except UnicodeDecodeError as error:
        raise Unreadable("bytes that are not UTF-8") from error
    except RecursionError as error:
        raise Unreadable("JSON that is nested too deeply") from error
    except ValueError as error:
        raise Unreadable(f"no JSON, or a part of it ({error})") from error


def read_answer(data: bytes, asked: Question) -> Answer:
    """The answer in the bytes of `/inference/v1/generate`. Raises `Unreadable`."""
    said = _loaded(data)
    (choice,) = _list(said, "choices", range(1, 2))
    most, ends = asked.sampling["max_tokens"], asked.sampling["stop_token_ids"]
    ids = _list(choice, "token_ids", range(1, most + 1))
    n = len(ids)
    scored = _list(_of(choice, "logprobs"), "content", range(n, n + 1))
    values = {
        "token_ids": ids,
        "logprobs.token_id": [_of(one, "token_id") for one in scored],
        "logprobs.logprob": [_of(one, "logprob") for one in scored],
        "prompt_logprobs": _forced(said, asked.prompt) if asked.scores_prompt else [],
    }
    read = {name: _numbers(name, values[name], field) for name, field in _fields(asked, n).items()}
    tokens = read["token_ids"]
    if not np.array_equal(read["logprobs.token_id"], tokens):
        raise Unreadable("logprobs.token_id holds other tokens than token_ids")
    if np.isin(tokens[:-1], ends).any() or (n < most and tokens[-1] not in ends):
        raise Unreadable(f"token_ids has {n} entries and neither ends at its first end nor has the {most} asked for")
    return Answer(
        tokens=tokens,
        logprobs=read["logprobs.logprob"],
        versions=_versions(_list(choice, "weight_versions", range(1, n + 1)), n, asked),
        experts=_experts(_of(choice, "routed_experts"), len(asked.prompt) + n - 1, asked.routes),
        prompt_logprobs=read["prompt_logprobs"],
    )


def read_model(data: bytes) -> dict[str, Any]:
    """The sizes and the dtype in the bytes of `describe_model`. Raises `Unreadable`."""
    first, *_ = _list(_loaded(data), "results", range(1, 2**10))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "max_model_len")
    return {name: _size(first, name) for name in sizes} | {"dtype": _text(first, "dtype")}


def read_served(data: bytes) -> tuple[str, int]:
    """The name of the model in the bytes of `/v1/models`, and the most tokens that it holds. Raises `Unreadable`."""
    first, *_ = _list(_loaded(data), "data", range(1, 2**10))
    return _text(first, "id"), _size(first, "max_model_len")


def read_ids(data: bytes) -> list[int]:
    """The token ids in the bytes of `/tokenize`. Raises `Unreadable`."""
    return _numbers("tokens", _of(_loaded(data), "tokens"), _Numbers(np.int32, 0, 2**31 - 1, range(2**16))).tolist()


def read_scores(data: bytes, tokens: Sequence[int]) -> np.ndarray:
    """log p of each given token, 0 of the first, float32[t], in the bytes of `/v1/completions`. Raises `Unreadable`."""
    (choice,) = _list(_loaded(data), "choices", range(1, 2))
    field = _Numbers(np.float32, _GIVEN, _ROUNDING, range(len(tokens) - 1, len(tokens)))
    return np.append(np.float32(0), _numbers("prompt_logprobs", _forced(choice, tokens), field))


def read_text(data: bytes, name: str) -> str:
    """The text that a JSON object in these bytes has under a name. Raises `Unreadable`."""
    return _text(_loaded(data), name)


def _forced(said: Any, tokens: Sequence[int]) -> list[Any]:
    """The log-prob that is said of each of these tokens but the first, which nothing precedes."""
    given = _list(said, "prompt_logprobs", range(len(tokens), len(tokens) + 1))
    for one, token in zip(given[1:], tokens[1:], strict=True):
        if not isinstance(one, dict) or str(token) not in one:
            raise Unreadable(f"prompt_logprobs holds {_shown(one)}, and not the log-prob of token {token}")
    return [_of(one[str(token)], "logprob") for one, token in zip(given[1:], tokens[1:], strict=True)]


def _size(said: Any, name: str) -> int:
    return int(_numbers(name, [_of(said, name)], _Numbers(np.int64, 1, 2**31 - 1, range(1, 2)))[0])


def _of(said: Any, name: str) -> Any:
    if not isinstance(said, dict) or name not in said:
        raise Unreadable(f"{name} is missing")
    return said[name]


def _text(said: Any, name: str) -> str:
    if not isinstance(value := _of(said, name), str):
        raise Unreadable(f"{name} holds {_shown(value)}, and not a text")
    return value


def _list(said: Any, name: str, lengths: range) -> list[Any]:
    value = _of(said, name)
    if not isinstance(value, list) or len(value) not in lengths:
        held = f"has {len(value)} entries" if isinstance(value, list) else f"holds {_shown(value)}"
        raise Unreadable(f"{name} {held}, and not a list of {_counted(lengths)}")
    return value


def _numbers(name: str, values: Any, field: _Numbers) -> np.ndarray:
    whole = np.issubdtype(field.dtype, np.integer)
    for value in _list({name: values}, name, field.length):
        # A NaN is in no range, and a bool is no number.
        if type(value) not in ((int,) if whole else (int, float)) or not field.least <= value <= field.most:
            kind = "integers" if whole else "numbers"
            raise Unreadable(f"{name} holds {_shown(value)}, and not {kind} from {field.least:g} to {field.most:g}")
    return np.array(values, field.dtype)


def _versions(spans: list[Any], n: int, asked: Question) -> np.ndarray:
    """Spans of tokens, one after the other, whose weights were sent by this run and never become older."""
    versions = np.zeros(n, np.int32)
    start, newest = 0, asked.least
    for span in spans:
        label = _text(span, "version")
        begins, ends = (_of(span, name) for name in ("start", "end"))
        if type(ends) is not int or begins != start or not start < ends <= n:
            raise Unreadable(
                f"weight_versions holds a span from {_shown(begins)} to {_shown(ends)}, and not spans of {n} tokens"
            )
        version = asked.labels.get(label, -1)
        if version < newest:
            raise Unreadable(
                f"weight_versions holds {_shown(label)}, and not weights that this run sent, from version {newest} on: "
                "the server was restarted, or another run replaced them"
            )
        versions[start:ends] = newest = version
        start = ends
    if start < n:
        raise Unreadable(f"weight_versions ends at token {start} of {n}")
    return versions


def _experts(said: Any, fed: int, routes: RouteFormat | None) -> np.ndarray | None:
    if routes is None or routes.record == "ignored" or (said is None and routes.record == "optional"):
        return None
    if not isinstance(said, str):
        raise Unreadable(f"routed_experts holds {_shown(said)}, and not the experts that the server gave before")
    shape = (fed, routes.layers, routes.chosen)
    try:
        data = io.BytesIO(base64.b64decode(said, validate=True))
        header = np.lib.format.read_array_header_1_0 if np.lib.format.read_magic(data) == (1, 0) else None
        found, fortran, dtype = header(data) if header else ((), False, np.dtype("V0"))
    except (ValueError, binascii.Error, SyntaxError, RecursionError) as error:
        raise Unreadable(f"routed_experts holds no array in base64 ({error!r})") from error
    rest = data.read()
    if found != shape or fortran or dtype.kind not in "iu" or len(rest) != math.prod(shape) * dtype.itemsize:
        raise Unreadable(f"routed_experts holds {dtype}{list(found)}, and not integers {list(shape)}")
    experts = np.frombuffer(rest, dtype).reshape(shape)
    if experts.min() < 0 or experts.max() >= routes.experts:
        wrong = experts.min() if experts.min() < 0 else experts.max()
        raise Unreadable(f"routed_experts holds {wrong}, and not experts from 0 to {routes.experts - 1}")
    ordered = np.sort(experts, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise Unreadable("routed_experts holds an expert twice for one token of a layer")
    if fed * routes.alike < _CHANCE and (ordered == ordered[0]).all():
        raise Unreadable(f"routed_experts holds the same experts for all {fed} tokens, and the router spreads them")
    return experts.astype(routes.dtype)


def _counted(lengths: range) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def _shown(value: Any) -> str:
    """A value in a message: short, and whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
