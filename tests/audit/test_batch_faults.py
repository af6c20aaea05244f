"""What a batch says of itself: planted faults that need no replay, and none in healthy batches."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.audit import advantage_conventions, batch_faults
from jaxrl_llm.audit.advantage_conventions import Generation
from jaxrl_llm.audit.capture import REQUIRED, SCHEMA, checked, read
from tests.reference.loaded import code_lines
from tests.reference.planted_faults import FAULTS, STORED

CAPTURES = Path(__file__).parents[1] / "golden" / "captures"
HEALTHY = sorted(path.stem for path in CAPTURES.glob("*.safetensors"))


def load(name):
    return load_file(CAPTURES / f"{name}.safetensors")


def stated(capture):
    return [*batch_faults.faults(capture), *advantage_conventions.faults(capture, Generation.of(capture))]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_batch_has_no_fault(name):
    assert stated(read(CAPTURES / f"{name}.safetensors")) == []


@pytest.mark.parametrize("planted", STORED)
def test_a_planted_fault_is_named(planted):
    named, base, plant = FAULTS[planted]
    found = dict(stated(checked(plant(load(base)))))
    assert found[named]
    follow = {"batch_tokens_wrong", "group_of_other_rows"}
    if planted == "reward_function_forgotten":  # the advantages of this capture are made of each function's rewards
        follow.add("advantages_not_of_these_rewards")
    assert set(found) <= {named, *follow}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo-1", {"std": "sample", "baseline": "mean", "std_eps": 1e-4}),
        ("batch_std-1", {"std": "batch", "baseline": "mean", "std_eps": 1e-4}),
        ("dr_kl-1", {"std": "none", "baseline": "mean"}),
        ("gdpo-1", {"advantage": "normalize_then_sum", "std": "sample", "std_eps": 1e-4}),
    ],
)
def test_the_convention_of_advantages(name, settings):
    generation = Generation.of(checked(load(name)))
    assert [one.settings for one in generation.reproducing()] == [settings]


def test_what_is_no_capture_is_refused():
    arrays = load("grpo-1")
    with pytest.raises(ValueError, match="the capture has no mask"):
        checked({name: x for name, x in arrays.items() if name != "mask"})
    with pytest.raises(ValueError, match=r"old_logprobs has shape \[8, 11\], and is to be \[b t\] with b = 8, t = 12"):
        checked(arrays | {"old_logprobs": arrays["old_logprobs"][:, 1:]})
    with pytest.raises(ValueError, match="group has dtype float64; give integers"):
        checked(arrays | {"group": arrays["group"].astype(float)})
    with pytest.raises(ValueError, match="mask has no token that counts"):
        checked(arrays | {"mask": np.zeros_like(arrays["mask"])})
    with pytest.raises(ValueError, match=r"temperature is 0\.0; capture answers that were drawn at one above 0"):
        checked(arrays | {"temperature": np.zeros(())})
    assert checked(arrays | {"reported_loss": np.ones(1)})["reported_loss"].shape == ()
    assert checked(arrays | {"logits": np.ones(3)}).unknown == ("logits",)


def test_the_page_has_the_schema():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    for name, (_, meaning) in SCHEMA.items():
        required = " (required)" if name in REQUIRED else ""
        assert f"| `{name}`{required} |" in page
        assert meaning in page


def test_hooks_are_short():
    for path in (Path(__file__).parents[2] / "docs" / "capture").glob("*.py"):
        assert code_lines(path.read_text()) <= 30, path


def test_what_the_generation_batch_has_of_an_answer_need_not_be_beside_it():
    arrays = load("ga2_dapo-3")
    left = {name: x for name, x in arrays.items() if name not in ("rewards", "rewards_by_function", "group")}
    for name in ("rewards", "rewards_by_function", "group"):
        np.testing.assert_array_equal(checked(left)[name], checked(arrays)[name])
    assert "rows_out_of_range" in dict(stated(checked(left | {"row": arrays["row"] + 99})))
