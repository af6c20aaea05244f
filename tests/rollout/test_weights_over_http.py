"""Weights that are sent to a server: they arrive whole, in the hands of who knows the token, and nowhere else."""

import base64
import hashlib

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.served import vllm_guard, vllm_launch
from jaxrl_llm.rollout.served.vllm_guard import Guard
from tests.reference.fake_vllm import fake_vllm, through
from tests.reference.vllm_answers import engine, generate, params

BODY, LABEL = bytes(range(256)) * 10, "0123abcd-7"


@pytest.fixture
def received(tmp_path, monkeypatch):
    monkeypatch.setenv(vllm_guard.TOKEN, "secret")
    monkeypatch.setenv(vllm_guard.RECEIVED, str(tmp_path / "received"))
    (tmp_path / "received").mkdir()
    return tmp_path / "received"


async def vllm(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"vLLM"})


def put(path=f"/weights/{LABEL}/model.safetensors", method="PUT", body=BODY, **changes):
    """Status and body of what the door says, and vLLM behind it."""
    digest = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    headers = {"Authorization": "Bearer secret", "Content-Length": str(len(BODY)), "Repr-Digest": f"sha-256=:{digest}:"}
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    told = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return through(Guard(vllm), {"type": "http", "method": method, "path": path, "headers": told}, body)


def test_a_file_arrives_whole_and_the_earlier_policy_goes(received):
    (received / "0123abcd-6").mkdir()
    status, said = put()
    assert (status, said) == (200, f'{{"folder": "{received / LABEL}"}}'.encode())
    assert (received / LABEL / "model.safetensors").read_bytes() == BODY
    assert put(f"/weights/{LABEL}/config.json")[0] == 200
    assert sorted(str(path.relative_to(received)) for path in received.rglob("*")) == [
        LABEL, f"{LABEL}/config.json", f"{LABEL}/model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Authorization": "Bearer secre"}, 401),
        ({"Authorization": ""}, 401),
        ({"method": "POST", "path": "/collective_rpc", "Authorization": "Bearer other"}, 401),
        ({"method": "GET", "path": "/health", "Authorization": ""}, 401),
        ({"path": f"/weights/{LABEL}/../../model.safetensors"}, 400),
        ({"path": "/weights/../model.safetensors"}, 400),
        ({"path": f"/weights/{LABEL}/model.bin"}, 400),
        ({"path": f"/weights/{LABEL}/vllm_worker.py"}, 400),
        ({"Repr_Digest": ""}, 400),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": str(10**18)}, 507),
        ({"body": BODY[:-1]}, 400),
        ({"body": BODY + b"0"}, 400),
        ({"body": BODY[:-1] + b"0"}, 400),
    ],
    ids=str,
)
def test_what_is_refused_leaves_no_file(received, change, status):
    assert put(**change)[0] == status
    assert not [path for path in received.rglob("*") if path.is_file()]


def test_vllm_hears_who_knows_the_token_alone(received, monkeypatch):
    assert put(method="POST", path="/collective_rpc")[1] == b"vLLM"
    monkeypatch.delenv(vllm_guard.TOKEN)
    assert put(method="POST", path="/collective_rpc", Authorization="")[1] == b"vLLM"  # as the server was started
    assert put()[0] == 403  # but nobody's weights


def test_an_engine_sends_the_weights_that_it_would_have_written(received):
    """The server has the files of the folder, in the same bytes, and answers as one that reads the folder."""
    with fake_vllm() as server:
        own = engine(server.address, weights_by="http")
        sent, _ = generate(own, version=3)
        there = received / server.label
        for path in own._latest.folder.iterdir():
            assert (there / path.name).read_bytes() == path.read_bytes()
        assert sorted(server.sent) == [
            f"/weights/{server.label}/{name}" for name in ("config.json", "model.safetensors")
        ]
        assert server.folders == [str(there)]
    with fake_vllm() as server:
        read, _ = generate(engine(server.address), version=3)
        assert server.sent == []
    for one, other in zip(jax.tree.leaves(sent), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_server_of_another_token_is_named(received, monkeypatch):
    with fake_vllm() as server:
        own = engine(server.address, weights_by="http")
        _ = own._servers  # with the token of now
        monkeypatch.setenv(vllm_guard.TOKEN, "another")
        with pytest.raises(ValueError, match=f"{server.address}/weights/.*/config.json says 401: .*is not that of the"):
            own.take_weights(params(), 0)


@pytest.mark.parametrize("host", [[], ["--host", "0.0.0.0"], ["--host=10.0.0.5"]])
def test_a_server_that_others_reach_has_a_token(received, monkeypatch, host):
    vllm_launch._check_host(["serve", "FOLDER", *host])
    monkeypatch.delenv(vllm_guard.TOKEN)
    with pytest.raises(SystemExit, match="lets other machines replace the weights; set JAXRL_LLM_TOKEN to a secret"):
        vllm_launch._check_host(["serve", "FOLDER", *host])
    vllm_launch._check_host(["serve", "FOLDER", *host, "--host", "127.0.0.1"])
