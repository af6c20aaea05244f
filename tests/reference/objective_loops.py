"""Every recipe as slow loops over answers and tokens, written from the papers: no jax, no masks, no shared code.

An answer is a dict of lists: `new`, `old` (log-probabilities of its tokens), `advantage` (one per token) and, where a
recipe reads it, `gamma` (RSPO's router weight). `frozen` repeats `new` for every factor that the paper detaches, so
that a finite difference in `new` alone gives the gradient the paper means. All functions return what is maximised.

`@golden` enters a loop under its name, with the loss of one batch and its derivation by hand. The batch has answers of
2 and 1 tokens, with advantages +1 and -1. Probabilities are 0.6 0.2 | 0.5 under the new policy and 0.4 0.4 | 0.25 under
the old one, so ratios are 1.5 0.5 | 2. J is what is maximised, the loss is -J.
"""

import math

import numpy as np

GOLDEN_BATCH = {
    "new": [[0.6, 0.2], [0.5, 1.0]],
    "old": [[0.4, 0.4], [0.25, 1.0]],
    "mask": [[True, True], [True, False]],
    "advantages": [1.0, -1.0],
    "router_shift": [[0.1, 10.0], [0.0, 0.0]],
    "age": [[2, 2], [4, 0]],
}
GOLDEN, RECIPES = {}, {}


def golden(loss, derivation):
    def enter(loop):
        GOLDEN[loop.__name__], RECIPES[loop.__name__] = (loss, derivation), loop
        return loop

    return enter


def clipped(ratio, advantage, low, high):
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def mean(xs):
    return sum(xs) / len(xs)


def mean_of_means(answers, per_answer):
    """1/n sum_i 1/|y_i| sum_t: GRPO eq. 3."""
    return mean([mean(per_answer(a)) for a in answers])


def mean_of_sums(answers, per_answer, length=1.0):
    return mean([sum(per_answer(a)) / length for a in answers])


def mean_of_tokens(answers, per_answer):
    """1/(sum_i |y_i|) sum_i sum_t: DAPO eq. 8."""
    return sum(sum(per_answer(a)) for a in answers) / sum(len(a["new"]) for a in answers)


def token_clip(low, high):
    def per_answer(a):
        return [
            clipped(math.exp(n - o), adv, low, high)
            for n, o, adv in zip(a["new"], a["old"], a["advantage"], strict=True)
        ]

    return per_answer


@golden(0.7135582, "J = (log 0.6 + log 0.2 - log 0.5) / 2 = (-0.5108256 - 1.6094379 + 0.6931472) / 2")
def reinforce(answers):
    return mean_of_sums(answers, lambda a: [adv * n for n, adv in zip(a["new"], a["advantage"], strict=True)])


@golden(0.625, "W = 1.5 * 0.5 = 0.75 and 2: min(0.75, 0.8) = 0.75 and min(-2, -1.2) = -2; J = (0.75 - 2) / 2")
def rloo(answers):
    """RLOO eq. 7 off the policy: the importance weight of the whole answer, clipped once an answer."""
    weights = [math.exp(sum(n - o for n, o in zip(a["new"], a["old"], strict=True))) for a in answers]
    return mean([clipped(w, a["advantage"][0], 0.2, 0.2) for w, a in zip(weights, answers, strict=True)])


@golden(0.1, "J = (1.2 + 0.5 - 2) / 3; the value term is tested apart")
def ppo(answers):
    return mean_of_tokens(answers, token_clip(0.2, 0.2))


@golden(0.575, "A = 1: min(1.5, 1.2) = 1.2 and 0.5, mean 0.85; A = -1: min(-2, -1.2) = -2; J = (0.85 - 2) / 2")
def grpo(answers):
    return mean_of_means(answers, token_clip(0.2, 0.2))


@golden(0.0375, "max_length 4: J = (1.2 + 0.5 - 2) / (2 * 4)")
def dr_grpo(answers, max_length=8):
    return mean_of_sums(answers, token_clip(0.2, 0.2), max_length)


