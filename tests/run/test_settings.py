"""Configs: what is refused and with which words, what identifies a run, and every config on record."""

import dataclasses
import importlib
import json
from pathlib import Path

import ml_collections
import pytest

from configs import base
from jaxrl_llm.config.loading import flat
from jaxrl_llm.ground.machine import cache_folder
from jaxrl_llm.records.run_log import plain
from jaxrl_llm.run.fields import declared_fields
from jaxrl_llm.run.settings import config_hash, validate
from tests.reference import field_texts

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "configs.json"
BASE, FIELDS = ROOT / "configs" / "base.py", ROOT / "docs" / "configuration.md"
HELP = ROOT / "configs" / "fields.txt"
HINT = "run `python -m tests.run.test_settings` in the commit that means this change, and read what it changes"
NAMES = sorted({path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__"})
# `pretrained` itself takes its sizes from a checkpoint: tests/models/test_model_fields.py; `smollm2_sums_grpo` names a
# file of a package: tests/experiments/test_real_model.py.
VARIANTS = {
    "dense": ["smoke", "gemma_3_1b", "smollm3_3b", "olmo_3_7b", "glm_4_9b"],
    "demo": ["gspo", "grpo", "gspo_smoke", "grpo_smoke"],
    "mixtures": [
        *("smoke", "granite_1b_a400m", "qwen1_5_moe_a2_7b", "gpt_oss_20b", "deepseek_v2_lite", "moonlight"),
        *("glm_4_7_flash", "ernie_4_5_21b_a3b", "glm_4_5_air", "minimax_m2", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b"),
    ],
    "pretrained": ["smoke"],
    "smollm2_sums_grpo": ["smoke"],
}
RUNS = [(name, variant) for name in NAMES for variant in VARIANTS.get(name, ["", "smoke"])]
LABELS = [f"{name}:{variant}".removesuffix(":") for name, variant in RUNS]


def get(name, variant):
    return importlib.import_module(f"configs.{name}").get_config(variant)


def changed(changes, variant="smoke"):
    """The base config with fields set through the raw dict, as a file on disk or a sweep might have them."""
    raw = base.get_config(variant).to_dict()
    for path, value in changes.items():
        *blocks, field = path.split(".")
        at = raw
        for block in blocks:
            at = at[block]
        at[field] = value
    return ml_collections.ConfigDict(raw)


@pytest.mark.parametrize(("name", "variant"), RUNS, ids=LABELS)
def test_every_config_is_valid_and_on_record(name, variant):
    """A change of a default reaches every config that does not set it: the records make that visible in review."""
    config = get(name, variant)
    assert validate(config).objective_name == config.objective.name
    assert json.loads(GOLDEN.read_text()).get(f"{name}:{variant}".removesuffix(":"), {}) == record(name, variant), HINT


def test_no_record_is_left_over_or_empty():
    recorded = json.loads(GOLDEN.read_text())
    assert recorded.keys() <= set(LABELS), HINT
    assert all(recorded.values())


def record(name, variant):
    """What differs from base, or from base's smoke variant; of that what differs from base.

    Fields of the objective that are left to the recipe stay out: docs/objectives.md has the table of them.
    """
    like = flat(get("base", "smoke" if variant.endswith("smoke") and name != "base" else ""))
    cache = str(cache_folder())  # where the stand-ins of this machine lie
    return {
        key: value.replace(cache, "CACHE") if isinstance(value, str) else plain(value)
        for key, value in flat(get(name, variant)).items()
        if like.get(key, key) != value
    }


def base_py():
    head, start, rest = BASE.read_text().partition("    config = ConfigDict()\n")
    return head + start + field_texts.base_lines() + rest[rest.index("\n    if variant == ") :]


def configuration_md():
    return FIELDS.read_text().partition("\n## ")[0] + field_texts.doc_tables()


def test_base_and_the_documentation_are_the_declarations():
    assert BASE.read_text() == base_py(), HINT
    assert FIELDS.read_text() == configuration_md(), HINT
    assert HELP.read_text() == field_texts.field_help(), HINT


def test_every_declaration_is_of_a_field_of_base():
    config = base.get_config()
    for path, own in declared_fields().items():
        *blocks, field = path.split(".")
        block = config[blocks[0]] if blocks else config
        value = block[field].to_dict() if isinstance(block[field], ml_collections.ConfigDict) else block[field]
        assert value == own.default, path
        assert own.kind in (dict, block.get_type(field)), path
    assert declared_fields().keys() == {
        f.partition(".options.")[0] + ".options" * (".options." in f) for f in flat(config)
    } | {"task.chat_options"}


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_variant_is_named(name):
    with pytest.raises(ValueError, match="'nonsense'"):
        get(name, "nonsense")


BAD = {
    # unknown and missing keys
    "optimizer.learning_rat": (
        1e-3,
        "config has no field 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'",
    ),
    "objectiv": ({}, "config has no field 'objectiv'; did you mean 'objective'?"),
    "task.options.digit": (3, "task 'sort' has no option 'digit' .did you mean 'digits'?"),
    "objective.tau": (1.0, "config.objective: .*'tau'"),
    "objective.tau_pos": (1.0, "config.objective: grpo has no hyper-parameter 'tau_pos'; it belongs to sapo"),
    # types
    "rollout.group_size": (True, "rollout.group_size=True must be a whole number, for example 4"),
    "updates.minibatches": (1e3, "updates.minibatches=1000.0 must be a whole number, for example 4"),
    "steps": (1e3, r"steps=1000.0 must be a whole number"),
    "seed": (-1, "seed=-1 is out of range; give seed between 0 and 4294967295"),
    "optimizer.learning_rate": ("fast", "optimizer.learning_rate='fast' must be a number, for example 1e-3"),
    "optimizer.weight_decay": (
        float("nan"),
        "optimizer.weight_decay=nan is not a number; give optimizer.weight_decay at least 0",
    ),
    "rewards.length_weight": (float("inf"), "rewards.length_weight=inf must be finite"),
    "rewards.overlong_filter": (1, "rewards.overlong_filter=1 must be True or False"),
    "mesh.shape": (4, r"mesh.shape=4 must be a tuple of whole numbers"),
    "model.mlp_only_layers": ((True,), r"model.mlp_only_layers=\(True,\) must be a tuple of whole numbers"),
    # names
    "task.name": ("sorting", "unknown task 'sorting' .did you mean 'sort'?"),
    "objective.name": ("grop", "grop.*grpo"),
    "objective.aggregation": ("mean", "aggregation='mean'"),
    "objective.kl_estimator": ("k1", "config.objective: .*k1"),
    "replay.mode": ("R4", "replay.mode='R4' is unknown.*; use one of off, R2, R3"),
    "replay.what": ("indices", "replay.what='indices' is unknown; use one of experts, logits"),
    "updates.layout": ("dense", "updates.layout='dense' is unknown; use one of auto, padded, packed, shared"),
    "critic.kind": ("tail", "critic.kind='tail' is unknown.*; use one of none, head, separate"),
    "rollout.dtype": ("float16", "rollout.dtype='float16' is unknown.*; use one of float32, bfloat16"),
    "rollout.router_dtype": ("float16", "rollout.router_dtype='float16' is unknown.*; use one of float32, bfloat16"),
    "model.dtype": (
        "float16",
        "model.dtype='float16' is unknown .did you mean 'bfloat16'.*; use one of float32, bfloat16",
    ),
    # ranges
    "rollout.prompts": (0, "rollout.prompts=0 must be at least 1"),
    "rollout.temperature": (0.0, "rollout.temperature=0 makes all answers .*; set rollout.temperature=1.0$"),
    "rollout.temperature ": (-1.0, "rollout.temperature=-1.0 must be at least 0"),
    "rollout.top_p ": (1.5, "rollout.top_p=1.5 is out of range"),
    "rollout.top_k": (-5, "rollout.top_k=-5 must be at least 0"),
    "rollout.top_p": (0.9, "rollout.top_p=0.9 needs a bound on the tokens that it keeps.*; set rollout.top_k=64 "),
    "rollout.min_p": (0.1, "rollout.min_p=0.1 needs a bound on the tokens that it keeps.*; set rollout.top_k=64 "),
    "rollout.router_noise": (-0.1, "rollout.router_noise=-0.1 must be at least 0; standard deviation of noise"),
    "rollout.router_gates": ("exact", "router_gates=exact keeps noise and bias from the gates, and there is neither"),
    "rollout.slots": (17, "rollout.slots=17 is more than the 16 answers of a step"),
    "rollout.max_prompt_length": (99, "rollout.max_prompt_length=99 exceeds the task's 4; set it to 0"),
    "dynamic_sampling.max_draws": (0, "dynamic_sampling.max_draws=0 must be at least 1"),
    "updates.stop_at_kl": (-0.1, "updates.stop_at_kl=-0.1 must be at least 0"),
    "critic.warmup_steps": (2, "critic.warmup_steps=2 but there is no critic; set it to 0, or critic.kind to head or"),
    "rewards.verifier_weight": (0.0, "rewards.verifier_weight=0 leaves nothing to learn from; give a source"),
    "rewards.overlong_cache": (9, "rewards.overlong_cache=9 must be at most rollout.max_new_tokens=4"),
    "warm_start.steps": (-1, "warm_start.steps=-1 must be at least 0"),
    "warm_start.target_pass_rate": (
        1.0,
        "warm_start.target_pass_rate=1.0 is out of range; give .* at least 0 and below 1",
    ),
    "checkpoint.keep": (0, "checkpoint.keep=0 must be at least 1"),
    "evaluation.every": (0, "evaluation.every=0 must be at least 1"),
    "log.samples": (-1, "log.samples=-1 must be at least 0"),
    "objective.clip_low": (-0.1, "config.objective: clip_low=-0.1"),
    "model.num_experts_per_tok": (5, r"model.num_experts_per_tok=5 must lie in 1\.\.num_experts=4"),
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_field_is_named_with_its_value_and_a_remedy(path):
    value, message = BAD[path]
    with pytest.raises(ValueError, match=message):
        validate(changed({path.strip(): value}))


DISAGREE = {
    "groups are kept by rewards that nothing learns from": (
        {"dynamic_sampling.max_draws": 2, "rewards.verifier_weight": 0.0, "rewards.length_weight": 1.0},
        "dynamic_sampling.max_draws=2 keeps groups by the verifier's rewards, which rewards.verifier_weight=0 takes",
    ),
    "a shared prompt and answers shuffled": (
        {"updates.layout": "shared", "model.num_experts": 0},
        "updates.layout=shared keeps groups whole; set updates.shuffle=groups",
    ),
    "a shared prompt and experts": (
        {"updates.layout": "shared", "updates.shuffle": "groups"},
        "model.num_experts=4: updates.layout=shared serves a dense policy without a critic; set that to packed",
    ),
    "a shared prompt and half a group": (
        {
            "updates.layout": "shared",
            "updates.shuffle": "groups",
            "updates.micro_batch_rows": 2,
            "model.num_experts": 0,
        },
        "updates.micro_batch_rows=2 must hold whole groups of rollout.group_size=4",
    ),
    "minibatches do not divide the rows": (
        {"updates.minibatches": 3},
        r"updates.minibatches=3 must divide rollout.prompts x rollout.group_size = 16",
    ),
    "groups do not divide": (
        {"updates.minibatches": 8, "updates.shuffle": "groups"},
        r"updates.minibatches=8 must divide rollout.prompts=4 with updates.shuffle=groups",
    ),
    "micro-batches do not divide": (
        {"updates.micro_batch_rows": 3},
        r"updates.micro_batch_rows=3 must divide the 8 rows of a minibatch",
    ),
    "a group of one": ({"rollout.group_size": 1}, "rollout.group_size=1 leaves grpo nothing to compare an answer with"),
    "devices do not divide the rows": ({"mesh.shape": (3, 1, 1, 1)}, r"mesh.shape=\(3, 1, 1, 1\) spreads 8 rows"),
    "micro-batches of what reads the whole minibatch": (
        {"objective.name": "sat", "updates.micro_batch_rows": 4},
        "updates.micro_batch_rows=4 cuts the minibatch that sat reads as a whole; set it to 0",
    ),
    "a bound on the drift of one update": (
        {"updates.stop_at_kl": 0.01, "updates.minibatches": 1},
        "updates.stop_at_kl=0.01 leaves nothing out of one update a rollout; set it to 0, or updates.minibatches to",
    ),
    "a noisy router and no experts": (
        {"model.num_experts": 0, "rollout.router_noise": 0.1},
        "rollout.router_dtype, _noise, _bias and _gates are of an MoE model and the jax",
    ),
    "devices do not divide the answers of a rollout": (
        {"mesh.shape": (1, 1, 1, 1, 3)},
        r"mesh.shape=\(1, 1, 1, 1, 3\) spreads 16 answers of a rollout over 3 devices",
    ),
    "a group in one row that is split": (
        {
            "mesh.shape": (1, 1, 1, 1, 2),
            "model.num_experts": 0,
            "updates.layout": "shared",
            "updates.shuffle": "groups",
        },
        r"splits rows over 2 devices, and updates.layout=shared keeps them whole; set the fifth size to 1",
    ),
    "three mesh axes": ({"mesh.shape": (1, 1, 1)}, r"mesh.shape=\(1, 1, 1\) must be four whole numbers"),
    "PPO without a critic": ({"objective.name": "ppo"}, "objective.name='ppo' needs values; set critic.kind"),
    "a critic without PPO": ({"critic.kind": "head"}, "critic.kind='head' serves no grpo; set it to none"),
    "replay of a dense model": (
        {"model.num_experts": 0, "replay.mode": "R2"},
        "replay.mode='R2': a model with model.num_experts=0 routes nothing; set it to 'off'",
    ),
    "router shift of a dense model": (
        {"model.num_experts": 0, "objective.name": "rspo"},
        "needs model.num_experts > 0",
    ),
    "balance of a dense model": (
        {"model.num_experts": 0, "updates.aux_coef": 0.1},
        "aux_coef=0.1: a model with",
    ),
    "a bias that policy optimisation would move": (
        {"model.selection_bias": True, "updates.router_bias_rate": 0.001},
        "router_bias_rate=0.001 moves the bias of a gate .* in supervised training of all parameters",
    ),
    "a bias of a gate that has none": (
        {"objective.name": "sft", "rollout.group_size": 1, "updates.router_bias_rate": 0.001},
        r"router_bias_rate=0.001 moves the bias of a gate \(model.selection_bias=True\)",
    ),
    "a lag with dynamic sampling": (
        {"rollout.lag": 2, "dynamic_sampling.max_draws": 3},
        "rollout.lag=2 asks for rollouts before .* set rollout.lag=0 or dynamic_sampling.max_draws=1",
    ),
    "exact numerics and another sampler dtype": (
        {"model.numerics": "exact", "rollout.dtype": "bfloat16"},
        "rollout.dtype='bfloat16': model.numerics=exact samples and trains by the same kernels",
    ),
    "exact numerics and noise of the router": (
        {"model.numerics": "exact", "rollout.router_noise": 0.1},
        "make a sampler differ, and model.numerics=exact no difference",
    ),
    "exact numerics and a tensor axis": (
        {"model.numerics": "exact", "mesh.shape": (1, 1, 1, 2)},
        r"mesh.shape=\(1, 1, 1, 2\): model.numerics=exact cuts neither matrices",
    ),
    "rows beyond a dynamic RoPE": (
        {"model.rope_type": "dynamic", "model.rope_scaling": (2.0, 4.0)},
        r"model.rope_type=dynamic \(factor 2\) is computed up to max_position_embeddings=4 tokens, .* lower rollout",
    ),
    "top-1 without a gradient": ({"model.num_experts_per_tok": 1}, "router gets no gradient"),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_blocks_that_disagree_are_named(case):
    changes, message = DISAGREE[case]
    with pytest.raises(ValueError, match=message):
        validate(changed(changes))


def test_a_missing_field_is_named():
    raw = base.get_config("smoke").to_dict()
    del raw["optimizer"]["b2"]
    with pytest.raises(ValueError, match=r"optimizer lacks b2; start from configs/base\.py"):
        validate(ml_collections.ConfigDict(raw))


def test_what_is_allowed_on_request():
    biased = validate(changed({"rollout.top_p": 0.9, "rollout.allow_truncated": True})).rollout
    assert (biased.sampling.top_p, biased.records_kept) == (0.9, False)
    assert validate(changed({"rollout.top_p": 0.9, "rollout.top_k": 5})).rollout.records_kept
    assert not validate(changed({})).rollout.records_kept
    top_one = {"model.num_experts_per_tok": 1, "optimizer.router_factor": 0.0}
    assert validate(changed(top_one)).model.num_experts_per_tok == 1
    alone = {"rollout.group_size": 1, "objective.baseline": "none", "objective.std": "none", "updates.minibatches": 1}
    assert not validate(changed(alone)).objective.advantage.compares_groups
    assert validate(changed({"optimizer.learning_rate": 1})).optimizer.learning_rate == 1.0
    assert validate(changed({"mesh.shape": [1, 1, 1, 1]})).mesh.shape == (1, 1, 1, 1)


def test_a_config_read_back_from_json_is_the_same_run():
    """config.json knows lists and null, no tuples and no placeholders."""
    config = base.get_config("smoke")
    again = ml_collections.ConfigDict(json.loads(json.dumps(plain(config.to_dict()))))
    read, made = validate(again), validate(config)
    for field in dataclasses.fields(made):
        if field.name != "task":  # it holds functions
            assert getattr(read, field.name) == getattr(made, field.name), field.name
    assert read.task.options == made.task.options
    assert config_hash(again) == config_hash(config)


def test_the_bound_on_prompts_reaches_the_task(tmp_path):
    from jaxrl_llm import tasks

    settings = validate(changed({"rollout.max_prompt_length": 3}))  # a prompt of three digits and a sign has four
    with pytest.raises(ValueError, match="prompt_length=3"):
        tasks.all_prompts(settings.task, "test", limit=1, data_dir=tmp_path)


def test_the_constant_aggregation_gets_the_longest_answer():
    settings = validate(changed({"objective.aggregation": "constant"}))
    assert settings.objective.aggregation.max_length == settings.answer_length == 4
    assert validate(changed({"objective.aggregation": "constant", "objective.max_length": 7})) != settings


FREE = ("steps", "log", "evaluation", "checkpoint", "processes")  # may change when a run resumes
SERVERS = ("servers", "launch", "weights_dir", "weights_by", "deadline_s")
FREE_FIELDS = {"task.date", *(f"rollout.{x}" for x in SERVERS)}


def test_the_hash_knows_every_other_field():
    config = base.get_config("smoke")
    own = config_hash(config)
    fields = flat(config.to_dict())
    del (
        fields["model.pretrained"],
        fields["rewards.reward_model"],
        fields["teacher.path"],
    )  # digests: tests/models/test_model_fields.py
    for path, value in fields.items():
        other = changed({path: "another" if not isinstance(value, str) else value + "?"})
        assert (config_hash(other) == own) == (path.split(".")[0] in FREE or path in FREE_FIELDS), path


def test_the_hash_does_not_know_fields_that_are_left_to_the_recipe():
    """A recipe of one's own adds its fields to every config made after it, which are the runs that they were."""
    assert config_hash(changed({"objective.power": None})) == config_hash(base.get_config("smoke"))
    assert config_hash(changed({"objective.power": 0.5})) != config_hash(base.get_config("smoke"))


def test_the_hash_knows_what_a_schedule_and_a_warm_start_read():
    """A decaying rate depends on the number of steps, a warm start up to a pass rate on how that is measured."""
    for path, value, read in (
        ("optimizer.schedule", "linear", {"steps": 9}),
        ("warm_start.target_pass_rate", 0.5, {"evaluation.samples": 9}),
    ):
        assert config_hash(changed({path: value} | read)) != config_hash(changed({path: value}))


if __name__ == "__main__":
    BASE.write_text(base_py())
    FIELDS.write_text(configuration_md())
    HELP.write_text(field_texts.field_help())
    records = {label: record(*run) for label, run in zip(LABELS, RUNS, strict=True)}
    GOLDEN.write_text(
        json.dumps({label: one for label, one in records.items() if one}, indent=1, sort_keys=True) + "\n"
    )
