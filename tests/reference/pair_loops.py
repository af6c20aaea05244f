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


LOSSES = {f.__name__: f for f in (reward_model, dpo, cdpo, ipo, simpo)}


def loss(name, pairs, **settings):
    return sum(LOSSES[name](pair, **settings) for pair in pairs) / len(pairs)