@golden(0.07333333, "J = (1.28 + 0.5 - 2) / 3")
def dapo(answers):
    return mean_of_tokens(answers, token_clip(0.2, 0.28))


@golden(0.5669873, "s = sqrt(1.5 * 0.5) = 0.8660254 and 2, neither is clipped on its bad side; J = (0.8660254 - 2) / 2")
def gspo(answers):
    """The paper's sequence-level form: one clipped term an answer."""
    total = 0.0
    for a in answers:
        s = math.exp(sum(n - o for n, o in zip(a["new"], a["old"], strict=True)) / len(a["new"]))
        total += mean([clipped(s, adv, 3e-4, 4e-4) for adv in a["advantage"]])
    return total / len(answers)


@golden(0.5669873, "the same value as gspo")
def gspo_token(answers):
    total = 0.0
    for a in answers:
        s = math.exp(sum(f - o for f, o in zip(a["frozen"], a["old"], strict=True)) / len(a["new"]))
        terms = [
            clipped(s * math.exp(n) / math.exp(f), adv, 3e-4, 4e-4)
            for n, f, adv in zip(a["new"], a["frozen"], a["advantage"], strict=True)
        ]
        total += mean(terms)
    return total / len(answers)


@golden(
    0.4109998,
    "4 sigmoid(0.5) + 4 sigmoid(-0.5) = 4, mean 2; 4 / 1.05 sigmoid(1.05) = 2.8219996; J = (2 - 2.8219996) / 2",
)
def sapo(answers):
    def per_answer(a):
        out = []
        for n, o, adv in zip(a["new"], a["old"], a["advantage"], strict=True):
            tau = 1.0 if adv > 0 else 1.05
            out.append(4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))) * adv)
        return out

    return mean_of_means(answers, per_answer)


@golden(0.0615543, "J = (1.5 log 0.6 + 0.5 log 0.2 - 2 log 0.5) / 3 = (-0.7662384 - 0.8047190 + 1.3862944) / 3")
def cispo(answers):
    def per_answer(a):
        rows = zip(a["new"], a["frozen"], a["old"], a["advantage"], strict=True)
        return [min(math.exp(f - o), 5.0) * adv * n for n, f, o, adv in rows]

    return mean_of_tokens(answers, per_answer)


@golden(0.5681693, "exp((0.4 + log 0.5) / 2) = 0.8636614 and 2; J = (0.8636614 - 2) / 2")
def gmpo(answers):
    """(prod_t of one-sidedly bounded ratios)^(1/|y|) A; the advantage is constant along an answer."""
    total = 0.0
    for a in answers:
        product = 1.0
        for n, o, adv in zip(a["new"], a["old"], a["advantage"], strict=True):
            ratio = math.exp(n - o)
            product *= min(ratio, math.exp(0.4)) if adv > 0 else max(ratio, math.exp(-0.4))
        total += product ** (1 / len(a["new"])) * mean(a["advantage"])
    return total / len(answers)


@golden(
    0.5914594,
    "W = 0.75: 0.75^2 e^0.75 = 1.1908125; W = 2: 2^3 e^-2 = 1.0826823; J = (1.1908125 log 0.12 - "
    "1.0826823 log 0.5) / 3",
)
def vespo(answers):
    def per_answer(a):
        weight = math.prod(math.exp(f - o) for f, o in zip(a["frozen"], a["old"], strict=True))
        out = []
        for n, adv in zip(a["new"], a["advantage"], strict=True):
            c1, c2 = (2.0, 3.0) if adv > 0 else (3.0, 2.0)
            out.append(weight**c1 * math.exp(c2 * (1 - weight)) * adv * n)
        return out

    return mean_of_tokens(answers, per_answer)


