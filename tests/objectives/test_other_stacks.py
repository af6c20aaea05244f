"""The table "Against other stacks" of docs/objectives.md: both columns computed, and theirs by their own code.

The quick tests hold each cell against a formula written here from the source that the page names. The slow ones run the
functions themselves, taken out of the wheels of verl, SkyRL, OpenRLHF and Tunix where these can be had.
"""

import ast
import collections
import math
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.divergences import kl_loss
from jaxrl_llm.objectives.further_advantages import optimal_token_advantages
from jaxrl_llm.objectives.named_parts import ADVANTAGES, correction_named
from jaxrl_llm.objectives.ratios import SequenceRatio

PAGE = (Path(__file__).parents[2] / "docs/objectives.md").read_text().split("## Against other stacks")[1]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
TABLE = {row[0]: row[1:] for row in ROWS[2:]}


def row(word):
    (found,) = [cells for what, cells in TABLE.items() if word in what]
    return [[float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", cell)] for cell in found[1:]]


def on_policy(lengths, advantages):
    mask = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    logprobs = jnp.full(mask.shape, -1.0)
    return {"logprobs": logprobs, "old_logprobs": logprobs, "advantages": jnp.asarray(advantages), "mask": mask}


def gradient(name, arrays, **hyperparameters):
    """Of what is maximised, by log pi, [b t]."""
    objective = objectives.make(name, **hyperparameters)
    rest = {key: x for key, x in arrays.items() if key != "logprobs"}
    return -jax.grad(lambda x: objective(logprobs=x, **rest)[0])(arrays["logprobs"])


def our_kl(estimator="k3"):
    def kl(log_pi):
        return kl_loss(3.0 - log_pi, jnp.zeros((1, 1)), estimator).sum()

    value, slope = jax.value_and_grad(kl)(jnp.zeros((1, 1)))
    return [float(value), float(slope[0, 0])]


def our_dppo():
    p, mu = jnp.full((1, 1), math.log(0.3)), jnp.full((1, 1), math.log(0.05))
    arrays = {"logprobs": p, "old_logprobs": p, "sampler_logprobs": mu, "mask": jnp.ones((1, 1), bool)}
    return [float(-gradient("dppo", arrays | {"advantages": jnp.asarray([-1.0])})[0, 0])]


def our_weights(name):
    log_k = jnp.log(jnp.asarray([[1.5, 0.8]]))
    arrays = on_policy([2], [1.0]) | {"sampler_logprobs": -1.0 - log_k}
    return np.asarray(correction_named(name)(objectives.Batch.of(**arrays)))[0].tolist()


def our_opsm():
    arrays = {"logprobs": jnp.full((1, 1), -1.0), "sampler_logprobs": jnp.full((1, 1), -1.1)}
    arrays |= {"old_logprobs": jnp.full((1, 1), -1.3), "mask": jnp.ones((1, 1), bool), "advantages": jnp.ones(1)}
    return [-float(objectives.make("opsm")(**arrays)[0])]


def our_rloo():
    slopes = gradient("rloo", on_policy([3, 1], [1.0, -1.0]))
    assert np.ptp(slopes[0]) == 0
    assert not slopes[1, 1:].any()
    return [float(slopes[0, 0]), float(slopes[1, 0])]


def our_empty_row():
    arrays = on_policy([1, 1, 0], [-1.0, -3.0, 5.0])
    return [float(objectives.make("grpo")(**arrays)[0])]


def our_gspo():
    log_r = jnp.asarray([[25.0, -9.0]])
    arrays = on_policy([2], [1.0]) | {"logprobs": log_r, "old_logprobs": jnp.zeros((1, 2))}
    return [float(SequenceRatio()(objectives.Batch.of(**arrays))[0, 0])]


K3 = math.exp(3) - 1 - 3  # its slope by log pi is 1 - e^3
CASES = {  # a word of the row: (there, by its formula; here)
    "`k3` as a loss": ([min(K3, 10), 0], our_kl),
    "KL of Tunix": ([-3, 1], our_kl),
    "`dppo` in verl": ([min(0.3 / 0.05, 3)], our_dppo),
    "seq-mask-tis": ([1.5, 0.8], lambda: our_weights("sequence_mask")),
    "OPSM in TRL": ([min(math.exp(0.3), 1.2)], our_opsm),
    "RLOO in verl": ([1 / 4, -1 / 4], our_rloo),
    "a group of one": ([0.7], lambda: [float(objectives.group_advantages(jnp.asarray([0.7]), group_size=1)[0])]),
    "rows without a token": ([(1 + 3) / 3], our_empty_row),
    "GSPO in verl": ([(25 - 9) / 2], our_gspo),
}


@pytest.mark.parametrize("word", CASES)
def test_both_columns(word):
    there, here = CASES[word]
    shown = row(word)
    np.testing.assert_allclose(shown[0], there, atol=6e-5)
    np.testing.assert_allclose(shown[1], here(), atol=6e-5)


def test_every_row_is_computed():
    assert len(TABLE) == len(CASES)


def test_a_product_of_corrections_is_seq_mask_tis():
    """k = 1.5 and 0.8 have the geometric mean 1.095: kept at a cap of 2, dropped at one of 1.05."""
    np.testing.assert_allclose(our_weights("sequence_mask*decoupled"), [1.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(our_weights("tis * sequence_mask"), [1.5, 0.8], rtol=1e-6)
    product = objectives.make("grpo", correction="sequence_mask*decoupled", correction_cap=1.05)
    arrays = on_policy([2], [1.0]) | {"sampler_logprobs": -1.0 - jnp.log(jnp.asarray([[1.5, 0.8]]))}
    np.testing.assert_array_equal(product.correction(objectives.Batch.of(**arrays)), [[0, 0]])
    _, letters = product.formula()
    assert {"w = w1 w2", "w1 = 1 if exp(mean_t log(pi_old / mu)) in [1/1.05, 1.05], else 0", "w2 = k"} <= set(letters)
    with pytest.raises(ValueError, match=r"correction='maskx'.*sequence_mask"):
        objectives.make("grpo", correction="maskx*tis")


def test_the_old_reading_of_rloo_is_a_setting_of_grpo():
    """Leave-one-out advantages with the token ratio and the mean over tokens: 1/|y| of the paper's gradient."""
    slopes = gradient("grpo", on_policy([3, 1], [1.0, -1.0]), baseline="leave_one_out", std="none")
    np.testing.assert_allclose(slopes, [[1 / 6, 1 / 6, 1 / 6], [-1 / 2, 0, 0]], rtol=1e-6)


# Their own functions


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source("verl==0.9.1", "verl/trainer/ppo/core_algos.py", {...}, "f", ...): functions out of a file of a wheel."""
    folder = tmp_path_factory.mktemp("wheels")

    def functions(package, path, names, *wanted):
        name = package.split("==")[0].replace("-", "_")
        if not list(folder.glob(f"{name}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
            if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
                pytest.skip(f"{package} cannot be had")
        (wheel,) = folder.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [one for one in archive.namelist() if one.endswith(path)]
            tree = ast.parse(archive.read(member))
        own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
        for node in own:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        exec(compile(ast.Module(own, []), str(wheel), "exec"), names)
        return [names[one] for one in wanted]

    return functions


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="their code needs the bench extra: pip install jaxrl_llm[bench]")


def slope_of(torch, f):
    x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    y = f(x)
    y.sum().backward()
    return [float(y.detach().sum()), float(x.grad)]


VERL = ("verl==0.9.1", "verl/trainer/ppo/core_algos.py")


@pytest.mark.slow
def test_their_k3(source, torch):
    (verl,) = source(*VERL, {"torch": torch}, "kl_penalty_forward")
    skyrl_file = ("skyrl==0.3.0", "skyrl_train/utils/ppo_utils.py")
    (skyrl,) = source(*skyrl_file, {"torch": torch, "Optional": None, "Union": None}, "compute_approx_kl")
    (openrlhf,) = source("openrlhf==0.11.2", "openrlhf/models/utils.py", {"torch": torch}, "compute_approx_kl")
    log_ref = torch.full((1, 1), 3.0, dtype=torch.float64)
    there = row("`k3` as a loss")[0]
    assert slope_of(torch, lambda x: verl(x, log_ref, "low_var_kl")) == there
    assert slope_of(torch, lambda x: skyrl(x, log_ref, None, "k3")) == there
    assert slope_of(torch, lambda x: openrlhf(x, log_ref, kl_estimator="k3")) == there
    for name in ("low_var_kl", "abs"):
        assert our_kl(name) == slope_of(torch, lambda x, name=name: verl(x, log_ref, name))
    tunix_file = ("google-tunix==0.1.7", "tunix/rl/common.py")
    (tunix,) = source(*tunix_file, {"jnp": jnp, "jax": jax}, "compute_kl_divergence")
    value, slope = jax.value_and_grad(lambda x: tunix(x, jnp.asarray(3.0), "kl"))(0.0)
    assert [float(value), float(slope)] == row("KL of Tunix")[0]


@pytest.mark.slow
def test_their_dppo(source, torch):
    names = {
        "torch": torch,
        "AlgoConfig": type("AlgoConfig", (), {}),
        "verl_F": types.SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum()),
        "agg_loss": lambda loss_mat, loss_mask, loss_agg_mode: (loss_mat * loss_mask).sum() / loss_mask.sum(),
    }
    (dppo,) = source(*VERL, names, "compute_policy_loss_dppo_tv")
    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # actor.yaml
    config = types.SimpleNamespace(**settings, get=settings.get, global_batch_info={})
    one = torch.ones(1, 1, dtype=torch.float64)
    mu, p = one * math.log(0.05), math.log(0.3)
    slope = slope_of(torch, lambda x: dppo(mu, x + p, -one, one, config=config)[0])[1]
    np.testing.assert_allclose([slope], row("`dppo` in verl")[0])


@pytest.mark.slow
def test_their_advantage_of_a_group_of_one(source, torch):
    names = {"torch": torch, "np": np, "defaultdict": collections.defaultdict}
    functions = source(*VERL, names, "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage")
    for advantage in functions:
        rewards, mask = torch.tensor([[0.0, 0.7]]), torch.ones(1, 2)
        got, _ = advantage(rewards, mask, np.asarray(["a"]))
        np.testing.assert_allclose(float(got[0, 0]), row("a group of one")[0][0], rtol=1e-5)


def masked_functions(source, torch):
    """verl's own masked reductions."""
    names = {"torch": torch}
    wanted = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    functions = source("verl==0.9.1", "verl/utils/torch_functional.py", names, *wanted)
    return types.SimpleNamespace(**dict(zip(wanted, functions, strict=True)))


def ragged(seed=0, spread=0.4):
    """Two groups of three ragged answers, one of them empty, in float64."""
    rng = np.random.default_rng(seed)
    mask = np.arange(5) < np.asarray([5, 3, 1, 4, 0, 2])[:, None]
    old = np.log(rng.uniform(0.1, 0.9, mask.shape))
    new, sampler = old + spread * rng.normal(size=(2, *mask.shape))
    return {"logprobs": new, "old_logprobs": old, "sampler_logprobs": sampler, "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reinforce_plus_plus", "reinforce_pp"),
        ("reinforce_plus_plus_baseline", "group_whitened"),
        ("opo", "opo"),
        ("grpo_passk", "best_of_group"),
    ],
)
def test_their_advantages(theirs, ours, source, torch):
    names = {
        "torch": torch,
        "np": np,
        "defaultdict": collections.defaultdict,
        "verl_F": masked_functions(source, torch),
    }
    (advantage,) = source(*VERL, names, f"compute_{theirs}_outcome_advantage")
    mask, rewards = ragged()["mask"], np.asarray([1.0, 0.2, 0.5, 0.0, 0.0, 2.0])
    by_token = np.where(np.arange(5) == np.maximum(mask.sum(1) - 1, 0)[:, None], rewards[:, None], 0.0)
    config = types.SimpleNamespace(gamma=1.0, get=lambda key, default: default)
    given = {"index": np.repeat([0, 1], 3)} if theirs != "reinforce_plus_plus" else {}
    there, _ = advantage(torch.tensor(by_token), torch.tensor(mask * 1.0), config=config, **given)
    with jax.enable_x64(True):
        more = {"mask": jnp.asarray(mask)} if ADVANTAGES[ours].reads_tokens else {}
        here = ADVANTAGES[ours]()(jnp.asarray(rewards), group_size=3, **more)
        here = np.where(mask, here if here.ndim == 2 else here[:, None], 0)
    np.testing.assert_allclose(here, there.numpy(), rtol=1e-6, atol=1e-9)
    assert np.abs(here).max() > 0.1


@pytest.mark.slow
def test_their_baselines_by_greedy_answer_and_by_token(source, torch):
    """verl draws the greedy answers apart; its baseline by place is that of `tir_optimal_token_baseline`."""
    names = {"torch": torch, "np": np, "defaultdict": collections.defaultdict}
    wanted = "compute_remax_outcome_advantage", "compute_multi_turn_optimal_token_baseline_advantage"
    remax, by_token = source(*VERL, names, *wanted)
    mask = np.arange(5) < np.asarray([5, 3, 1, 4, 2, 2])[:, None]
    rewards = np.asarray([1.0, 0.2, 0.5, 0.0, 0.7, 2.0])
    ends = torch.tensor(np.where(np.arange(5) == mask.sum(1)[:, None] - 1, rewards[:, None], 0.0))
    greedy = torch.tensor(np.repeat(rewards[[2, 5]], 3))
    there, _ = remax(ends, greedy, torch.tensor(mask * 1.0))
    with jax.enable_x64(True):
        here = ADVANTAGES["remax"]()(jnp.asarray(rewards), group_size=3)
    np.testing.assert_allclose(np.where(mask, here[:, None], 0), there.numpy(), rtol=1e-9)
    rng = np.random.default_rng(0)
    squares, old = rng.uniform(0.5, 0.9, mask.shape), np.log(rng.uniform(0.1, 0.7, mask.shape))
    given = {"old_log_probs": torch.tensor(old), "sum_pi_squared": torch.tensor(squares)}
    there, _ = by_token(ends, torch.tensor(mask * 1.0), np.repeat([0, 1], 3), handle_zero_tail=False, **given)
    with jax.enable_x64(True):
        here = optimal_token_advantages(*map(jnp.asarray, (rewards, old, squares, mask)), 3)
    np.testing.assert_allclose(here, there.numpy(), rtol=1e-6, atol=1e-7)  # they add 1e-8 to the weights' sum


@pytest.mark.slow
def test_their_maximum_likelihood_advantage(source, torch):
    names = {"torch": torch, "np": np, "defaultdict": collections.defaultdict}
    (maxrl,) = source("skyrl==0.3.0", "skyrl_train/utils/ppo_utils.py", names, "compute_maxrl_advantage")
    rewards = np.asarray([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    there, _ = maxrl(torch.tensor(rewards)[:, None], torch.ones(6, 1), np.repeat([0, 1], 3))
    here = ADVANTAGES["maxrl"]()(jnp.asarray(rewards), group_size=3)
    np.testing.assert_allclose(here, there.numpy()[:, 0], rtol=1e-5)


@pytest.mark.slow
def test_their_prompt_mean(source, torch):
    """They scale advantages so that a sum is the loss; an empty answer is not in our mean over answers, so none is."""
    names = {"torch": torch} | dict.fromkeys(("Optional", "List", "Tuple"))
    (scaled,) = source("skyrl==0.3.0", "backends/skyrl_train/utils/ppo_utils.py", names,
                       "apply_loss_reduction_to_advantages_minibatch")  # fmt: skip
    mask = np.arange(5) < np.asarray([5, 3, 1, 4, 2, 2])[:, None]
    rewards, group = jnp.asarray([1.0, 0.2, 0.5, 0.0, 1.0, 2.0]), {"group_size": 3}
    plain = torch.tensor(np.asarray(objectives.group_advantages(rewards, **group)))[:, None].expand(6, 5)
    there = scaled(plain, torch.tensor(mask * 1.0), "prompt_mean", 6, 5, [(0, 3), (3, 6)])
    here = ADVANTAGES["prompt_mean"]()(rewards, mask=jnp.asarray(mask), **group)
    np.testing.assert_allclose(here / 6, there[:, 0], rtol=1e-6)  # 6 answers: what sequence_mean_token_sum divides by


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.4, 3.0])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "dro", "cispo"])
def test_their_policy_losses(name, spread, source, torch):
    """Value and gradient; with a share of 1 Clip-Cov holds back all that its draw is from, so that none is drawn."""
    names = {"torch": torch, "AlgoConfig": type("AlgoConfig", (), {}), "verl_F": masked_functions(source, torch)}
    names["ActorConfig"] = types.SimpleNamespace
    _, loss = source(*VERL, names, "agg_loss", f"compute_policy_loss_{name}")
    arrays, advantages = ragged(spread=spread), np.asarray([2.0, -1.5, 1.0, -2.0, 3.0, 0.5])
    policy = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}
    policy["dro_beta"] = 0.1
    clips = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), 0.2)
    config = types.SimpleNamespace(**clips, policy_loss=types.SimpleNamespace(**policy), global_batch_info={})
    x, mask = torch.tensor(arrays["logprobs"], requires_grad=True), torch.tensor(arrays["mask"] * 1.0)
    by_token = torch.tensor(advantages)[:, None] * mask
    value, _ = loss(torch.tensor(arrays["old_logprobs"]), x, by_token, mask, config=config)
    value.backward()
    own = {
        "clip_cov": {"clip_cov_share": 1.0, "cov_low": 0.1, "cov_high": 1.0},
        "kl_cov": {"kl_cov_share": 0.2},
        "cispo": {"cap": 1.2, "floor": 0.8},
    }
    objective, rest = (
        objectives.make(name, **own.get(name, {})),
        {key: a for key, a in arrays.items() if key != "logprobs"},
    )
    with jax.enable_x64(True):
        f = jax.value_and_grad(lambda x: objective(logprobs=x, advantages=jnp.asarray(advantages), **rest)[0])
        here, slope = jax.jit(f)(jnp.asarray(arrays["logprobs"]))
    np.testing.assert_allclose(here, value.item(), rtol=1e-9)
    np.testing.assert_allclose(slope, x.grad.numpy(), rtol=1e-8, atol=1e-12)


