"""A capture against the checkpoint that sampled it: log-probs by the slow transformer, then three planted faults."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_llm.audit.__main__ import main
from jaxrl_llm.audit.capture import checked
from jaxrl_llm.audit.scored_tokens import scored
from jaxrl_llm.models import save_pretrained
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.transformer import Model
from tests.reference import tiny_training, transformer_numpy

MODEL = Model(
    ModelConfig(
        vocab_size=16,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
)
PROMPT, PLACES, TEMPERATURE = 3, 6, 0.7
ATTENDED = np.zeros((4, PROMPT + PLACES), np.uint8)
for row, (prompt, answer) in enumerate([(3, 6), (1, 2), (2, 4), (3, 1)]):
    ATTENDED[row, PROMPT - prompt : PROMPT + answer] = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_pretrained(tiny_training.draw_params(MODEL), MODEL.config, path)
    return path


@pytest.fixture(scope="module")
def arrays():
    """A healthy capture of the second update: old and sampler are the model at 0.7, now is another policy."""
    rng = np.random.default_rng(0)
    tokens = np.where(ATTENDED, rng.integers(2, 16, ATTENDED.shape), 0).astype(np.int32)
    params = tiny_training.draw_params(MODEL)
    logits = transformer_numpy.transformer(params, MODEL.config, tokens, ATTENDED)[0]
    mask = ATTENDED[:, PROMPT:]

    def of(temperature):
        x = logits[:, PROMPT - 1 : -1] / temperature
        x = x - np.log(np.exp(x).sum(-1, keepdims=True))
        picked = np.take_along_axis(x, tokens[:, PROMPT:, None], -1)[..., 0]
        return np.where(mask, picked, 0).astype(np.float32)

    old = of(TEMPERATURE)
    now = np.where(mask, np.minimum(old + 0.2 * rng.normal(size=old.shape), -0.01), 0).astype(np.float32)
    advantages = np.asarray([1.5, -0.5, -0.5, -0.5], np.float32)
    n, ratio, each = mask.sum(1, keepdims=True), np.exp(now - old), advantages[:, None]
    kept = ratio * each <= np.clip(ratio, 0.8, 1.2) * each
    value = np.where(mask, np.minimum(ratio * each, np.clip(ratio, 0.8, 1.2) * each), 0)
    told = {"reported_loss": np.float32(-(value / n).sum() / 4)}
    told["reported_dlogprobs"] = np.where(mask & kept, -ratio * each / n / 4, 0).astype(np.float32)
    given = {"tokens": tokens, "attention_mask": ATTENDED, "mask": mask, "logprobs": now, "advantages": advantages}
    return given | told | {"old_logprobs": old, "sampler_logprobs": old, "hot": of(1.0), "temperature": np.float32(0.7)}


def named(arrays, folder):
    return dict(scored(checked({name: x for name, x in arrays.items() if name != "hot"}), folder)[0])


def test_the_policy_that_sampled_is_recognised(arrays, folder):
    found, told = scored(checked({name: x for name, x in arrays.items() if name != "hot"}), folder)
    assert found == []
    assert told[0].startswith("logprobs: not the model's")
    assert told[1].startswith("old_logprobs: the model's at temperature 0.7 (")
    assert float(told[1].split("(")[1].split(" ")[0]) < 1e-5


@pytest.mark.slow
def test_faults_that_only_the_model_shows(arrays, folder):
    """None of them is seen without it: without the sampler's log-probs, loss and gradient say nothing."""
    alone = {name: x for name, x in arrays.items() if name != "sampler_logprobs"}
    assert set(named(alone | {"old_logprobs": arrays["hot"]}, folder)) == {"temperature_missing"}
    late = np.roll(arrays["old_logprobs"], 1, 1)
    assert set(named(alone | {"old_logprobs": late}, folder)) == {"old_logprobs_shifted"}
    assert "old_equals_now" in named(alone | {"old_logprobs": arrays["logprobs"]}, folder)
    del alone["temperature"]
    assert named(alone | {"old_logprobs": arrays["hot"]}, folder) == {}  # 1 may be what was asked for


def test_what_cannot_be_scored_is_refused(arrays, folder):
    with pytest.raises(ValueError, match="the capture has none; save tokens and attention_mask"):
        named({name: x for name, x in arrays.items() if name != "tokens"}, folder)
    with pytest.raises(ValueError, match="token 40 of the capture is not among the 16"):
        named(arrays | {"tokens": arrays["tokens"] + 24 + (arrays["tokens"] == 15)}, folder)


@pytest.mark.slow
def test_the_command_with_a_model(arrays, folder, tmp_path, capsys):
    path, out = tmp_path / "hot.safetensors", tmp_path / "out.json"
    alone = {name: x for name, x in arrays.items() if name not in ("sampler_logprobs", "hot")}
    save_file({name: np.asarray(x) for name, x in (alone | {"old_logprobs": arrays["hot"]}).items()}, path)
    page = tmp_path / "page.md"
    assert main([str(path), "--model", str(folder), "--json", str(out), "--page", str(page)]) == 0
    assert "old_logprobs: the model's at temperature 1 (" in capsys.readouterr().out
    assert "## Log-probs against the model" in page.read_text()
    assert "temperature_missing" in {fault["name"] for fault in json.loads(out.read_text())["faults"]}
    assert main([str(path), "--model", str(tmp_path / "none")]) == 2
