"""Captures of TRL's GRPOTrainer and, on random batches, of losses of verl 0.9.1 (by docs/capture) and SkyRL 0.3.0,
identified without being told; planted faults of the loss, named."""

import json
from pathlib import Path

import jax
import pytest

from jaxrl_llm.audit.__main__ import main
from jaxrl_llm.audit.capture import checked, read
from jaxrl_llm.audit.opinion import as_json, opinion
from jaxrl_llm.audit.opinion_page import page, table
from tests.audit.test_batch_faults import CAPTURES, HEALTHY, load
from tests.reference.planted_faults import FAULTS, STORED

# TRL's configuration of each capture, in the words of the recipes; the whole class where a batch cannot tell.
KNOWN = {
    "grpo-0": ({"grpo", "gspo", "gspo_token", "gmpo", "sapo"}, {"aggregation": "sequence_mean_token_mean"}),
    "grpo-1": ({"grpo"}, {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence_mean_token_mean"}),
    "dapo-1": ({"dapo"}, {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}),
    "ga2_dapo-3": ({"dapo"}, {"clip_low": 0.2, "clip_high": 0.2, "accumulation": 2}),
    "gspo_kl-1": (
        {"gspo"},
        {"clip_low": 0.02, "clip_high": 0.04, "kl_coef": 0.05, "kl_estimator": "k3_times_sequence_ratio"},
    ),
    "grpo_kl_plain-1": ({"grpo"}, {"kl_coef": 0.04, "kl_estimator": "k3"}),
    "dr_kl-1": ({"dr_grpo"}, {"max_length": 40, "std": "none", "kl_coef": 0.04, "kl_estimator": "k3_unbiased"}),
    "cispo5-1": ({"cispo"}, {"cap": 5.0, "aggregation": "token_mean"}),
    "vespo-1": ({"vespo"}, {"aggregation": "token_mean"}),
    "luspo-1": ({"luspo", "gspo_token"}, {"clip_low": 0.02, "clip_high": 0.04}),
    "ent_bonus-1": ({"grpo"}, {"entropy_coef": 0.01}),
    "sapo_seq-1": ({"sapo"}, {"ratio": "sequence"}),
    "batch_std-1": ({"grpo"}, {"std": "batch", "std_eps": 1e-4}),
    "gdpo-1": ({"grpo"}, {"advantage": "normalize_then_sum"}),
    "entropy-1": ({"grpo"}, {"correction": "high_entropy", "correction_cap": 0.4}),
    "opsm-1": ({"grpo"}, {"off_policy_mask": "old_logprobs", "delta": 0.1}),
    "trunc-0": ({"grpo", "gspo", "gspo_token", "gmpo", "sapo"}, {"empty_answers": "counted"}),
}
RANGE = {"clip_low": 0.2, "clip_high": 0.28}
KNOWN |= {
    "skyrl_cispo-1": ({"cispo"}, {"cap": 5.0, "floor": 1.0, "aggregation": "token_mean"}),
    "skyrl_dual_clip-1": ({"grpo"}, RANGE | {"dual_clip": 1.5, "aggregation": "sequence_mean_token_mean"}),
    "skyrl_gspo-1": ({"gspo", "gspo_token"}, {"clip_low": 0.02, "clip_high": 0.04}),
    "skyrl_regular-1": ({"dapo"}, RANGE | {"aggregation": "token_mean"}),
    "skyrl_sapo-1": ({"sapo"}, {"aggregation": "sequence_mean_token_mean"}),
    "verl_cispo-1": ({"cispo"}, {"cap": 1.28, "floor": 0.8, "aggregation": "token_mean"}),
    "verl_dppo_tv-1": ({"cispo"}, {"aggregation": "token_mean"}),  # no token was masked: what is left is r, cut at 3
    "verl_geo_mean-1": ({"gmpo"}, {"log_clip": 0.4}),
    "verl_gpg-1": ({"reinforce"}, {"aggregation": "token_mean"}),
    "verl_gspo-1": ({"gspo", "gspo_token", "gmpo"}, {"aggregation": "sequence_mean_token_mean"}),
    "verl_sapo-1": ({"sapo"}, {"aggregation": "sequence_mean_token_mean"}),
    "verl_vanilla_seq-1": ({"grpo"}, RANGE | {"aggregation": "sequence_mean_token_mean"}),
    "verl_vanilla_norm-1": ({"dr_grpo"}, RANGE | {"max_length": 12}),
    "verl_vanilla-1": ({"dapo"}, RANGE | {"aggregation": "token_mean"}),
    "verl_vanilla_c-1": ({"dapo"}, RANGE | {"dual_clip": 1.5, "aggregation": "token_mean"}),
}
QUICK = {"ga2_dapo-3"}  # and grpo-1, by the command


def told(capture):
    with jax.enable_x64(True):
        return opinion(capture)


def marked(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_every_capture_has_its_answer():
    assert KNOWN.keys() == set(HEALTHY)


@pytest.mark.parametrize("name", marked(KNOWN, QUICK))
def test_a_capture_is_identified(name):
    objectives, settings = KNOWN[name]
    made = told(read(CAPTURES / f"{name}.safetensors"))
    best = made.fits[0]
    assert made.reproduced
    assert best.objective in objectives
    assert settings.items() <= best.settings.items()
    assert objectives >= {fit.objective for fit in made.fits} or name in ("opsm-1",)
    assert abs(best.loss_difference) < 5e-7
    assert best.gradient_difference < 1e-6
    assert made.faults == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dapo-1", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}),
        ("gspo_kl-1", {"kl_coef": 0.05, "kl_estimator": "k3_times_sequence_ratio"}),
        ("cispo5-1", {"cap": 5.0}),
    ],
)
@pytest.mark.slow
def test_a_loss_alone_is_a_class_with_the_truth_in_it(name, settings):
    objectives, _ = KNOWN[name]
    made = told(checked({key: x for key, x in load(name).items() if key != "reported_dlogprobs"}))
    assert any(fit.objective in objectives and settings.items() <= fit.settings.items() for fit in made.fits)
    assert all(fit.gradient_difference is None for fit in made.fits)
    assert made.faults == []
    assert table(made).startswith("the loss alone, in ")
    other = told(
        checked({key: x for key, x in load(name).items() if key != "reported_dlogprobs"} | {"reported_loss": 7.7})
    )
    assert not other.reproduced
    assert table(other).startswith("no objective gives this loss; save reported_dlogprobs")


@pytest.mark.parametrize("planted", marked([name for name in FAULTS if name not in STORED], {"clip_forgotten"}))
def test_a_fault_of_the_loss_is_named(planted):
    named, base, plant = FAULTS[planted]
    assert named in dict(told(checked(plant(load(base)))).faults)


def test_thirty_faults_are_planted():
    assert len(FAULTS) >= 30
    assert len({named for named, *_ in FAULTS.values()}) >= 30


def test_the_command(capsys, tmp_path):
    page, out = tmp_path / "audit.md", tmp_path / "audit.json"
    assert main([str(CAPTURES / "grpo-1.safetensors"), "--page", str(page), "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss and gradient are those of grpo"
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "no fault found"
    assert "| grpo |" in page.read_text()
    made = json.loads(out.read_text())
    assert set(made) == {"fits", "faults"}
    best = made["fits"][0]
    assert set(best) == {"objective", "settings", "loss_difference", "gradient_difference"}
    objectives, settings = KNOWN["grpo-1"]
    assert {fit["objective"] for fit in made["fits"]} <= objectives
    assert settings.items() <= best["settings"].items()
    assert abs(best["loss_difference"]) < 5e-7
    assert best["gradient_difference"] < 1e-6
    assert made["faults"] == []


@pytest.mark.parametrize("option", ["--json", "--page"])
def test_a_file_without_a_folder_is_refused_before_the_work(capsys, tmp_path, option):
    folder = tmp_path / "missing"
    assert main([str(CAPTURES / "grpo-1.safetensors"), option, str(folder / "x")]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err == f"error: {option}={folder / 'x'}: there is no folder {folder}; make it\n"


@pytest.mark.parametrize(
    "factor",
    [pytest.param(float("nan"), id="not finite"), pytest.param(1e6, id="far below any", marks=pytest.mark.slow)],
)
def test_log_probs_that_none_can_have(factor):
    """No fit and no number of the table is NaN, no warning is printed, and the JSON is one that any reader takes."""
    arrays = load("grpo-1")
    made = told(checked(arrays | {"logprobs": arrays["logprobs"] * arrays["logprobs"].dtype.type(factor)}))
    assert not made.reproduced
    assert "nan" not in table(made).replace("not finite", "")
    json.loads(as_json(made), parse_constant=pytest.fail)
    assert list(dict(made.faults)) == (["logprobs_not_finite"] if factor != factor else ["not_reproduced"])


def test_a_class_and_an_array_that_is_not_read():
    arrays = load("grpo-0")
    made = told(checked(arrays | {"MyLogits": arrays["logprobs"]}))
    assert max(map(len, table(made).splitlines())) <= 80
    assert "Not read, as the schema does not have them: MyLogits." in page(made, "x")


def test_a_file_that_is_no_capture(capsys, tmp_path):
    path = Path(tmp_path / "x.safetensors")
    path.write_bytes(b"no")
    assert main([str(path)]) == 2
    assert "is no whole safetensors file" in capsys.readouterr().err
