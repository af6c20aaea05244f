"""Value and gradient against TRL's own loss on random inputs; needs the `bench` extra (TRL 1.16 and PyTorch).

The method `GRPOTrainer._compute_loss` runs on a stand-in that holds the trainer's settings and returns given log-probs;
where a convention of TRL differs from ours, docs/objectives.md lists it.
"""

import collections
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives

CASES = {
    # name: (TRL's settings, our recipe with TRL's conventions)
    "grpo": ({"loss_type": "grpo"}, ("grpo", {})),
    "grpo_kl": ({"loss_type": "grpo", "beta": 0.04}, ("grpo", {"kl_coef": 0.04})),
    "grpo_kl_unbiased": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
        ("grpo", {"kl_coef": 0.04, "kl_estimator": "k3_unbiased"}),
    ),
    "grpo_dual_clip": ({"loss_type": "grpo", "delta": 3.0}, ("grpo", {"dual_clip": 3.0})),
    "dapo": ({"loss_type": "bnpo", "epsilon_high": 0.28}, ("dapo", {})),
    "dapo_by_items": ({"loss_type": "dapo", "epsilon_high": 0.28}, ("dapo", {})),
    "dr_grpo": ({"loss_type": "dr_grpo"}, ("dr_grpo", {"max_length": 8})),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        ("gspo", {"clip_low": 0.05, "clip_high": 0.06}),
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        ("luspo", {"clip_low": 0.05, "clip_high": 0.06}),
    ),
    "high_entropy": (
        {"loss_type": "bnpo", "top_entropy_quantile": 0.3},
        ("dapo", {"clip_high": 0.2, "correction": "high_entropy", "correction_cap": 0.3}),
    ),
    # 1.0625 is exact in float32: TRL rounds the temperature to it, so 1.05 would agree to 1e-7 only
    "sapo": ({"loss_type": "sapo"}, ("sapo", {"tau_neg": 1.0625})),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, ("cispo", {"cap": 1.5})),
    "vespo": ({"loss_type": "vespo"}, ("vespo", {})),
    "grpo_tis": (
        {"loss_type": "grpo", "use_vllm": True, "vllm_importance_sampling_correction": True},
        ("grpo", {"correction": "tis"}),
    ),
}


@pytest.fixture(scope="module")
def torch_and_trainer():
    reason = "parity with TRL needs the bench extra: pip install jaxrl_llm[bench]"
    with warnings.catch_warnings():  # what they deprecate among themselves is none of ours
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason=reason)
        pytest.importorskip("trl", reason=reason)
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]
    return torch, GRPOTrainer


def random_arrays(empty_row=False):
    rng = np.random.default_rng(0)
    old = np.log(rng.uniform(0.1, 0.9, (4, 6)))
    mask = np.arange(6) < np.asarray([[6], [3], [1], [4]])
    if empty_row:
        mask[2] = False
    noise = rng.normal(size=(3, 4, 6))
    return {
        "logprobs": old + 0.4 * noise[0],
        "old_logprobs": old,
        "ref_logprobs": old + 0.3 * noise[1],
        "sampler_logprobs": old + 0.4 * noise[2],
        "entropy": np.abs(noise[2]),
        "advantages": np.asarray([1.0, -0.7, 0.4, -1.3]),
        "mask": mask,
    }


