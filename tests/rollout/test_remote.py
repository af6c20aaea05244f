"""Rollouts on servers: a fake one replays what a real vLLM server said, and fails in every way that servers fail."""

import functools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import logging

from jaxrl_llm.models.scoring import score
from jaxrl_llm.rollout import remote, serving
from jaxrl_llm.rollout.answer_fields import Answer, Unreadable, read_answer
from jaxrl_llm.rollout.remote import Held
from jaxrl_llm.rollout.served import vllm_launch
from tests.reference.fake_vllm import fake_vllm
from tests.reference.slowly import first_quick
from tests.reference.vllm_answers import LENGTHS, MODEL, PROMPTS, UIDS, engine, generate, params

ANSWERS = 6


@pytest.fixture(scope="module")
def answered():
    """The trajectory of two servers that do what they should, as NumPy arrays, and the metrics of the transfer."""
    with fake_vllm() as one, fake_vllm() as two:
        t, moved = generate(engine(one.address, two.address))
        assert one.served + two.served == ANSWERS
    return t, moved


@pytest.fixture
def warned(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    return said


def same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_answers_are_rows_of_a_trajectory(answered):
    t, moved = vars(answered[0]), answered[1]
    t = SimpleNamespace(**{name: np.asarray(x) for name, x in t.items() if name not in ("routing", "rewards")})
    rows = np.repeat(np.arange(3), 2)
    own, starts = engine("http://none:1"), LENGTHS[rows]
    lengths = t.segment_ids.sum(1) - starts
    place = np.arange(11)[None]
    assert t.tokens.shape == (ANSWERS, 11)
    kinds = {"tokens": "int32", "segment_ids": "int32", "loss_mask": "bool", "sampler_logprobs": "float32"}
    assert {name: str(getattr(t, name).dtype) for name in kinds} == kinds
    assert lengths.min() >= 1
    assert lengths.max() <= own.max_new_tokens
    np.testing.assert_array_equal(t.segment_ids, place < (starts + lengths)[:, None])
    np.testing.assert_array_equal(t.loss_mask, (t.segment_ids > 0) & (place >= starts[:, None]))
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(t.tokens[row, :start], PROMPTS[rows[row], :start])
    last = np.take_along_axis(t.tokens, (starts + lengths - 1)[:, None], 1)[:, 0]
    np.testing.assert_array_equal(t.truncated, last != 1)
    assert t.versions is not None
    assert not t.versions.any()
    assert len({tuple(row) for row in t.tokens}) == ANSWERS  # seeds differ
    assert moved["rollout/parameters_moved_bytes"] > 4 * 13 * 32
    assert 0 < moved["rollout/handshake"] < 1e-5


def test_its_shapes_are_those_of_its_answers(answered):
    """In which the programs of a run are compiled before any server is asked."""
    shapes = engine("http://none:1", needs_routes=True).shapes(len(PROMPTS), PROMPTS.shape[1])
    found, expected = (
        {jax.tree_util.keystr(path): (x.shape, str(x.dtype)) for path, x in jax.tree_util.tree_leaves_with_path(one)}
        for one in (shapes, answered[0])
    )
    assert found == expected


def test_a_question_names_every_end_and_the_oldest_policy_that_may_answer():
    own, held = engine("http://none:1", end_ids=(1, 9, 4)), Held(5, Path("policy-5"), None)
    own._labels.update({"run-4": 4, "run-5": 5, "run-6": 6})
    asked = own.question(held, [3, 2], 11, 4, own.end_ids)
    assert asked.sampling == {"temperature": 0.7, "max_tokens": 4, "seed": 11, "stop_token_ids": [1, 9, 4]}
    assert (asked.prompt, asked.vocab_size, asked.least) == ([3, 2], 13, 5)

    def versions(*spans):
        choice = {
            "token_ids": [2, 5, 9],
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in (2, 5, 9)]},
            "weight_versions": [{"version": f"run-{v}", "start": start, "end": end} for v, start, end in spans],
            "routed_experts": None,
        }
        return read_answer(json.dumps({"choices": [choice]}).encode(), asked).versions.tolist()

    assert versions((5, 0, 1), (6, 1, 3)) == [5, 6, 6]
    for stale in ([(4, 0, 3)], [(4, 0, 1), (5, 1, 3)], [(6, 0, 1), (5, 1, 3)]):
        with pytest.raises(Unreadable, match="and not weights that this run sent, from version"):
            versions(*stale)


