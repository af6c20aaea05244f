"""Settings of rollouts on servers: what is refused and with which words, and what is no part of a run."""

import pytest

from jaxrl_llm.run.settings import config_hash, validate
from tests.run.test_settings import changed

SERVED = {"rollout.engine": "vllm", "rollout.servers": ("http://host:1",)}
DISAGREE = {
    "servers of the jax engine": (
        {"rollout.launch": ".venv-vllm"},
        "rollout.launch='.venv-vllm': rollout.engine=jax asks no servers; set that to vllm",
    ),
    "vLLM and no server": (
        {"rollout.engine": "vllm"},
        r"rollout.engine=vllm needs rollout.servers=\(\"http://host:port\",\), or rollout.launch=FOLDER",
    ),
    "an address without a port": (
        {"rollout.engine": "vllm", "rollout.servers": ("http://host",)},
        "rollout.servers: 'http://host' is no address; give http://host:port",
    ),
    "a server started on another machine": (
        {"rollout.engine": "vllm", "rollout.launch": "V", "rollout.servers": ("http://host:1",)},
        "'http://host:1' is another machine, and rollout.launch starts servers on this one; give http://127.0.0.1:port",
    ),
    "a server twice": (
        {"rollout.engine": "vllm", "rollout.servers": ("http://host:1", "http://host:1")},
        "has an address twice; give each once",
    ),
    "weights that are sent and lie in a folder": (
        SERVED | {"rollout.weights_by": "http", "rollout.weights_dir": "W"},
        "rollout.weights_dir='W' is a folder that servers see, and rollout.weights_by=http sends the weights; leave",
    ),
    "weights that nobody is sent": (
        {"rollout.weights_by": "http"},
        "rollout.weights_by='http': rollout.engine=jax asks no servers",
    ),
    "float8 of a server": (
        SERVED | {"rollout.dtype": "float8_e4m3"},
        "'float8_e4m3': rollout.engine=vllm serves no",
    ),
    "a router of a server": (
        SERVED | {"rollout.router_noise": 0.1},
        "_noise, _bias and _gates are of an MoE model",
    ),
    "logits of a server": (
        SERVED | {"replay.mode": "R3", "replay.what": "logits"},
        "replay.what=logits: servers return experts and no logits; set replay.what=experts, or rollout.engine=jax",
    ),
    "a server for given answers": (
        SERVED | {"objective.name": "sft", "rollout.group_size": 1},
        "rollout.engine='vllm': sft reads answers and samples nothing; set it to 'jax'",
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_what_contradicts_servers_is_named(case):
    changes, message = DISAGREE[case]
    with pytest.raises(ValueError, match=message):
        validate(changed(changes))


def test_where_the_servers_are_is_no_part_of_a_run():
    there = changed(
        SERVED | {"rollout.servers": ("http://other:2",), "rollout.weights_by": "http", "rollout.deadline_s": 9.0}
    )
    assert config_hash(changed(SERVED)) == config_hash(there) != config_hash(changed({}))
