"""Losses on pairs against TRL's own on random inputs; needs the `bench` extra (TRL 1.16 and PyTorch).

`DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss` and `RewardTrainer.compute_loss` run on stand-ins that hold the
trainer's settings and return given log-probs; where a convention of TRL differs, docs/objectives.md lists it.
"""

import collections
import contextlib
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="parity with TRL needs the bench extra: pip install jaxrl_llm[bench]")


@pytest.fixture(scope="module")
def trl(torch):
    reason = "parity with TRL needs the bench extra: pip install jaxrl_llm[bench]"
    with warnings.catch_warnings():  # what they deprecate among themselves is none of ours
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason=reason)
        from trl.experimental.cpo.cpo_trainer import CPOTrainer  # pyright: ignore[reportMissingImports]
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer  # pyright: ignore[reportMissingImports]
        from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]
        from trl.trainer.kto_trainer import KTOTrainer  # pyright: ignore[reportMissingImports]
        from trl.trainer.reward_trainer import RewardTrainer  # pyright: ignore[reportMissingImports]
    return types.SimpleNamespace(dpo=DPOTrainer, cpo=CPOTrainer, orpo=ORPOTrainer, reward=RewardTrainer, kto=KTOTrainer)


def random_arrays():
    """Rows: chosen, rejected, ...; the first token is the prompt's, and log-probs are 0 where masked, as TRL's are."""
    rng = np.random.default_rng(0)
    mask = np.arange(6) < np.asarray([[6], [3], [2], [4], [5], [5]])
    mask[:, 0] = False
    ref = np.where(mask, np.log(rng.uniform(0.1, 0.9, mask.shape)), 0.0)
    return {"mask": mask, "logprobs": np.where(mask, ref + 0.5 * rng.normal(size=mask.shape), 0), "ref_logprobs": ref}


def halves(x):
    """Our rows as TRL wants them: all chosen answers, then all rejected ones."""
    return np.concatenate([x[::2], x[1::2]])


def trl_dpo(torch, trainer, loss_type, arrays, *, beta=0.1, label_smoothing=0.0):
    """(value, gradient in our order of rows, TRL's metrics) of TRL's loss in float64."""
    logprobs = torch.tensor(halves(arrays["logprobs"]), requires_grad=True)
    mask = torch.tensor(halves(arrays["mask"])).long()
    ref = torch.tensor(halves(arrays["ref_logprobs"])).sum(1)
    n = len(ref) // 2
    zeros = torch.zeros((2 * n, 5))
    outputs = types.SimpleNamespace(
        log_probs=(logprobs * mask)[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
    )

    class Model:
        training = True

        def __call__(self, **_):
            return outputs

    stand_in = types.SimpleNamespace(
        model=Model(),
        accelerator=types.SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, num_processes=1
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": ref[:n],
        "ref_rejected_logps": ref[n:],
    }
    loss = trainer._compute_loss(stand_in, stand_in.model, inputs, return_outputs=False)
    loss.backward()
    gradient = logprobs.grad.numpy()
    ours = np.stack([gradient[:n], gradient[n:]], 1).reshape(gradient.shape)
    return loss.item(), ours, {key: x[-1] for key, x in stand_in._metrics["train"].items()}


def our_loss(objective, arrays, learnt="logprobs"):
    """(value, gradient, metrics)."""
    with jax.enable_x64(True):
        rest = {key: x for key, x in arrays.items() if key != learnt}
        f = jax.jit(jax.value_and_grad(lambda x: objective(**{learnt: x}, **rest), has_aux=True))
        (value, metrics), gradient = f(jnp.asarray(arrays[learnt]))
    return float(value), np.asarray(gradient), finalize(metrics)


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-8, atol=1e-12)
    assert np.abs(theirs[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("loss_type", "objective"),
    [
        ("sigmoid", objectives.make("dpo", beta=0.3)),
        ("ipo", objectives.make("ipo", beta=0.3)),
        ("sigmoid_norm", objectives.make("dpo", beta=0.3, aggregation="sequence_mean_token_mean")),
        ("exo_pair", objectives.make("exo", beta=0.3, label_smoothing=1e-3)),
        ("nca_pair", objectives.make("nca", beta=0.3)),
        ("apo_zero", objectives.make("apo_zero", beta=0.3)),
        ("apo_down", objectives.make("apo_down", beta=0.3)),
    ],
)
def test_dpo(loss_type, objective, torch, trl):
    arrays = random_arrays()
    torch.set_default_dtype(torch.float64)  # EXO's smoothing becomes a tensor of that type
    try:
        theirs = trl_dpo(torch, trl.dpo, loss_type, arrays, beta=0.3, label_smoothing=1e-3)
    finally:
        torch.set_default_dtype(torch.float32)
    ours = our_loss(objective, arrays)
    assert_same(ours, theirs)
    logged = {"pairs/accuracy": "rewards/accuracies"}
    if loss_type == "sigmoid":  # the other two log the rewards of "sigmoid", we those of the loss
        logged |= {"pairs/margin": "rewards/margins", "pairs/reward_chosen": "rewards/chosen"}
        logged |= {"pairs/reward_rejected": "rewards/rejected", "pairs/logprob_chosen": "logps/chosen"}
        logged |= {"pairs/logprob_rejected": "logps/rejected"}
        for name, key in logged.items():
            assert ours[2][name] == pytest.approx(theirs[2][key], rel=1e-5), name


def test_cdpo_is_their_aot_of_one_pair(torch, trl):
    """Their "sigmoid" has no label smoothing; "aot" has, and sorts within the batch, which one pair leaves as it is."""
    arrays, objective = random_arrays(), objectives.make("cdpo", beta=0.3, label_smoothing=0.2)
    for start in (0, 2, 4):
        pair = {key: x[start : start + 2] for key, x in arrays.items()}
        theirs = trl_dpo(torch, trl.dpo, "aot", pair, beta=0.3, label_smoothing=0.2)
        assert_same(our_loss(objective, pair), theirs)


def test_simpo(torch, trl):
    arrays = random_arrays()
    objective = objectives.make("simpo", beta=1.5, target_margin=0.6)
    logprobs = torch.tensor(arrays["logprobs"], requires_grad=True)
    mask = torch.tensor(arrays["mask"])
    means = (logprobs * mask).sum(1) / mask.sum(1)
    stand_in = types.SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=0.6,
        beta=1.5,
        label_smoothing=0.0,
        accelerator=types.SimpleNamespace(device="cpu"),
    )
    loss, chosen, rejected = trl.cpo.cpo_loss(stand_in, means[::2], means[1::2])
    loss.mean().backward()
    ours = our_loss(objective, arrays)
    assert_same(ours, (loss.mean().item(), logprobs.grad.numpy()))
    assert ours[2]["pairs/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_cpo_and_orpo(name, torch, trl):
    """Their losses of an answer's log-prob; the likelihood is added here as theirs is, answers of one length."""
    arrays = random_arrays()
    arrays["mask"] = np.arange(6) > np.zeros((6, 1))
    arrays["logprobs"] = -np.abs(np.random.default_rng(2).normal(size=(6, 6)))
    logprobs = torch.tensor(arrays["logprobs"], requires_grad=True)
    kept = logprobs[:, 1:]
    stand_in = types.SimpleNamespace(
        alpha=0.0, loss_type="sigmoid", beta=0.2, label_smoothing=0.0, accelerator=types.SimpleNamespace(device="cpu")
    )
    if name == "cpo":
        sums = kept.sum(1)
        loss = trl.cpo.cpo_loss(stand_in, sums[::2], sums[1::2])[0].mean()
    else:
        means = kept.mean(1)
        with float64_stays(torch):
            loss = -trl.orpo.odds_ratio_loss(stand_in, means[::2], means[1::2])[0].mean()
    loss = loss - 0.5 * kept[::2].mean()
    loss.backward()
    objective = objectives.make(name, beta=0.2, nll_coef=0.5)
    assert_same(our_loss(objective, arrays), (loss.item(), logprobs.grad.numpy()))


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto(kl, torch, trl):
    """Their loss with a given KL, which they estimate from answers to other prompts and never take below 0."""
    arrays = random_arrays()
    logprobs, mask = torch.tensor(arrays["logprobs"], requires_grad=True), torch.tensor(arrays["mask"]).long()
    zeros = torch.zeros((6, 5))
    outputs = types.SimpleNamespace(log_probs=(logprobs * mask)[:, 1:], entropy=zeros, mean_logits=zeros)
    model = types.SimpleNamespace(training=True)
    stand_in = types.SimpleNamespace(
        model=model,
        accelerator=types.SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        _compute_kl_logps=lambda model, batch: torch.full((6,), kl, dtype=torch.float64),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    inputs = {name: mask for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= {"label": torch.tensor([True, False] * 3), "ref_KL_logps": torch.zeros(6, dtype=torch.float64)}
    inputs["ref_logps"] = torch.tensor(arrays["ref_logprobs"]).sum(1)
    loss = trl.kto._compute_loss(stand_in, lambda **_: outputs, inputs, return_outputs=False)
    loss.backward()
    objective = objectives.make("kto", beta=0.3, reference_kl=kl, chosen_weight=1.5, rejected_weight=0.5)
    assert_same(our_loss(objective, arrays), (loss.item(), logprobs.grad.numpy()))


@contextlib.contextmanager
def float64_stays(torch):
    """ORPOTrainer rounds log-probs by `.float()`, which would hide the last digits of the comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)
        yield


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centre", [None, 0.01])
def test_reward_model(margin, centre, torch, trl):
    arrays, rng = random_arrays(), np.random.default_rng(1)
    scores = rng.normal(size=arrays["mask"].shape)
    last = np.asarray([5, 2, 1, 3, 4, 4])  # of random_arrays
    margins = rng.uniform(0, 2, 3)
    rewards = torch.tensor(scores[np.arange(6), last], requires_grad=True)
    halved = torch.cat([rewards[::2], rewards[1::2]])[:, None]
    stand_in = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(center_rewards_coefficient=centre),
        accelerator=types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(6, 6)} | ({"margin": torch.tensor(margins)} if margin else {})
    loss = trl.reward.compute_loss(stand_in, lambda **_: types.SimpleNamespace(logits=halved), inputs)
    loss.backward()
    given = {"mask": arrays["mask"], "scores": scores}
    if margin:
        given["margins"] = np.repeat(np.repeat(margins, 2)[:, None], 6, 1)
    ours = our_loss(objectives.make("reward_model", center_rewards_coefficient=centre or 0.0), given, "scores")
    gradient = np.zeros((6, 6))
    gradient[np.arange(6), last] = rewards.grad.numpy()
    assert_same(ours, (loss.item(), gradient))
    assert ours[2]["pairs/accuracy"] == pytest.approx(stand_in._metrics["train"]["accuracy"][0])
    assert ours[2]["pairs/margin"] == pytest.approx(stand_in._metrics["train"]["margin"][0], rel=1e-5)
