"""Text for a mixture that was upcycled: what the passages are, and that it learns from them into a checkpoint."""

import jax
import numpy as np
import pytest

from experiments.routing_replay import passages
from jaxrl_llm import tasks
from jaxrl_llm.models import Model, ModelConfig, load_pretrained, save_pretrained, upcycled


def test_passages_are_stretches_of_the_language_reference():
    rows = list(passages.passages())
    assert {(len(row["prompt"]), len(row["answer"])) for row in rows} == {(120, 360)}
    assert len(rows) > 500
    assert any("Assignment statements" in row["prompt"] for row in rows)


@pytest.mark.slow
def test_a_mixture_learns_them_into_a_checkpoint(tmp_path, monkeypatch):
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    dense = Model(ModelConfig(vocab_size=258, num_hidden_layers=1, head_dim=4, num_experts=0, **sizes))
    config, params = upcycled(dense.config, dense.init(jax.random.key(0)), experts=4, chosen=2, redraw=0.5)
    save_pretrained(params, config, tmp_path / "mixture")
    monkeypatch.setattr(tasks, "load_tokenizer", lambda path: tasks.ByteTokenizer())
    rows = [{"prompt": f"Passage {n} ", "answer": "of a language reference."} for n in range(16)]
    monkeypatch.setattr(passages, "passages", lambda: rows)
    passages.supervise(tmp_path / "mixture", tmp_path / "learnt", steps=1, rows=4)
    model, learnt = load_pretrained(tmp_path / "learnt")
    assert model.config.num_experts == 4
    moved = jax.tree.map(lambda new, old: float(np.abs(new - old).max()), learnt, params)
    assert 0 < max(jax.tree.leaves(moved)) <= 2e-4  # one step of Adam at 1e-4
