"""The page on the mismatch of a real engine: its tables out of the committed data, and the measure itself by hand."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.mismatch import measure, tables
from jaxrl_llm.rollout.rollout import Routes
from tests.reference.fake_vllm import fake_vllm
from tests.reference.vllm_answers import MODEL, engine, generate, params

PAGE = Path(measure.__file__).with_name("README.md").read_text().splitlines()
ROWS = measure.read(measure.RESULTS)


@pytest.mark.parametrize("name", tables.HEADERS)
def test_the_tables_come_out_of_the_data(name):
    assert f"| {tables.HEADERS[name]} |" in PAGE
    for row in tables.table(ROWS, name):
        assert row in PAGE


def test_what_the_hypotheses_are_about_comes_out_of_the_data():
    for name, found in tables.hypotheses(ROWS).items():
        (line,) = [line for line in PAGE if line.startswith(f"| {name} |")]
        for one in found:
            assert one in line


def test_an_interval_by_hand():
    """Mean 2, sd 1 of three seeds: 4.303 / sqrt(3) = 2.48."""
    assert tables.told([1.0, 2.0, 3.0]) == "2 [-0.48, 4.5]"
    assert tables.told([0.5]) == "0.5"


@pytest.mark.slow
def test_log_probs_that_are_off_by_a_doubled_ratio_and_experts_that_differ():
    """Recorded answers at equal weights; then by hand: d = 0.5 for all but one token, 1 for that one."""
    with fake_vllm() as server:
        t, _ = generate(engine(server.address))
    assert t.routes.sampled is not None
    mask, n = np.asarray(t.loss_mask), int(np.asarray(t.loss_mask).sum())
    own = np.asarray(measure._scored(MODEL, params(), t, None)[0])  # at temperature 1, as the study samples
    off = np.where(mask, 0.5, 0)
    off[tuple(np.argwhere(mask)[0])] = 1
    moved = (np.asarray(t.routes.sampled.experts) + 1) % MODEL.config.num_experts  # of chosen {a, b}: {a + 1, b + 1}
    experts = np.where(np.asarray(t.routes.sampled.experts) == 255, 255, moved).astype(np.uint8)
    changed = t.replace(
        sampler_logprobs=jax.numpy.asarray(own - off),
        routes=Routes(dataclasses.replace(t.routes.sampled, experts=jax.numpy.asarray(experts))),
    )
    found = measure.compared(MODEL, params(), changed)
    assert found["tokens"] == n
    assert found["above_ln2"] == 1
    assert found["k3"] == pytest.approx(((n - 1) * (np.exp(0.5) - 1.5) + np.e - 2) / n, rel=1e-5)
    assert found["mean"] == pytest.approx((0.5 * (n - 1) + 1) / n, rel=1e-5)
    assert found["quantiles"][0] == pytest.approx(0.5, rel=1e-5)
    assert found["k3_replayed"] != found["k3"]
    assert min(found["flips_by_layer"]) > 0.3
    same = measure.compared(MODEL, params(), changed.replace(routes=t.routes))
    assert max(same["flips_by_layer"]) == 0
    assert same["k3_replayed"] == pytest.approx(same["k3"], rel=1e-4)
