"""Settings that make no sense for pairs or given answers are refused by name, with the remedy."""

import importlib

import pytest

from jaxrl_llm.run.settings import config_hash, validate

ROLLOUTS_ONLY = {
    "rollout.temperature": (0.5, 1.0),
    "rollout.dtype": ("bfloat16", "float32"),
    "rollout.lag": (1, 0),
    "dynamic_sampling.max_draws": (2, 1),
    "rewards.overlong_cache": (2, 0),
    "rewards.overlong_filter": (True, False),
    "rewards.missing_eos_penalty": (1.0, 0.0),
    "replay.mode": ("R2", "off"),
    "rollout.group_size": (8, None),
}


def config(name, **changes):
    made = importlib.import_module(f"configs.{name}").get_config("smoke")
    made.update_from_flattened_dict(changes)
    return made


@pytest.mark.parametrize("field", ROLLOUTS_ONLY)
@pytest.mark.parametrize("name", ["dpo", "reward_model", "sft"])
def test_what_samples_is_refused(name, field):
    value, only = ROLLOUTS_ONLY[field]
    only = {"sft": 1}.get(name, 2) if only is None else only
    reads = "answers" if name == "sft" else "pairs"
    message = rf"{field}={value!r}: {name} reads {reads} and samples nothing; set it to {only!r}"
    with pytest.raises(ValueError, match=message):
        validate(config(name, **{field: value}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dpo", {"updates.shuffle": "answers"}, "updates.shuffle='answers': dpo reads pairs .*; set it to 'groups'"),
        ("dpo", {"updates.micro_batch_rows": 1}, "updates.micro_batch_rows=1 would part the answers of a pair"),
        ("dpo", {"critic.kind": "head"}, "critic.kind='head' serves no dpo; set it to none"),
        ("dpo", {"objective.correction": "tis"}, "dpo has no hyper-parameter 'correction'; it belongs to "),
        ("dpo", {"objective.clip_low": 0.1}, "dpo has no hyper-parameter 'clip_low'; it belongs to "),
        (
            "sft",
            {"objective.correction": "tis"},
            "correction weighs sampled answers by their sampler",
        ),
        ("sft", {"objective.beta": 0.1}, "sft has no hyper-parameter 'beta'; it belongs to reward_model, dpo"),
        ("grpo", {"preference.label_noise": 1.5}, "preference.label_noise=1.5 is out of range"),
        ("dpo", {"preference.file": "x", "preference.label_noise": 0.2}, "preference.file='x' brings its own; clear"),
        ("dpo", {"preference.bad_lines": "drop"}, "preference.bad_lines='drop' is unknown; use one of raise, skip"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config(name, **changes))


def test_other_pairs_are_another_run_and_another_place_is_not(tmp_path):
    hashes = []
    for name, text in (("a", "{}"), ("b", "{}"), ("a", "{} ")):
        (tmp_path / name).write_text(text)
        hashes.append(config_hash(config("dpo", **{"preference.file": str(tmp_path / name)})))
    assert hashes[0] == hashes[1] != hashes[2]
