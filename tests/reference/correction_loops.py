"""Corrections as slow loops over answers and tokens; log_k is a list of lists, log(pi_old / mu) of every answer."""

import math

import numpy as np


def _kept(answers, keep):
    """A weight for every token from a truth for every answer."""
    return [[float(keep(a))] * len(a) for a in answers]


def clamped(answers, cap=5.0, floor=0.5):
    return [[min(max(math.exp(x), floor), cap) for x in a] for a in answers]


def sequence_tis(answers, cap=2.0):
    return [[min(math.prod(math.exp(x) for x in a), cap)] * len(a) for a in answers]


def sequence_decoupled(answers, cap=3.0):
    products = [math.prod(math.exp(x) for x in a) for a in answers]
    return [[w if w <= cap else 0.0] * len(a) for w, a in zip(products, answers, strict=True)]


def veto(answers, cap=1e4):
    return _kept(answers, lambda a: all(1 / cap <= math.exp(x) <= cap for x in a))


SIZES = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
LEVELS = {"seq_sum": sum, "seq_mean": lambda xs: sum(xs) / len(xs), "seq_max": max}


def rejected(name, answers, cap):
    """verl's `rollout_rs`: k1 between -log cap and log cap, the others at most cap."""
    level, _, estimator = name.rpartition("_")
    bound = math.log(cap) if estimator == "k1" else cap

    def inside(x):
        return -bound <= x <= bound if estimator == "k1" else x <= bound

    if level == "token":
        return [[float(inside(SIZES[estimator](x))) for x in a] for a in answers]
    return _kept(answers, lambda a: inside(LEVELS[level]([SIZES[estimator](x) for x in a])))


def m2po(answers, cap=0.04):
    """Drop the token with the largest square until the mean of the others is below the cap, or one is left."""
    left = sorted((x * x for a in answers for x in a), reverse=True)
    while len(left) > 1 and sum(left) / len(left) >= cap:
        left = left[1:]
    return [[float(x * x <= left[0]) for x in a] for a in answers]


def high_entropy(entropies, share=0.2):
    limit = np.quantile([x for a in entropies for x in a], 1 - share)
    return [[float(x >= limit) for x in a] for a in entropies]