OPTIONS = [f"{level}_k{n}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for n in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.0, 9.0])
@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in ("seq_max_k1", "seq_mean_k1")])
def test_their_rejection(option, spread, source, torch):
    file = ("verl==0.9.1", "verl/trainer/ppo/rollout_corr_helper.py")
    names = {"torch": torch, "math": math, "SAFETY_BOUND": 20.0, "verl_F": masked_functions(source, torch)}
    names |= {"SUPPORTED_ROLLOUT_RS_OPTIONS": set(OPTIONS), "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": set(OPTIONS[:3])}
    wanted = ("_parse_rollout_rs_thresholds", "compute_rs_metrics", "compute_rollout_rejection_mask")
    *_, reject = source(*file, names, *wanted)
    arrays, cap = ragged(spread=spread), 2.0 if option.endswith("k1") else 0.05
    bound = f"{1 / cap}_{cap}" if option.endswith("k1") else cap
    mask = torch.tensor(arrays["mask"] * 1.0)
    kept, _ = reject(torch.tensor(arrays["old_logprobs"] - arrays["sampler_logprobs"]), mask, option, bound)
    with jax.enable_x64(True):
        arrays["advantages"] = np.ones(6)
        here = correction_named(option, cap)(objectives.Batch.of(**{key: jnp.asarray(x) for key, x in arrays.items()}))
    np.testing.assert_array_equal(np.where(arrays["mask"], here, 0), kept.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.0, 9.0])