def test_a_row_has_the_version_of_each_of_its_tokens():
    """New weights came in the middle of the first answer."""
    own, held = engine("http://none:1"), Held(3, Path("policy-3"), None)
    answers = [
        Answer(*(np.array(x) for x in ([7, 8, 1], [-1.0, -2.0, -3.0], [3, 4, 4])), None, np.zeros(0)),
        Answer(*(np.array(x) for x in ([5, 1], [-4.0, -5.0], [4, 5])), None, np.zeros(0)),
    ]
    asked = [own.question(held, prompt, 0, 5) for prompt in ([2, 3], [6])]
    rows = own.rows(held, zip(range(2), asked, answers, strict=True), (2, 7))
    assert rows["versions"].tolist() == [[0, 0, 3, 4, 4, 0, 0], [0, 4, 5, 0, 0, 0, 0]]
    assert rows["sampler_logprobs"].tolist() == [[0, 0, -1, -2, -3, 0, 0], [0, -4, -5, 0, 0, 0, 0]]
    assert rows["tokens"].tolist() == [[2, 3, 7, 8, 1, 0, 0], [6, 5, 1, 0, 0, 0, 0]]


def test_log_probs_and_experts_are_those_of_the_trainer(answered):
    t, _ = answered
    of = jax.jit(functools.partial(score, MODEL, temperature=0.7, router_logits=True))
    own = of(params(), t.tokens, t.segment_ids)
    np.testing.assert_allclose(np.where(t.loss_mask, own.logprobs, 0), t.sampler_logprobs, atol=2e-5)
    assert t.routes.sampled.experts.dtype == np.uint8
    fed = np.arange(11)[None] < np.asarray(t.segment_ids).sum(1, keepdims=True) - 1
    theirs = np.asarray(t.routes.sampled.experts)
    recorded = theirs[..., 0] != 255
    np.testing.assert_array_equal(recorded, np.broadcast_to(fed, recorded.shape))
    ordered = np.sort(np.asarray(own.routing.logits), axis=-1)
    clear = (ordered[..., -2] - ordered[..., -3] > 1e-4) & fed[None]
    assert clear.sum() > 0.9 * fed.sum() * len(clear)
    theirs, ours = np.sort(theirs, -1), np.sort(np.asarray(own.routing.experts), -1)
    np.testing.assert_array_equal(theirs[clear], ours[clear])


@pytest.mark.parametrize("fault", first_quick(2, ["restart", "cut", "slow", 500]))
@pytest.mark.parametrize("servers", [1, 2])
def test_what_a_server_fails_is_asked_again(answered, warned, fault, servers):
    with ExitStack() as stack:
        bad, *others = [stack.enter_context(fake_vllm()) for _ in range(servers)]
        bad.faults = [None, fault]
        t, _ = generate(engine(bad.address, *[one.address for one in others], deadline_s=0.5, at_once=2 * servers))
        assert bad.served + sum(one.served for one in others) > ANSWERS or bad.faults
    same(t, answered[0])
    if not bad.faults:
        assert any(bad.address in text and "asked again" in text for text in warned)


def test_a_server_that_ends_leaves_its_answers_to_the_others(answered, warned, monkeypatch):
    monkeypatch.setattr(remote, "_BACK_S", 0.0)
    with fake_vllm() as one, fake_vllm() as two:
        own = engine(one.address, two.address)
        held, _ = own.take_weights(params(), 0)
        one.faults = ["cut"] * 99
        t = own.generate(held, PROMPTS, LENGTHS, UIDS, jax.random.key(0))
    same(t, answered[0])


