"""float32 products where a program computes in float32, on the platforms that would round them."""

import jax
import pytest

from jaxrl_llm.ground import precision
from jaxrl_llm.run import assembly, loaded
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION", raising=False)
    yield
    jax.config.update("jax_default_matmul_precision", None)


@pytest.mark.parametrize(
    ("dtypes", "platform", "expected"),
    [
        (("float32", "float32"), "cpu", None),
        (("float32", "float32"), "gpu", "highest"),
        (("float32", "bfloat16"), "gpu", "highest"),  # the scores and the updates are float32
        (("bfloat16", "bfloat16"), "gpu", None),
        (("float32", "float32"), "tpu", "highest"),
        (("float32", "bfloat16"), "tpu", None),  # the kernels of the rollout refuse the setting
        (("bfloat16",), "tpu", None),
    ],
)
def test_products_of_float32_are_float32(dtypes, platform, expected):
    precision.set_products(dtypes, platform)
    assert jax.config.jax_default_matmul_precision == expected


def test_a_run_in_bfloat16_after_one_in_float32_and_what_the_user_has_set(monkeypatch):
    precision.set_products(["float32"], "tpu")
    precision.set_products(["bfloat16"], "tpu")
    assert jax.config.jax_default_matmul_precision is None
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "tensorfloat32")
    precision.set_products(["float32"], "gpu")
    assert jax.config.jax_default_matmul_precision is None, "JAX has read it itself"


def test_runs_and_published_checkpoints_say_what_they_compute_in(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(precision, "set_products", lambda dtypes, platform: said.append((tuple(dtypes), platform)))
    settings = validate(tiny_run.make_config(tmp_path, **{"rollout.dtype": "bfloat16"}))
    run = assembly.build(settings)
    monkeypatch.setattr(loaded.tasks, "load_tokenizer", lambda path, day: settings.task.tokenizer)
    monkeypatch.setattr(loaded.models, "published_config", lambda path, dtype: None)
    monkeypatch.setattr(loaded.models, "load_pretrained", lambda path, **_: (run.model, None))
    loaded.from_checkpoint(tmp_path / "published")
    assert said == [(("float32", "bfloat16"), "cpu"), (("float32",), "cpu")]