def test_the_masks_of_areal_and_skyrl(spread, source, torch):
    actor = ("areal==1.0.4", "areal/trainer/ppo/actor.py")
    *_, m2po = source(*actor, {"torch": torch}, "_get_m2po_loss_mask", "_apply_m2po_masking")
    arrays = ragged(spread=spread) | {"advantages": np.ones(6)}
    old, sampler = torch.tensor(arrays["old_logprobs"]), torch.tensor(arrays["sampler_logprobs"])
    kept = m2po(sampler, old, torch.tensor(arrays["mask"]), 0.04).numpy()
    file = ("skyrl==0.3.0", "backends/skyrl_train/utils/off_policy_correction_utils.py")
    names = {"torch": torch, "safe_exp_delta": lambda x, clip, out_dtype: torch.exp(x.clamp(-clip, clip))}
    names |= dict.fromkeys(("Tuple", "DictConfig"))
    (outlier,) = source(*file, names, "compute_outlier_token_mask")
    bounds = types.SimpleNamespace(outlier_token_is_threshold_low=1e-4, outlier_token_is_threshold_high=1e4)
    valid, _ = outlier(old, sampler, torch.tensor(arrays["mask"] * 1.0), bounds)
    with jax.enable_x64(True):
        batch = objectives.Batch.of(**{key: jnp.asarray(x) for key, x in arrays.items()})
        np.testing.assert_array_equal(np.where(arrays["mask"], correction_named("m2po")(batch), 0), kept)
        np.testing.assert_array_equal(correction_named("veto")(batch), np.broadcast_to(valid, kept.shape))
