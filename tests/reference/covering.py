"""A covering array: few combinations in which every two values of every two factors meet."""

import itertools


def pairs_of(combination):
    """Every two (factor, value) of a combination."""
    return set(itertools.combinations(enumerate(combination), 2))


def pairwise(candidates):
    """Combinations that hold every pair of the candidates, each the one with most that is new."""
    candidates = list(candidates)
    missing, chosen = set().union(*map(pairs_of, candidates)), []
    while missing:
        chosen.append(max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen
