"""The record of an episode in verifiers' form: what stands where, and what verifiers 0.4 reads of it.

tests/golden/verifiers_record.json holds the JSON record of `PLAYED`, and what verifiers 0.4.0 read of it and of its
packed form; the slow test reads both again where verifiers is installed.
"""

import dataclasses
import json

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from jaxrl_llm.models import Model, Routing
from jaxrl_llm.rollout.episode_record import records, write
from jaxrl_llm.rollout.episodes import Episode
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.base import Prompting
from jaxrl_llm.tasks.environments.environment import Step
from tests.reference.page_commands import ROOT
from tests.reference.tiny_rollout import tiny
from tests.rollout.test_episodes import engine, prompts, task

GOLDEN = ROOT / "tests" / "golden" / "verifiers_record.json"
OWN = task()
ENGINE = engine(Model(tiny()), sampling=Sampling(temperature=0.5, top_k=2))
# "abc", then: "de" and its end, "b" observed, "f" and its end; and four letters without an end.
TOKENS = np.array([[2, 3, 4, 5, 6, 1, 3, 7, 1, 0], [2, 3, 4, 8, 9, 10, 11, 0, 0, 0]], np.int32)
MASK = np.array([[0, 0, 0, 1, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]], bool)
LOGPROBS = np.where(MASK, -np.arange(1, 21, dtype=np.float32).reshape(2, 10) / 7, 0)
EXPERTS = np.arange(2 * 2 * 10 * 2, dtype=np.uint8).reshape(2, 2, 10, 2)  # [l b t k]
EXPERTS[:, 0, 8:] = EXPERTS[:, 1, 6:] = 255  # the last token was not fed
KEPT = np.where(MASK[..., None], np.stack([TOKENS, np.where(TOKENS % 2, TOKENS + 1, -1)], -1), -1).astype(np.int32)
EPISODES = [
    Episode(TOKENS[0, :9].tolist(), [("de", Step("b", 0.25)), ("f", Step("c", 1.0))], [range(3, 6), range(7, 9)]),
    Episode(TOKENS[1, :7].tolist(), [("ghij", Step("", 0.0))], [range(3, 7)], error="it raised KeyError"),
]
PLAYED = Rollout(
    tokens=jnp.asarray(TOKENS),
    segment_ids=jnp.asarray((TOKENS > 0).astype(np.int32)),
    loss_mask=jnp.asarray(MASK),
    sampler_logprobs=jnp.asarray(LOGPROBS),
    truncated=jnp.zeros(2, bool),
    kept=jnp.asarray(KEPT),
    routes=Routes(sampled=Routing(jnp.asarray(EXPERTS))),
)
PROMPTS = prompts(OWN, ("abc",), rows=[{"hidden": 7}])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    for name in ("traces.jsonl", "traces.msgpack"):
        write(folder / name, PLAYED, EPISODES, OWN, PROMPTS, ENGINE)
    return folder


def packed(folder):
    with (folder / "traces.msgpack").open("rb") as file:
        return list(msgpack.Unpacker(file))


def test_the_json_is_the_one_that_verifiers_has_read(files):
    lines = [json.loads(line) for line in (files / "traces.jsonl").read_text().splitlines()]
    assert lines == json.loads(GOLDEN.read_text())["records"]


def test_a_node_has_the_tokens_that_it_adds_and_what_was_recorded_of_them(files):
    whole, failed = (one["traces"][0] for one in packed(files))
    roles = [(node["message"]["role"], node["message"]["content"], node["token_ids"]) for node in whole["nodes"]]
    assert roles == [
        ("user", "abc", [2, 3, 4]),
        ("assistant", "de", [5, 6, 1]),
        ("user", "b", [3]),
        ("assistant", "f", [7, 1]),
    ]
    assert [node.get("parent") for node in whole["nodes"]] == [None, 0, 1, 2]
    assert whole["nodes"][3]["logprobs"] == LOGPROBS[0, 7:9].tolist()
    assert whole["nodes"][3]["routed_experts"]["shape"] == [2, 2, 2]
    experts = np.frombuffer(whole["nodes"][3]["routed_experts"]["data"], np.uint8).reshape(2, 2, 2)
    np.testing.assert_array_equal(experts[0], EXPERTS[:, 0, 7])
    np.testing.assert_array_equal(experts[1], experts[0])  # it was not fed
    kept = whole["nodes"][1]["sampling_mask"]
    assert np.frombuffer(kept["counts"]["data"], np.int32).tolist() == [2, 1, 2]
    assert np.frombuffer(kept["ids"]["data"], np.int32).tolist() == [5, 6, 6, 1, 2]
    assert [call["usage"] for call in whole["calls"]] == [
        {"prompt_tokens": 3, "completion_tokens": 3},
        {"prompt_tokens": 7, "completion_tokens": 2},
    ]
    assert (whole["ok"], whole["stop_condition"], whole["rewards"]["environment"]["score"]) == (
        True,
        "agent_completed",
        1.25,
    )
    assert (failed["ok"], failed["stop_condition"], failed["rewards"]["environment"]["score"]) == (False, "error", 0.0)
    assert failed["calls"][0]["finish_reason"] == "length"


def test_messages_of_a_chat_and_of_tools_keep_their_roles():
    own = dataclasses.replace(OWN, prompting=Prompting(chat=True, system="Be brief."))
    said = [{"role": "tool", "content": "b"}]
    episodes = [dataclasses.replace(EPISODES[0], turns=[("de", Step(said, 0.25)), ("f", Step("", 1.0))]), EPISODES[1]]
    (trace,) = next(records(PLAYED, episodes, own, PROMPTS, ENGINE, whole=True))["traces"]
    assert [node["message"]["role"] for node in trace["nodes"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [node["token_ids"] for node in trace["nodes"]] == [[], [2, 3, 4], [5, 6, 1], [3], [7, 1]]
    assert trace["nodes"][3]["message"]["tool_call_id"] == ""


def read_by_verifiers(folder):
    """What verifiers reads of both files."""
    from verifiers.v1.episode import WireEpisode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import WireTrace  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.trace_store import read_episodes  # pyright: ignore[reportMissingImports]

    plain, whole = read_episodes(folder, WireTrace), [WireEpisode.model_validate(one) for one in packed(folder)]
    found = []
    for episode in (*plain, *whole):
        (trace,) = episode.traces
        (branch,) = trace.branches
        kept, routes = branch.sampling_mask, branch.routed_experts
        found.append(
            {
                "group": episode.group.id,
                "ok": episode.ok,
                "reward": trace.reward,
                "transcript": trace.transcript,
                "token_ids": branch.token_ids,
                "sampled_mask": branch.sampled_mask,
                "logprobs": branch.logprobs,
                "turns": trace.num_turns,
                "truncated": trace.is_truncated,
                "tokens": [trace.num_input_tokens, trace.num_output_tokens, trace.num_total_tokens],
                "routed_experts": None if routes is None else routes.tolist(),
                "kept": None if kept is None else [kept.ids.tolist(), kept.counts.tolist()],
            }
        )
    return found


def test_verifiers_read_every_token_and_all_that_was_recorded():
    """The golden reading against the arrays: JSON rounds log-probs and drops routes and kept sets."""
    *plain, whole, failed = json.loads(GOLDEN.read_text())["read"]
    for i, (one, length) in enumerate(((whole, 9), (failed, 7))):
        assert one["token_ids"] == plain[i]["token_ids"] == TOKENS[i, :length].tolist()
        assert one["sampled_mask"] == MASK[i, :length].tolist()
        assert one["logprobs"] == LOGPROBS[i, :length].tolist()
        np.testing.assert_allclose(plain[i]["logprobs"], LOGPROBS[i, :length], atol=5.1e-5, rtol=0)
        assert plain[i]["routed_experts"] is plain[i]["kept"] is None
        fed = np.moveaxis(EXPERTS[:, i, : length - 1], 1, 0)
        np.testing.assert_array_equal(one["routed_experts"], [*fed, fed[-1]])
        counts = (KEPT[i, :length] >= 0).sum(1).tolist()
        assert one["kept"] == [KEPT[i, :length][KEPT[i, :length] >= 0].tolist(), counts]
    assert (whole["reward"], whole["turns"], whole["tokens"]) == (1.25, 2, [4, 5, 9])
    assert (failed["ok"], failed["reward"], failed["group"], whole["group"]) == (False, 0.0, "0", "0")
    assert failed["truncated"]


@pytest.mark.slow
def test_verifiers_read_it_as_they_did(files):
    pytest.importorskip("verifiers.v1")
    assert read_by_verifiers(files) == json.loads(GOLDEN.read_text())["read"]
