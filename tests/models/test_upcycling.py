"""A mixture made of a dense model: before training it is that model, and its copies part where they are drawn anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import tasks, upcycle
from jaxrl_llm.config import start_up
from jaxrl_llm.models import Model, Published, load_pretrained, save_pretrained, upcycled
from jaxrl_llm.run import exported

TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 24, (2, 6)))


def computed(model, params):
    """Logits, and the routing of a mixture."""

    def forward(params):
        out = model.apply(params, TOKENS)
        return model.logits(params, out.hidden), out.routing

    return jax.jit(forward)(params)


@pytest.fixture
def command(tiny, params_of, tmp_path, monkeypatch):
    """command(*arguments) -> (exit code, dense model with its parameters, the folder written)."""
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    dense = tiny()
    beside = Published({"eos_token_id": 7}, {"tokenizer.json": b"{}"})
    save_pretrained(params_of(dense), dense.config, tmp_path / "dense", published=beside)

    def run(*arguments):
        places = ["--from", str(tmp_path / "dense"), "--to", str(tmp_path / "mixture")]
        return upcycle.main([*places, *arguments]), dense, params_of(dense), tmp_path / "mixture"

    return run


def test_a_mixture_of_copies_is_the_dense_model(command):
    """From the command line, through both checkpoints; the tokenizer comes along."""
    code, dense, params, folder = command("--experts", "4", "--chosen", "2")
    assert code == 0
    model, made = load_pretrained(folder)
    assert (model.config.num_experts, model.config.num_experts_per_tok, model.config.num_moe_layers) == (4, 2, 2)
    logits, routing = computed(model, made)
    np.testing.assert_allclose(logits, computed(dense, params)[0], atol=1e-5)
    assert len(np.unique(routing.experts)) == 4  # the router tells tokens apart
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert '"eos_token_id": 7' in (folder / "config.json").read_text()


def test_a_checkpoint_without_tokenizer_files_gets_them(tiny, params_of, tmp_path, monkeypatch):
    """As a GGUF file has none; what is written are those of its tokenizer."""
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setattr(tasks, "load_tokenizer", lambda path: f"of {path}")
    monkeypatch.setattr(
        exported, "with_tokenizer", lambda published, own: Published(published.config, {"tokenizer.json": own.encode()})
    )
    source, made = tmp_path / "dense", tmp_path / "mixture"
    save_pretrained(params_of(tiny()), tiny().config, source)
    assert upcycle.main(["--from", str(source), "--to", str(made)]) == 0
    assert (made / "tokenizer.json").read_text() == f"of {source}"


def test_a_share_of_every_copy_is_drawn_anew(tiny, params_of):
    """Whole hidden units: a quarter of 20, others in each expert, the same by the same seed; all else stays."""
    dense = tiny()
    config, made = upcycled(dense.config, params_of(dense), experts=3, chosen=1, redraw=0.25, seed=5)
    again = upcycled(dense.config, params_of(dense), experts=3, chosen=1, redraw=0.25, seed=5)[1]
    other = upcycled(dense.config, params_of(dense), experts=3, chosen=1, redraw=0.25, seed=6)[1]
    assert Model(config).shapes().keys() == made.keys()
    whole = params_of(dense)["dense"]["mlp"]
    moved = {
        "gate": np.any(made["moe"]["mlp"]["gate"] != np.asarray(whole["gate"])[:, None], axis=2),
        "up": np.any(made["moe"]["mlp"]["up"] != np.asarray(whole["up"])[:, None], axis=2),
        "down": np.any(made["moe"]["mlp"]["down"] != np.asarray(whole["down"])[:, None], axis=3),
    }
    assert np.all(moved["gate"].sum(-1) == 5)
    np.testing.assert_array_equal(moved["gate"], moved["up"])
    np.testing.assert_array_equal(moved["gate"], moved["down"])
    assert len({units.tobytes() for units in moved["gate"].reshape(6, -1)}) == 6
    drawn = np.swapaxes(made["moe"]["mlp"]["gate"][0], 1, 2)[moved["gate"][0]]
    assert 0.8 < np.std(drawn) / np.std(whole["gate"][0]) < 1.25  # 15 columns of 16 numbers
    for name in ("router", "gate", "up", "down"):
        np.testing.assert_array_equal(made["moe"]["mlp"][name], again["moe"]["mlp"][name])
        assert np.any(made["moe"]["mlp"][name] != other["moe"]["mlp"][name])
    np.testing.assert_array_equal(made["ends"]["embedding"], params_of(dense)["ends"]["embedding"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "0"], "experts=0 makes no mixture; give at least 1"),
        (["--experts", "2", "--chosen", "3"], "model.num_experts_per_tok=3 must lie in 1..num_experts=2"),
        (["--redraw", "1.5"], "redraw=1.5"),
    ],
)
def test_what_makes_no_mixture_is_refused(command, capsys, arguments, message):
    assert command(*arguments)[0] == 2
    assert message in capsys.readouterr().err


def test_a_mixture_is_refused(tiny, params_of):
    with pytest.raises(ValueError, match="num_experts=4: the checkpoint is a mixture already; give a dense one"):
        upcycled(tiny(num_experts=4).config, params_of(tiny(num_experts=4)), experts=8, chosen=2)