def trl_loss(torch, trainer, settings, arrays):
    """(value, gradient) of TRL's loss in float64."""
    chosen = {
        "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "delta": None, "use_bias_correction_kl": False, "use_vllm": False, "vllm_importance_sampling_correction": False,
        "top_entropy_quantile": 1.0,
    } | settings  # fmt: skip
    logprobs = torch.tensor(arrays["logprobs"], requires_grad=True)
    stand_in = types.SimpleNamespace(
        **chosen,
        args=types.SimpleNamespace(
            delta=chosen["delta"],
            use_bias_correction_kl=chosen["use_bias_correction_kl"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.0625,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=8,
        current_gradient_accumulation_steps=1,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=True,
            pad_across_processes=lambda x, **_: x,
        ),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.tensor(arrays["entropy"]), None),
        get_gamma_weights=trainer.get_gamma_weights,
    )
    stand_in.get_high_entropy_mask = types.MethodType(trainer.get_high_entropy_mask, stand_in)
    tokens, mask = torch.zeros((4, 6), dtype=torch.long), torch.tensor(arrays["mask"]).long()
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1] + 1,
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": torch.tensor(arrays["advantages"]),
        "old_per_token_logps": torch.tensor(arrays["old_logprobs"]),
        "ref_per_token_logps": torch.tensor(arrays["ref_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if chosen["use_vllm"]:
        ratio = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
        inputs["importance_sampling_ratio"] = torch.tensor(np.minimum(ratio, 2.0))
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def our_loss(recipe, arrays):
    name, hyperparameters = recipe
    objective = objectives.make(name, **hyperparameters)
    with jax.enable_x64(True):
        rest = {key: x for key, x in arrays.items() if key != "logprobs"}
        f = jax.jit(jax.value_and_grad(lambda x: objective(logprobs=x, **rest)[0]))
        value, gradient = f(jnp.asarray(arrays["logprobs"]))
    return float(value), np.asarray(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_same_value_and_gradient(case, torch_and_trainer):
    settings, recipe = CASES[case]
    arrays = random_arrays()
    theirs, ours = trl_loss(*torch_and_trainer, settings, arrays), our_loss(recipe, arrays)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-8, atol=1e-12)
    assert np.abs(theirs[1]).max() > 1e-3


@pytest.mark.slow
def test_rloo(torch_and_trainer):
    """RLOOTrainer's loss: one clipped ratio of whole answers, by the sums of their log-probs."""
    torch, _ = torch_and_trainer
    from trl.trainer.rloo_trainer import RLOOTrainer  # pyright: ignore[reportMissingImports]

    arrays = random_arrays()
    logprobs = torch.tensor(arrays["logprobs"], requires_grad=True)
    stand_in = types.SimpleNamespace(
        epsilon_low=0.2,
        epsilon_high=0.2,
        aux_loss_enabled=False,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )
    tokens, mask = torch.zeros((4, 6), dtype=torch.long), torch.tensor(arrays["mask"]).long()
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1] + 1,
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": torch.tensor(arrays["advantages"]),
        "old_logps": (torch.tensor(arrays["old_logprobs"]) * mask).sum(1),
    }
    theirs = RLOOTrainer._compute_loss(stand_in, None, inputs)
    theirs.backward()
    value, gradient = our_loss(("rloo", {}), arrays)
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-9)
    np.testing.assert_allclose(gradient, logprobs.grad.numpy(), rtol=1e-8, atol=1e-12)
    assert np.abs(gradient).max() > 1e-2


@pytest.mark.slow
def test_the_policy_term_of_ppo(torch_and_trainer):
    """TRL 1.16 has no PPO; its clip over the tokens of a batch with an advantage for every token is PPO's policy term.

    At values that equal the returns the value loss adds nothing.
    """
    arrays = random_arrays()
    arrays["advantages"] = np.random.default_rng(1).normal(size=arrays["mask"].shape)
    theirs = trl_loss(*torch_and_trainer, {"loss_type": "bnpo"}, arrays)
    values = dict.fromkeys(("values", "old_values", "returns"), np.zeros(arrays["mask"].shape))
    ours = our_loss(("ppo", {}), arrays | values)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-8, atol=1e-12)


def test_advantages_with_their_constant():
    """(R - mean) / (sample std + 1e-4)."""
    got = objectives.group_advantages(jnp.asarray([1.0, 0, 0, 0]), group_size=4, eps=1e-4)
    np.testing.assert_allclose(got, np.asarray([0.75, -0.25, -0.25, -0.25]) / 0.5001, rtol=1e-5)


@pytest.mark.slow
def test_an_empty_row_counts_there_and_not_here(torch_and_trainer):
    """A difference of convention: TRL divides by all four rows, we by the three that have tokens."""
    arrays = random_arrays(empty_row=True)
    theirs, ours = trl_loss(*torch_and_trainer, {}, arrays), our_loss(("grpo", {}), arrays)
    np.testing.assert_allclose(np.asarray(ours[0]) * 3, np.asarray(theirs[0]) * 4, rtol=1e-9)
