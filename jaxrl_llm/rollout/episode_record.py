"""Episodes in the form of verifiers 0.4: an `Episode` with one trace, whose nodes are messages with their tokens.

Its JSON leaves out routes and kept sets and rounds log-probs to four decimals, as verifiers does; msgpack has them. The
tokens that a chat template writes before an answer belong to the message before it. The last token was never fed, so it
has a copy of the experts of the one before. Source: github.com/PrimeIntellect-ai/verifiers, v1/trace.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jaxrl_llm.ground import processes
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episodes import Episode
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks import Prompts, Task
from jaxrl_llm.tasks.messages import EARLIER, Message

FORM = "0.4.0"  # the version of verifiers whose form this is
_DECIMALS = 4


def write(
    path: Path, rollout: Rollout, episodes: Sequence[Episode], task: Task, prompts: Prompts, engine: Engine
) -> None:
    """Write a record of each episode: to a .msgpack packed values one behind the other, otherwise lines of JSON."""
    whole = path.suffix == ".msgpack"
    with path.open("wb") as file:
        for record in records(rollout, episodes, task, prompts, engine, whole=whole):
            packed: Any = msgpack.packb(record) if whole else f"{json.dumps(record)}\n".encode()
            file.write(packed)


def records(
    rollout: Rollout, episodes: Sequence[Episode], task: Task, prompts: Prompts, engine: Engine, *, whole: bool
) -> Iterator[dict[str, Any]]:
    """Yield the `Episode` of each episode, drawn ones first; those of one prompt are a group.

    Args:
      prompts: of the first episodes; the others are left out.
      whole: with routes and kept sets, as bytes of arrays, and all decimals of log-probs.
    """
    group, last = engine.group_size, engine.sampling
    samplings = [engine.sampling] * (group - 1) + [Sampling(temperature=0.0) if last.greedy_last else last]
    experts: Any = rollout.routes.sampled and rollout.routes.sampled.experts
    more = (rollout.kept, experts) if whole else (None, None)
    tokens, logprobs, kept, experts = processes.fetch((rollout.tokens, rollout.sampler_logprobs, *more))
    for i in sorted(range(len(prompts["prompt"]) * group), key=lambda i: samplings[i % group].greedy):
        episode, number, sampling = episodes[i], i // group, samplings[i % group]
        data = {name: prompts[name][number] for name in ("prompt", "answer", "row")}
        nodes, calls = list[dict[str, Any]](), list[dict[str, Any]]()
        for messages, begin, stop, sampled in _pieces(task, data, episode):
            nodes += [{"message": one, "token_ids": [], "mask": []} for one in messages]
            node, place = nodes[-1], slice(begin, stop)
            node |= {"sampled": sampled, "token_ids": tokens[i, place].tolist(), "mask": [sampled] * (stop - begin)}
            if experts is not None:
                fed = np.minimum(np.arange(begin, stop), len(episode.context) - 2)
                node["routed_experts"] = _packed(experts[:, i, fed].swapaxes(0, 1))
            if sampled:
                own = logprobs[i, place].tolist()
                node["logprobs"] = own if whole else [round(x, _DECIMALS) for x in own]
                if kept is not None and not sampling.greedy:
                    there = kept[i, place] >= 0
                    counts = there.sum(1).astype(np.int32)
                    node["sampling_mask"] = {"ids": _packed(kept[i, place][there]), "counts": _packed(counts)}
                settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
                reason = "stop" if tokens[i, stop - 1] in engine.end_ids else "length"
                usage = {"prompt_tokens": begin, "completion_tokens": stop - begin}
                call = {"node": len(nodes) - 1, "sampling": settings, "finish_reason": reason, "usage": usage}
                calls.append(call)
        for parent, node in enumerate(nodes[1:]):
            node["parent"] = parent
        uid, of_task = prompts["uid"][number], {"type": task.name, "data": data}
        errors = [{"type": "EnvironmentError", "message": episode.error}] if episode.error else []
        standing = {"ok": not errors, "errors": errors}
        trace = {
            "version": 1,
            "id": f"{uid}-{'greedy' if sampling.greedy else i % group}",
            "verifiers": {"version": FORM},
            "task": of_task,
            "agent": {"config": {}},
            "nodes": nodes,
            "calls": calls,
            "rewards": {"environment": {"score": episode.reward, "weight": 1.0}},
            "info": {"turn_rewards": [step.reward for _, step in episode.turns]},
            "is_completed": True,
            "stop_condition": _ended_by(task, episode, calls[-1]["finish_reason"]),
            **standing,
        }
        whose = {"id": trace["id"], "env": {"id": task.name}, "task": of_task, "group": {"id": str(uid)}}
        yield {**whose, **standing, "traces": [trace]}


def _pieces(task: Task, data: Mapping[str, Any], episode: Episode) -> Iterator[tuple[list[Message], int, int, bool]]:
    """Yield messages with the tokens that they add, from where to where, and whether these were sampled."""
    messages, begin = task.prompting.messages(data["prompt"], data["row"].get(EARLIER, ())), 0
    for (answer, step), place in zip(episode.turns, episode.places, strict=True):
        yield messages, begin, place.start, False
        yield [{"role": "assistant", "content": answer}], place.start, place.stop, True
        said = step.observation
        given = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [{**one, "tool_call_id": ""} if one["role"] == "tool" else one for one in given]
        begin = place.stop


def _ended_by(task: Task, episode: Episode, reason: str) -> str:
    """Return verifiers' name of what has ended an episode."""
    if episode.error:
        return "error"
    if not episode.cut:
        return "agent_completed"
    if reason == "length" and not task.verify_truncated:
        return "max_output_tokens"
    return "max_turns" if len(episode.turns) == task.turns else "max_total_tokens"


def _packed(array: np.ndarray) -> dict[str, Any]:
    return {"__nd__": True, "dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}
