"""Thirty and more faults, planted into a healthy captured batch: the arrays that a faulty stack would have saved.

Loss and gradient of the faulty stack are worked out here, in numpy, in closed form, from the papers' equations.
"""

import numpy as np

FAULTS = {}  # name of the plant: (name that the audit gives it, base, function of the arrays)


def plant(named, base="grpo-1"):
    def add(function):
        FAULTS[function.__name__] = (named, base, function)
        return function

    return add


def loss(a, *, mask=None, advantages=None, old=None, ratio=None, low=0.2, high=0.2, side="min", weights="sequence",
         divisor=None, beta=0.0, kl="k3", factor=1.0, weight=1.0):  # fmt: skip
    """The arrays with loss and gradient of a clipped policy term and a KL; `weights`: sequence or token."""
    now = a["logprobs"].astype(np.float64)
    old = now if old is None and "old_logprobs" not in a else (a["old_logprobs"] if old is None else old)
    mask = (a["mask"] > 0) if mask is None else mask
    A = (a["advantages"] if advantages is None else advantages).astype(np.float64)[:, None]
    d = now - old
    r, dr = (np.exp(d), np.exp(d)) if ratio is None else ratio(d)
    cut = np.clip(r, 1 - low, 1 + high)
    plain, bounded = r * A, cut * A
    choose = {"min": np.minimum, "max": np.maximum, "both": lambda x, y: y, "none": lambda x, y: x}[side]
    value = choose(plain, bounded)
    live = (value == plain) if side in ("min", "max") else (r == cut) if side == "both" else np.ones_like(r, bool)
    gradient = np.where(live, dr * A, 0)
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    row = mask / n / len(mask) if weights == "sequence" else mask / mask.sum()
    if divisor is not None:
        row = mask / divisor
    term, dterm = -weight * value, -weight * gradient
    if beta:
        q = a["ref_logprobs"] - now
        estimates = {"k3": (np.exp(q) - q - 1, 1 - np.exp(q)), "k1": (-q, np.ones_like(q)),
                     "inverse": (np.exp(-q) + q - 1, np.exp(-q) - 1)}  # fmt: skip
        term, dterm = term + beta * estimates[kl][0], dterm + beta * estimates[kl][1]
    told = {"reported_loss": np.float32(factor * (row * term).sum()),
            "reported_dlogprobs": np.where(mask, factor * row * dterm, 0).astype(np.float32)}  # fmt: skip
    return a | told


def _moved(x, by):
    out = np.roll(x, by, 1)
    out[:, 0 if by > 0 else -1] = 0
    return out


def _again(a, **arrays):
    return loss(a | arrays)


# What the stored arrays show.


@plant("mask_shifted")
def mask_one_place_late(a):
    return _again(a, mask=_moved(a["mask"], 1))


@plant("eos_left_out")
def eos_not_counted(a):
    last = np.cumsum(a["mask"][:, ::-1], 1)[:, ::-1] == 1
    mask = np.where(last, 0, a["mask"])
    return _again(a, mask=mask, batch_tokens=np.float32(mask.sum()))


@plant("first_token_left_out")
def first_token_not_counted(a):
    mask = np.where(np.arange(a["mask"].shape[1]) == 0, 0, a["mask"])
    return _again(a, mask=mask, batch_tokens=np.float32(mask.sum()))


@plant("padding_in_mask")
def padding_counted_by_the_mask(a):
    mask = np.ones_like(a["mask"])
    return _again(a, mask=mask, batch_tokens=np.float32(mask.size))


@plant("old_logprobs_shifted")
def old_one_place_late(a):
    return _again(a | {"sampler_logprobs": a["old_logprobs"]}, old_logprobs=_moved(a["old_logprobs"], 1))


@plant("ref_logprobs_shifted", "grpo_kl_plain-1")
def ref_one_place_late(a):
    return loss(a | {"ref_logprobs": _moved(a["ref_logprobs"], 1)}, beta=0.04)