@golden(0.6, "gamma = e^-0.1, 0.8 (the floor), 1: ratios 1.357, 0.4, 2; J = ((1.2 + 0.4) / 2 - 2) / 2")
def rspo(answers):
    def per_answer(a):
        rows = zip(a["new"], a["old"], a["gamma"], a["advantage"], strict=True)
        return [clipped(math.exp(n - o) * g, adv, 0.2, 0.2) for n, o, g, adv in rows]

    return mean_of_means(answers, per_answer)


def contracted_range(answers, tail=0.9):
    """SAT's factor of the clip range for every token of every answer, by numpy's quantile of |log r| of the batch."""
    sizes = [[abs(f - o) for f, o in zip(a["frozen"], a["old"], strict=True)] for a in answers]
    q = float(np.quantile([size for row in sizes for size in row], tail))
    return [[1 / (1 + (size / q) ** 2) if size > q > 0 else 1.0 for size in row] for row in sizes]


@golden(
    0.575,
    "as grpo: beyond the quantile (0.25: 0.5493) are ratios 0.5 with A > 0 and 2 with A < 0, on their way "
    "back to 1, which no bound hinders",
)
def sat(answers):
    total = 0.0
    for a, row in zip(answers, contracted_range(answers), strict=True):
        tokens = zip(a["new"], a["old"], row, a["advantage"], strict=True)
        total += mean([clipped(math.exp(n - o), adv, 0.2 * c, 0.2 * c) for n, o, c, adv in tokens])
    return total / len(answers)


def dppo_keeps(new, old, advantage, threshold=0.2):
    """Whether a token stays in DPPO's gradient, by the total variation of its two probabilities."""
    step = math.exp(new) - math.exp(old)
    return step <= threshold if advantage > 0 else step >= -threshold


@golden(
    0.5,
    "thresholds 0.15: 0.4 to 0.6 with A > 0 is masked; 0.4 to 0.2 with A > 0 and 0.25 to 0.5 with A < 0 "
    "are ways back; J = (0 + 0.5 - 2) / 3",
)
def dppo(answers):
    def per_answer(a):
        rows = zip(a["new"], a["frozen"], a["old"], a["advantage"], strict=True)
        return [math.exp(n - o) * adv * dppo_keeps(f, o, adv) for n, f, o, adv in rows]

    return mean_of_tokens(answers, per_answer)


@golden(
    0.4944606,
    "(log r)^2 = 0.164402, 0.480453 | 0.480453; J = (log 0.6 + log 0.2 - log 0.5 - 0.05 * 1.125308) / 3 = "
    "(-1.4271163 - 0.0562654) / 3",
)
def dro(answers, coef=0.1):
    def per_answer(a):
        rows = zip(a["new"], a["old"], a["advantage"], strict=True)
        return [adv * n - coef * (n - o) ** 2 / 2 for n, o, adv in rows]

    return mean_of_tokens(answers, per_answer)


def cppo_keeps(a, delta=0.15, budget=0.015, floor=0.8):
    """CPPO's algorithm 1 for one answer: whether each token stays in the gradient."""
    spent, weights, out = 0.0, 0.0, []
    for t, (new, old, advantage) in enumerate(zip(a["frozen"], a["old"], a["advantage"], strict=True)):
        weight = 1 - (1 - floor) / max(len(a["new"]) - 1, 1) * t
        moved = weight * abs(math.exp(new) - math.exp(old))
        limit = min(delta, delta + budget * weights - spent)
        out.append(advantage * (math.exp(new - old) - 1) <= 0 or moved <= limit)
        spent, weights = spent + moved, weights + weight
    return out


@golden(0.5, "as dppo at 0.15: only 0.4 to 0.6 with A > 0 moves away, and its answer begins with it")
def cppo(answers):
    def per_answer(a):
        rows = zip(a["new"], a["old"], a["advantage"], cppo_keeps(a), strict=True)
        return [math.exp(n - o) * adv * keep for n, o, adv, keep in rows]

    return mean_of_tokens(answers, per_answer)


