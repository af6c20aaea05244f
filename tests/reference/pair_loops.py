"""Losses on pairs as slow loops over answers, written from the papers.

A pair is {"chosen": answer, "rejected": answer}; an answer has the lists "new" and "ref" (log-probs of its tokens) and
"reward" (the head's output at its last token).
"""

import math


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_ratio(answer):
    return sum(n - r for n, r in zip(answer["new"], answer["ref"], strict=True))


def preferred(z):
    """-log of the probability that the chosen answer wins."""
    return softplus(-z)


def reward_model(pair, margin=0.0, centre=0.0):
    chosen, rejected = pair["chosen"]["reward"], pair["rejected"]["reward"]
    return preferred(chosen - rejected - margin) + centre * (chosen + rejected) ** 2


def dpo(pair, beta=0.1):
    return preferred(beta * (log_ratio(pair["chosen"]) - log_ratio(pair["rejected"])))


def cdpo(pair, beta=0.1, eps=0.1):
    z = beta * (log_ratio(pair["chosen"]) - log_ratio(pair["rejected"]))
    return (1 - eps) * preferred(z) + eps * preferred(-z)


def ipo(pair, beta=0.1):
    chosen, rejected = (log_ratio(pair[side]) / len(pair[side]["new"]) for side in ("chosen", "rejected"))
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo(pair, beta=2.0, gamma=1.0):
    chosen, rejected = (sum(pair[side]["new"]) / len(pair[side]["new"]) for side in ("chosen", "rejected"))
    return preferred(beta * chosen - beta * rejected - gamma)


def likelihood(answer):
    return sum(answer["new"]) / len(answer["new"])


def rewards(pair, beta):
    return [beta * log_ratio(pair[side]) for side in ("chosen", "rejected")]


def sigma(x):
    return math.exp(-softplus(-x))


def cpo(pair, beta=0.1, nll=1.0):
    chosen, rejected = (sum(pair[side]["new"]) for side in ("chosen", "rejected"))
    return preferred(beta * (chosen - rejected)) - nll * likelihood(pair["chosen"])


def orpo(pair, beta=0.1, nll=1.0):
    """Odds of the geometric mean probability of an answer's tokens, as the paper writes them."""
    p = [math.exp(likelihood(pair[side])) for side in ("chosen", "rejected")]
    odds = [x / (1 - x) for x in p]
    return beta * preferred(math.log(odds[0] / odds[1])) - nll * likelihood(pair["chosen"])


def exo(pair, beta=0.1, eps=1e-3):
    chosen, rejected = rewards(pair, beta)
    weights = [math.exp(chosen), math.exp(rejected)]
    return sum(w / sum(weights) * math.log(w / sum(weights) / p) for w, p in zip(weights, (1 - eps, eps), strict=True))


def nca(pair, beta=0.1):
    chosen, rejected = rewards(pair, beta)
    return preferred(chosen) + (preferred(-chosen) + preferred(-rejected)) / 2


def apo_zero(pair, beta=0.1):
    chosen, rejected = rewards(pair, beta)
    return 1 - sigma(chosen) + sigma(rejected)


def apo_down(pair, beta=0.1):
    chosen, rejected = rewards(pair, beta)
    return sigma(chosen) + 1 - sigma(chosen - rejected)


def kto(pair, beta=0.1, kl=0.0, weights=(1.0, 1.0)):
    chosen, rejected = (beta * log_ratio(pair[side]) for side in ("chosen", "rejected"))
    return (weights[0] * (1 - sigma(chosen - beta * kl)) + weights[1] * (1 - sigma(beta * kl - rejected))) / 2


LOSSES = {f.__name__: f for f in (reward_model, dpo, cdpo, ipo, simpo, cpo, orpo, exo, nca, apo_zero, apo_down, kto)}


def loss(name, pairs, **settings):
    return sum(LOSSES[name](pair, **settings) for pair in pairs) / len(pairs)