@plant("sampler_logprobs_shifted")
def sampler_one_place_late(a):
    return a | {"sampler_logprobs": _moved(a["old_logprobs"], 1)}


@plant("old_equals_now")
def old_overwritten(a):
    return _again(a | {"sampler_logprobs": a["old_logprobs"]}, old_logprobs=a["logprobs"])


@plant("temperature_missing")
def temperature_only_in_the_sampler(a):
    return a | {
        "sampler_logprobs": np.where(a["mask"], np.minimum(a["old_logprobs"] / 0.7 + 0.9, -0.01), 0).astype(np.float32)
    }


@plant("sampler_apart")
def sampler_of_other_weights(a):
    noise = np.random.default_rng(0).normal(0, 0.3, a["mask"].shape)
    return a | {"sampler_logprobs": (a["old_logprobs"] - np.abs(noise)).astype(np.float32)}


@plant("first_ratio_not_one")
def dropout_in_training(a):
    return a | {"update": np.int32(0)}


@plant("logprobs_above_zero")
def probabilities_above_one(a):
    return _again(a, logprobs=a["logprobs"] + 4 * (a["mask"] > 0))


@plant("std_without_bessel")
def deviation_with_ddof_0(a):
    groups = a["batch_rewards"].reshape(-1, 4)
    made = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)).ravel()
    return _again(a, batch_advantages=made, advantages=made[a["row"]])


@plant("groups_mixed")
def groups_of_every_other_answer(a):
    groups = a["batch_rewards"].reshape(4, -1).T
    made = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).T.ravel()
    return _again(a, batch_advantages=made, advantages=made[a["row"]])


@plant("groups_mixed")
def answers_of_two_prompts_in_a_group(a):
    group = a["group"].copy()
    one, other = np.flatnonzero(group == group[0])[0], np.flatnonzero(group != group[0])[0]
    group[[one, other]] = group[[other, one]]
    return a | {"group": group}


@plant("advantages_all_zero")
def answers_all_alike(a):
    zero = np.zeros_like(a["batch_rewards"])
    whole = {name: x for name, x in a.items() if "rewards_by_function" not in name}
    return _again(
        whole, batch_advantages=zero, advantages=zero[a["row"]], batch_rewards=zero + 1, rewards=a["rewards"] * 0 + 1
    )


@plant("advantages_not_of_these_rewards")
def baseline_of_another_batch(a):
    made = a["batch_rewards"] ** 3 - 0.3
    return _again(a, batch_advantages=made, advantages=made[a["row"]])


@plant("advantages_of_other_rows")
def rows_not_shuffled(a):
    return _again(a, advantages=a["batch_advantages"][: len(a["row"])])


@plant("rewards_are_no_sum", "gdpo-1")
def reward_function_forgotten(a):
    other = a["batch_rewards_by_function"] ** 2 + np.random.default_rng(0).normal(0, 1, (8, 2)).astype(np.float32)
    return a | {"batch_rewards_by_function": other}


@plant("batch_tokens_wrong")
def tokens_of_another_batch(a):
    return a | {"batch_tokens": np.float32(a["mask"].sum() - 3)}


@plant("experts_repeated")
def padding_rows_use_an_expert_twice(a):
    experts = np.stack([np.zeros(a["mask"].shape), np.zeros(a["mask"].shape)], -1)[None].astype(np.int32)
    return a | {"experts": experts}


@plant("experts_out_of_range")
def expert_that_is_not_there(a):
    experts = np.broadcast_to(np.asarray([0, 4], np.int32), (1, *a["mask"].shape, 2)).copy()
    return a | {"experts": experts, "router_logits": np.ones((1, *a["mask"].shape, 4), np.float32)}


@plant("sampled_token_not_kept")
def top_p_set_of_another_token(a):
    sampled = a["tokens"][:, -a["mask"].shape[1] :]
    return a | {"kept_tokens": np.stack([sampled + 1, sampled + 2], -1).astype(np.int32)}