@golden(
    0.010102051,
    "ages 2 2 | 4: a = 1/2 1/2 | 1/4, r = sqrt 1.5, sqrt 0.5 | 2^(1/4), k = sqrt 1.5, sqrt 0.5 | 2^(3/4); the first is "
    "clipped at 1.2, elsewhere k r is the ratio to the sampler; J = (1.2 sqrt 1.5 + 0.5 - 2) / 3",
)
def a3po(answers):
    def per_answer(a):
        out = []
        for n, f, o, age, adv in zip(a["new"], a["frozen"], a["old"], a["age"], a["advantage"], strict=True):
            alpha = 1 if age == 0 else 1 / age
            proximal = alpha * o + (1 - alpha) * f
            out.append(math.exp(proximal - o) * clipped(math.exp(n - proximal), adv, 0.2, 0.2))
        return out

    return mean_of_tokens(answers, per_answer)


@golden(0.575, "as grpo: the wrong answer has become likelier, and only left wrong answers are masked")
def opsm(answers):
    def per_answer(a):
        left = mean([o - n for n, o in zip(a["frozen"], a["old"], strict=True)])
        return [
            0.0 if adv < 0 and left > 0.1 else j for j, adv in zip(token_clip(0.2, 0.2)(a), a["advantage"], strict=True)
        ]

    return mean_of_means(answers, per_answer)


@golden(0.1339746, "the terms of gspo, once a token: J = (2 * 0.8660254 - 2) / 2")
def luspo(answers):
    """GSPO's term of an answer times its length."""
    total = 0.0
    for a in answers:
        s = math.exp(sum(n - o for n, o in zip(a["new"], a["old"], strict=True)) / len(a["new"]))
        total += len(a["new"]) * clipped(s, a["advantage"][0], 3e-4, 4e-4)
    return total / len(answers)


@golden(0.1, "as ppo, from another advantage")
def reinforce_pp(answers):
    return ppo(answers)


@golden(0.1, "as ppo, from another advantage")
def reinforce_pp_baseline(answers):
    return ppo(answers)


def covariances(answers):
    """((log pi - mean) (A - mean), old log-prob, new ratio, advantage) of every token, answer by answer."""
    tokens = [
        (f, o, math.exp(f - o), adv)
        for a in answers
        for f, o, adv in zip(a["frozen"], a["old"], a["advantage"], strict=True)
    ]
    log_mean, mean_advantage = mean([token[0] for token in tokens]), mean([token[3] for token in tokens])
    return [((f - log_mean) * (adv - mean_advantage), o, r, adv) for f, o, r, adv in tokens]


def first_places(sizes, share):
    """Places of the share of tokens with the largest sizes, at least one; None has no size."""
    ranked = sorted((place for place, size in enumerate(sizes) if size is not None), key=lambda place: -sizes[place])
    return set(ranked[: max(1, int(share * len(sizes)))])


@golden(
    -0.5666667,
    "covariances 0.2846 -0.4478 | -0.3262, from -0.4 up: of 0.2846 and -0.3262 the first is clipped already, so the "
    "second is held back; J = (1.2 + 0.5 - 0) / 3",
)
def clip_cov(answers, low=1.0, high=5.0):
    draws = []
    for size, old, ratio, adv in covariances(answers):
        inside = not (adv > 0 and ratio > 1.2) and not (adv < 0 and ratio < 0.8)
        draws.append(abs(old) * 4096 % 1 if low < size < high and inside else None)
    held, terms = first_places(draws, 2e-4), [j for a in answers for j in token_clip(0.2, 0.2)(a)]
    return mean([0.0 if place in held else term for place, term in enumerate(terms)])


@golden(0.1351550, "the first covariance, 0.2846, is the largest: J = (1.5 - log 1.5 + 0.5 - 2) / 3")
def kl_cov(answers):
    held = first_places([size for size, *_ in covariances(answers)], 2e-4)
    steps = [(n - o, adv) for a in answers for n, o, adv in zip(a["new"], a["old"], a["advantage"], strict=True)]
    return mean([math.exp(x) * adv - (abs(x) if place in held else 0) for place, (x, adv) in enumerate(steps)])
