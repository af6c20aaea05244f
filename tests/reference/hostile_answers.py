"""Everything that can be wrong in one answer of a server: each field in turn, and the protocol below it."""

import gzip
import itertools
import math
import time

from tests.reference.fake_vllm import Spoken, Wrong, as_array, as_base64

EXPERTS, END, SECONDS = 4, 1, 0.5  # of the model of tests.reference.vllm_answers; the deadline of the test


def _choice(name, change):
    """One value of the first choice is replaced by what `change` makes of it."""

    def apply(said):
        choice = said["choices"][0]
        choice[name] = change(choice[name])

    return Wrong(apply)


def _token(value):
    """The last token is this one, in both places where it stands."""

    def apply(said):
        choice = said["choices"][0]
        choice["token_ids"][-1] = choice["logprobs"]["content"][-1]["token_id"] = value

    return Wrong(apply)


def _logprob(value):
    def apply(said):
        said["choices"][0]["logprobs"]["content"][0]["logprob"] = value

    return Wrong(apply)


def _routes(change):
    return _choice("routed_experts", lambda text: as_base64(change(as_array(text))))


def _longer(said):
    """Two more tokens than were asked for, with all that belongs to them."""
    choice = said["choices"][0]
    choice["token_ids"] = [2] * 7
    choice["logprobs"]["content"] = [{"token_id": 2, "logprob": -1.0}] * 7
    choice["weight_versions"][0]["end"] = 7


def _version(change):
    """The label's number becomes another."""

    def apply(spans):
        name, _, number = spans[0]["version"].rpartition("-")
        return change(spans, name, int(number), spans[0]["end"])

    return _choice("weight_versions", apply)


def _span(version, start, end):
    return {"version": version, "start": start, "end": end}


def _cut(said):
    """An answer that stops early and has no end: log-probs and versions go along."""
    choice = said["choices"][0]
    del choice["token_ids"][2:], choice["logprobs"]["content"][2:]
    choice["weight_versions"][0]["end"] = 2
    choice["routed_experts"] = as_base64(as_array(choice["routed_experts"])[:-3])


def _goes_on(said):
    """The first token is an end, in both places where it stands, and others follow."""
    choice = said["choices"][0]
    assert len(choice["token_ids"]) > 1
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = END


# {name: (fault, what the warning says)}
FIELDS = {
    "log-prob NaN": (_logprob(math.nan), "logprobs.logprob holds nan, and not numbers from -104 to 0.0001"),
    "log-prob inf": (_logprob(math.inf), "logprobs.logprob holds inf"),
    "log-prob -inf": (_logprob(-math.inf), "logprobs.logprob holds -inf"),
    "log-prob above 0": (_logprob(5.0), "logprobs.logprob holds 5.0"),
    "log-prob of no token that is drawn": (_logprob(-9999.0), "logprobs.logprob holds -9999.0"),
    "log-prob a text": (_logprob("-1.0"), "logprobs.logprob holds '-1.0'"),
    "log-prob true": (_logprob(False), "logprobs.logprob holds False"),
    "a log-prob too few": (_choice("logprobs", lambda x: {"content": x["content"][1:]}), "content has .* entries"),
    "token beyond the vocabulary": (_token(13), "token_ids holds 13"),
    "tokens not those of the log-probs": (_choice("token_ids", lambda x: [*x[1:], 0]), "holds other tokens than"),
    "no tokens": (_choice("token_ids", lambda x: []), "token_ids has 0 entries, and not a list of 1 to 5"),
    "too many tokens": (Wrong(_longer), "token_ids has 7 entries, and not a list of 1 to 5"),
    "an answer that stops without its end": (Wrong(_cut), "neither ends at its first end nor has the 5 asked for"),
    "an answer that goes on behind its end": (Wrong(_goes_on), "neither ends at its first end nor has the 5 asked for"),
    "a version never sent": (
        _version(lambda spans, name, number, n: [_span(f"{name}-{number + 999}", 0, n)]),
        "weight_versions holds '.*-1004', and not weights that this run sent, from version 4 on",
    ),
    "a version that goes back": (
        _version(lambda spans, name, number, n: [_span(f"{name}-5", 0, 1), _span(f"{name}-4", 1, n)]),
        "weight_versions holds '.*-4', and not weights that this run sent, from version 5 on",
    ),
    "versions of too few tokens": (
        _version(lambda spans, name, number, n: [_span(f"{name}-5", 0, n - 1)]),
        "weight_versions ends at token .* of",
    ),
    "experts missing": (_choice("routed_experts", lambda x: None), "routed_experts holds None, and not the experts"),
    "an expert twice": (_routes(lambda x: x[..., :1].repeat(2, -1)), "routed_experts holds an expert twice for one"),
    "the experts of one token for all": (_routes(lambda x: x[:1].repeat(len(x), 0)), "the same experts for all"),
    "an expert beyond the last": (_routes(lambda x: x + EXPERTS), "and not experts from 0 to 3"),
    "experts of a layer too few": (_routes(lambda x: x[:, :1]), r"routed_experts holds int32\[\d+, 1, 2\], and not"),
    "experts of a token too few": (_routes(lambda x: x[1:]), r"routed_experts holds int32\["),
    "experts in no base64": (_choice("routed_experts", lambda x: "?" + x[1:]), "holds no array in base64"),
    "no choice": (Wrong(lambda said: said["choices"].clear()), "choices has 0 entries"),
    "a field too few": (Wrong(lambda said: said["choices"][0].pop("weight_versions")), "weight_versions is missing"),
}


def _answer(body, *headers, status="200 OK"):
    return [f"HTTP/1.1 {status}\r\n".encode(), *(one.encode() + b"\r\n" for one in headers), b"\r\n", body]


def _whole(change):
    return Spoken(lambda body: _answer(made := change(body), f"Content-Length: {len(made)}"))


def _drip(pieces):
    """Byte by byte, each well within the deadline, all together far beyond."""
    for one in itertools.chain.from_iterable(pieces):
        yield bytes([one])
        time.sleep(SECONDS / 10)


def _without_end(*headers, piece):
    yield from _answer(b"", *headers)
    end = time.monotonic() + 10 * SECONDS
    while time.monotonic() < end:
        yield piece


def _bomb(body):
    """A right answer, and 16 MiB of blanks behind it."""
    return gzip.compress(body + b" " * 2**24, 1)


_SLOW = "gave no answer within 0.5 s"
_LONG = "gave an answer of more than .* bytes"
PROTOCOL = {
    "a body that drips": (Spoken(lambda body: _drip(_answer(body, f"Content-Length: {len(body)}"))), _SLOW),
    "a body without an end": (Spoken(lambda body: _without_end(piece=b" " * 2**16)), _LONG),
    "a gzip bomb": (
        Spoken(lambda body: _answer(made := _bomb(body), "Content-Encoding: gzip", f"Content-Length: {len(made)}")),
        "an answer that is compressed",
    ),
    "a refusal": (
        Spoken(lambda body: _answer(b"\x1b[2Jgone", "Content-Length: 8", status="404 Not Found")),
        r"/inference/v1/generate says 404: \\x1b\[2Jgone",
    ),
    "no JSON": (_whole(lambda body: b"<html>"), "no JSON"),
    "a connection that closes": (Spoken(lambda body: []), "does not answer"),
    "a body that is too short": (Spoken(lambda body: _answer(body[:9], f"Content-Length: {len(body)}")), "is cut off"),
}
