"""Episodes in the form of verifiers 0.4: an `Episode` with one trace, whose nodes are messages with their tokens.

Its JSON leaves out routes and kept sets and rounds log-probs to four decimals, as verifiers does; msgpack has them. The
tokens that a chat template writes before an answer belong to the message before it. The last token was never fed, so it
has a copy of the experts of the one before. Source: github.com/PrimeIntellect-ai/verifiers, v1/trace.py.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jaxrl_llm.ground import processes
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episodes import Episode, Played
from jaxrl_llm.tasks import Prompts, Task
from jaxrl_llm.tasks.messages import EARLIER, Message

FORM = "0.4.0"  # the version of verifiers whose form this is
_DECIMALS = 4


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records to a file: .msgpack one packed value behind the other, otherwise a line of JSON each."""
    with path.open("wb") as file:
        for record in records:
            packed: Any = msgpack.packb(record) if path.suffix == ".msgpack" else None
            file.write(packed or f"{json.dumps(_plain(record))}\n".encode())


def records(played: Played, task: Task, prompts: Prompts, engine: Engine) -> Iterator[dict[str, Any]]:
    """Yield the `Episode` of each episode, with bytes of arrays; those of one prompt are a group."""
    rollout = played.rollout
    routes = None if rollout.routes.sampled is None else rollout.routes.sampled.experts
    held = processes.fetch((rollout.tokens, rollout.loss_mask, rollout.sampler_logprobs, rollout.kept, routes))
    tokens, masks, logprobs, kept, routes = (None if x is None else np.asarray(x) for x in held)
    assert tokens is not None
    assert masks is not None
    assert logprobs is not None
    sampling = engine.sampling
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    for i, episode in enumerate(played.episodes):
        group, sample = divmod(i, len(played.episodes) // len(prompts["prompt"]))
        data = {name: prompts[name][group] for name in ("prompt", "answer", "row")}
        experts = None if routes is None else _without_blanks(routes[:, i, : len(episode.context)])
        nodes, calls = list[dict[str, Any]](), list[dict[str, Any]]()
        for messages, begin, stop, sampled in _pieces(task, data, episode, masks[i]):
            nodes += [{"message": one, "token_ids": [], "mask": []} for one in messages]
            last, place = nodes[-1], slice(begin, stop)
            last |= {"sampled": sampled, "token_ids": tokens[i, place].tolist(), "mask": [sampled] * (stop - begin)}
            if experts is not None:
                last["routed_experts"] = _packed(experts[place])
            if sampled:
                last["logprobs"] = logprobs[i, place].tolist()
                if kept is not None:
                    own = kept[i, place]
                    counts = (own >= 0).sum(1).astype(np.int32)
                    last["sampling_mask"] = {"ids": _packed(own[own >= 0]), "counts": _packed(counts)}
                reason = "stop" if tokens[i, stop - 1] in engine.end_ids else "length"
                usage = {"prompt_tokens": begin, "completion_tokens": stop - begin}
                call = {"node": len(nodes) - 1, "sampling": settings, "finish_reason": reason, "usage": usage}
                calls.append(call)
        for number, node in enumerate(nodes[1:]):
            node["parent"] = number
        of_task = {"type": task.name, "data": data}
        standing = {"ok": not episode.error, "errors": []}
        if episode.error:
            standing["errors"] = [{"type": "EnvironmentError", "message": episode.error}]
        trace = {
            "version": 1,
            "id": f"{prompts['uid'][group]}-{'greedy' if sampling.greedy else sample}",
            "verifiers": {"version": FORM},
            "task": of_task,
            "agent": {"config": {}},
            "nodes": nodes,
            "calls": calls,
            "rewards": {"environment": {"score": episode.reward, "weight": 1.0}},
            "info": {"turn_rewards": [turn.reward for turn in episode.turns]},
            "is_completed": True,
            "stop_condition": _ended_by(task, episode, calls[-1]["finish_reason"]),
            **standing,
        }
        of_group = {"id": str(prompts["uid"][group])}
        yield {"id": trace["id"], "env": {"id": task.name}, "task": of_task, "group": of_group, **standing} | {
            "traces": [trace]
        }


def _pieces(
    task: Task, data: Mapping[str, Any], episode: Episode, mask: np.ndarray
) -> Iterator[tuple[list[Message], int, int, bool]]:
    """Yield messages with the tokens that they add, from where to where, and whether these were sampled."""
    messages, begin = task.prompting.messages(data["prompt"], data["row"].get(EARLIER, ())), 0
    for turn, end in zip(episode.turns, episode.ends, strict=True):
        start = begin + int(np.argmax(mask[begin:]))
        yield messages, begin, start, False
        yield [{"role": "assistant", "content": turn.answer}], start, end + 1, True
        said = turn.observation
        given = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [{**one, "tool_call_id": ""} if one["role"] == "tool" else one for one in given]
        begin = end + 1


def _ended_by(task: Task, episode: Episode, reason: str) -> str:
    """Return verifiers' name of what has ended an episode."""
    if episode.error:
        return "error"
    if not episode.cut:
        return "agent_completed"
    if reason == "length" and not task.verify_truncated:
        return "max_output_tokens"
    return "max_turns" if len(episode.turns) == task.turns else "max_total_tokens"


def _without_blanks(experts: np.ndarray) -> np.ndarray:
    """Experts [t l k] of [l t k], where a token without a record has those of the one before."""
    out = np.moveaxis(experts, 1, 0).copy()
    for t in np.flatnonzero((out == np.iinfo(out.dtype).max).any(axis=(1, 2))):
        out[t] = out[t - 1]
    return out


def _packed(array: np.ndarray) -> dict[str, Any]:
    return {"__nd__": True, "dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record as verifiers writes it in JSON."""
    traces = [
        trace
        | {
            "nodes": [
                {
                    name: [round(x, _DECIMALS) for x in value] if name == "logprobs" else value
                    for name, value in node.items()
                    if name not in ("routed_experts", "sampling_mask")
                }
                for node in trace["nodes"]
            ]
        }
        for trace in record["traces"]
    ]
    return record | {"traces": traces}
