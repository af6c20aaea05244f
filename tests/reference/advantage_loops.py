"""Advantages as slow loops, written from the papers."""

import math


def group(rewards, size, std="sample", baseline="mean", eps=1e-6):
    """(R_i - b_i) / (sigma + eps), group by group; a group of equal rewards gives zeros."""
    everything = sum(rewards) / len(rewards)
    batch = math.sqrt(sum((r - everything) ** 2 for r in rewards) / max(len(rewards) - 1, 1))
    out = []
    for start in range(0, len(rewards), size):
        rows = rewards[start : start + size]
        centre = sum(rows) / size
        squares = sum((r - centre) ** 2 for r in rows)
        sigma = {
            "sample": math.sqrt(squares / max(size - 1, 1)),
            "population": math.sqrt(squares / size),
            "batch": batch,
            "none": None,
        }[std]
        for i, r in enumerate(rows):
            others = rows[:i] + rows[i + 1 :]
            b = {"mean": centre, "leave_one_out": sum(others) / len(others) if others else r, "none": 0.0}[baseline]
            alike = min(rows) == max(rows) and baseline != "none"
            out.append(0.0 if alike else (r - b) / (1.0 if sigma is None else sigma + eps))
    return out


def gae(rewards, values, gamma, lam, bootstrap):
    """One answer without padding, from the definition: A_t = sum_l (gamma lambda)^l delta_{t+l}."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    advantages = [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