@pytest.mark.parametrize(
    ("server", "changes", "said"),
    [
        ({"off": 9.0}, {}, r"does not serve these weights: median \|delta log p\| 9 .bound 1e-04."),
        ({"off": 3e-4}, {}, "its weights were not replaced, or wrongly, or its model is another"),
        ({"raw": True}, {}, "log-probs of temperature 1, not 0.7: start it with --logprobs-mode processed_logprobs"),
        ({"routes": False}, {"needs_routes": True}, "replay.mode=R3 needs the experts of the sampler"),
        ({"model": {"vocab_size": 14}}, {}, "serves a model of vocab_size=14, and the run's has 13"),
        ({"model": {"num_hidden_layers": 3}}, {}, "serves a model of num_hidden_layers=3, and the run's has 2"),
        ({"model": {"dtype": "bfloat16"}}, {}, "computes in bfloat16 and rollout.dtype is float32"),
        ({"model": {"max_model_len": 8}}, {}, "holds at most 8 tokens .* start it with --max-model-len 11"),
        ({"stuck": True}, {}, "holds 'default', and not weights that this run sent, .*: the server was restarted"),
    ],
    ids=["wrong", "stale", "temperature", "routes", "vocabulary", "layers", "dtype", "length", "version"],
)
def test_a_handshake_that_fails_stops_the_run(server, changes, said):
    with fake_vllm(**server) as fake:
        with pytest.raises(ValueError, match=said) as raised:
            engine(fake.address, **changes).take_weights(params(), 0)
        assert fake.address in str(raised.value)


def test_other_weights_than_the_server_has_are_seen():
    with fake_vllm() as fake, pytest.raises(ValueError, match="does not serve these weights"):
        engine(fake.address).take_weights(params(seed=1), 0)


def test_without_routes_a_run_without_replay_goes_on():
    with fake_vllm(routes=False) as fake:
        assert generate(engine(fake.address))[0].routes.sampled is None


def test_an_answer_that_always_fails_stops_the_run(warned):
    with (
        fake_vllm(faults=[500] * 99) as fake,
        pytest.raises(ValueError, match=r"answers are left and no server .* says 500"),
    ):
        generate(engine(fake.address))


def test_no_server_is_a_line(monkeypatch):
    with pytest.raises(ValueError, match=r"rollout.servers: http://127.0.0.1:9 does not answer .Connection refused."):
        engine("http://127.0.0.1:9").take_weights(params(), 0)
    with pytest.raises(ValueError, match=r"rollout.launch='nowhere' is no environment with vLLM"):
        engine(launch="nowhere").take_weights(params(), 0)


def test_a_server_that_cannot_start_says_why():
    own = engine(launch=sys.executable)  # which has no vLLM
    with pytest.raises(
        ValueError, match=r"ended .ModuleNotFoundError: No module named 'vllm'; see .* while it started"
    ):
        own.take_weights(params(), 0)
    own.close()


def test_what_a_warning_fears_is_no_cause(tmp_path):
    """As vLLM 0.32 warns at every start; a server that was killed says nothing more."""
    log = tmp_path / "8123-1.log"
    log.write_text("(APIServer pid=9) WARNING 11-23 failures like `OSError: [Errno 24] Too many open files`.\nup\n")
    assert serving._first_error(log) == "up"
    with log.open("a") as more:
        more.write("(EngineCore pid=9) ERROR 11-23 ValueError: no memory\n")
    assert serving._first_error(log) == "ValueError: no memory"


def test_a_server_ends_with_its_starter(tmp_path):
    for name, text in {
        "platforms.py": "class current_platform:\n    is_cpu = staticmethod(lambda: True)\n",
        "entrypoints/cli/main.py": "import os, sys, time\n"
        "print(sys.argv, os.environ['JAXRL_LLM_RECEIVED'], sep='\\n', flush=True)\ntime.sleep(60)\n",
    }.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    weights = tmp_path / "weights"
    weights.mkdir()
    with subprocess.Popen(
        [sys.executable, vllm_launch.__file__, "serve", "FOLDER", "--host=127.0.0.1"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JAXRL_LLM_WEIGHTS": str(weights)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        said = process.stdout.readline().decode()
        received = Path(process.stdout.readline().decode().strip())
        assert received.is_dir()
        assert said.startswith("['vllm', 'serve', 'FOLDER', ")
        assert "--logprobs-mode=processed_logprobs" in said
        process.stdin.close()  # as the system does when the starter is killed
        assert process.wait(10) != 0
        assert not weights.exists()
        assert not received.exists()


def test_weights_appear_whole_and_the_old_ones_go():
    with fake_vllm() as fake:
        own = engine(fake.address)
        own.take_weights(params(), 0)
        own.take_weights(params(), 1)
        assert [path.name for path in own.folder.iterdir()] == ["policy-1"]
        assert json.loads((own.folder / "policy-1" / "config.json").read_text())["vocab_size"] == 13
        assert fake.label.endswith("-1")


def test_a_free_port_is_found():
    assert serving.addresses(("http://h:1",)) == ["http://h:1"]
    assert serving.addresses(()) != ["http://127.0.0.1:0"]
