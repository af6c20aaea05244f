"""An answer token by token is the engine's answer, and its text never shows half a character."""

import jax
import numpy as np
import pytest

from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.streaming import Streamer, as_text
from jaxrl_llm.tasks import UNKNOWN, ByteTokenizer

SIZES = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=20, num_attention_heads=2, num_key_value_heads=1)
MODEL = Model(ModelConfig(24, head_dim=8, num_experts=4, decoder_sparse_step=2, moe_intermediate_size=12, **SIZES))
BYTES = ByteTokenizer()


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.0), marks=pytest.mark.slow),
        pytest.param(Sampling(), marks=pytest.mark.slow),
        Sampling(temperature=0.7, top_k=6, top_p=0.9),
    ],
    ids=str,
)
def test_the_tokens_are_those_of_the_engine(sampling):
    """Dense and MoE layer; a prompt that fills its width and one that does not; answers that end and that are cut."""
    params, key, ends, most = MODEL.init_sharded(jax.random.key(0)), jax.random.key(1), (3, 5), 6
    prompts = np.random.default_rng(0).integers(0, 24, (4, 32)).astype(np.int32)
    lengths = np.array([32, 7, 1, 20], np.int32)
    engine = Engine(MODEL, sampling, 1, most, ends)
    uids = np.arange(4, dtype=np.uint32)
    out = engine.generate(params, prompts, lengths, uids, key)
    tokens, mask, truncated = jax.device_get((out.tokens, out.loss_mask, out.truncated))
    streamer = Streamer(MODEL, sampling, most, ends)
    prepared = streamer.prepare(params)
    for i, length in enumerate(lengths):
        streamed = list(streamer.tokens(prepared, prompts[i, :length].tolist(), key, uid=i))
        assert streamed == tokens[i][mask[i]].tolist()
        assert (streamed[-1] in ends) == (not truncated[i])


def test_mistakes():
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        Streamer(MODEL, Sampling(), 0, (1,))
    with pytest.raises(ValueError, match="the prompt has no token"):
        next(Streamer(MODEL, Sampling(), 1, (1,)).tokens({}, [], jax.random.key(0)))


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        (BYTES.encode("aé😀b"), ["a", "é", "😀", "b"]),  # 1, 2, 4 and 1 bytes
        ([*BYTES.encode("ab"), 1, *BYTES.encode("c")], ["a", "b"]),  # 1 ends the answer
        (BYTES.encode("a😀")[:-1], ["a", UNKNOWN]),  # cut inside a character
        ([*BYTES.encode("😀")[:2], *BYTES.encode("x")], [f"{UNKNOWN}x"]),  # never completed
        ([300, *BYTES.encode("x")], [f"{UNKNOWN}x"]),  # no token of this tokenizer
        ([], []),
    ],
)
def test_text_comes_in_whole_characters(ids, pieces):
    assert list(as_text(iter(ids), BYTES)) == pieces
    assert "".join(pieces) == BYTES.decode(ids)