@plant("reported_dlogprobs_not_finite")
def gradient_overflowed(a):
    gradient = a["reported_dlogprobs"].copy()
    gradient[0, 0] = np.inf
    return a | {"reported_dlogprobs": gradient}


STORED = tuple(FAULTS)

# What only loss and gradient show.


@plant("kl_subtracted", "grpo_kl_plain-1")
def kl_with_the_wrong_sign(a):
    return loss(a, beta=-0.04)


@plant("kl_missing", "grpo_kl_plain-1")
def kl_forgotten(a):
    return loss(a)


@plant("kl_estimator_doubtful", "grpo_kl_plain-1")
def k1_as_a_loss(a):
    return loss(a, beta=0.04, kl="k1")


@plant("kl_estimator_doubtful", "grpo_kl_plain-1")
def k3_of_the_inverse(a):
    return loss(a, beta=0.04, kl="inverse")


@plant("clip_sides_swapped")
def clip_sides_exchanged(a):
    return loss(a, low=0.28, high=0.2)


@plant("no_clip")
def clip_forgotten(a):
    return loss(a, side="none")


@plant("max_instead_of_min")
def max_of_both(a):
    return loss(a, side="max")


@plant("clipped_on_both_sides")
def ratio_clamped(a):
    return loss(a, side="both")


@plant("ratio_inverted")
def ratio_upside_down(a):
    return loss(a, ratio=lambda d: (np.exp(-d), -np.exp(-d)))


@plant("old_ignored")
def ratio_of_one(a):
    return loss(a, old=a["logprobs"])


@plant("advantages_negated")
def advantage_with_the_wrong_sign(a):
    return loss(a, advantages=-a["advantages"])


@plant("loss_negated")
def policy_term_with_the_wrong_sign(a):
    return loss(a, factor=-1.0)


@plant("eos_left_out")
def loss_with_the_mask_one_place_early(a):
    mask = _moved(a["mask"], -1) > 0
    return loss(a, mask=mask)


@plant("padding_counted")
def loss_with_padding(a):
    return loss(a, mask=np.ones_like(a["mask"], bool))


@plant("eos_left_out_of_the_count")
def divisor_without_eos(a):
    return loss(a, divisor=float(a["mask"].sum() - len(a["mask"])))


@plant("prompt_counted")
def divisor_with_prompts(a):
    return loss(a, divisor=float(a["attention_mask"].sum()))


@plant("loss_scaled")
def accumulation_done_twice(a):
    return loss(a, factor=0.5)


@plant("rewards_as_advantages")
def no_baseline(a):
    return loss(a, advantages=a["rewards"])


@plant("advantages_whitened_again")
def whitened_twice(a):
    x = a["advantages"] + np.arange(8) / 8  # so that they are not whitened already
    a = a | {"advantages": x.astype(np.float32), "batch_advantages": np.zeros(0, np.float32)}
    return loss(
        {k: v for k, v in a.items() if not k.startswith("batch_")}, advantages=(x - x.mean()) / (x.std(ddof=1) + 1e-8)
    )


@plant("advantages_of_other_rows")
def advantages_of_the_neighbour(a):
    return loss(a, advantages=np.roll(a["advantages"], 1))


@plant("truncated_answers_left_out")
def truncated_answers_dropped(a):
    return loss(a, mask=(a["mask"] > 0) & (a["mask"][:, -1:] == 0))


@plant("sampler_ratio_inverted")
def correction_upside_down(a):
    k = np.exp(np.random.default_rng(0).normal(0, 0.2, a["mask"].shape)).astype(np.float32)
    return loss(a | {"sampler_ratio": k}, weight=1 / k)


@plant("sampler_ratio_unused")
def correction_forgotten(a):
    k = np.exp(np.random.default_rng(0).normal(0, 0.2, a["mask"].shape)).astype(np.float32)
    return loss(a | {"sampler_ratio": k})


@plant("loss_and_gradient_apart")
def loss_before_accumulation(a):
    told = loss(a)
    return told | {"reported_loss": told["reported_loss"] * 2}
