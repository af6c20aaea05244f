"""Advantages as slow loops, written from the papers."""

import itertools
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


def groups_of(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


def centred(rewards, size):
    return [r - sum(rows) / size for rows in groups_of(rewards, size) for r in rows]


def pass_at_k(right, size, k):
    """Every set of k answers earns 1 if one of them is right; an answer has the mean advantage of its sets."""
    out = []
    for rows in groups_of(right, size):
        sets = list(itertools.combinations(range(size), k))
        earned = [max(rows[i] for i in chosen) for chosen in sets]
        average = sum(earned) / len(sets)
        sigma = math.sqrt(sum((e - average) ** 2 for e in earned) / len(sets))
        for i in range(size):
            own = [
                (e - average) / sigma if sigma else 0.0 for e, chosen in zip(earned, sets, strict=True) if i in chosen
            ]
            out.append(sum(own) / len(own))
    return out


def length_weighted(rewards, lengths, size):
    out = []
    for rows, sizes in zip(groups_of(rewards, size), groups_of(lengths, size), strict=True):
        baseline = sum(r * n for r, n in zip(rows, sizes, strict=True)) / sum(sizes)
        out += [0.0 if min(rows) == max(rows) else r - baseline for r in rows]
    return out


def optimal_token(rewards, logprobs, squares, lengths, size):
    """[b t] of R - b_t, b_t the mean of rewards weighted by W_t, over the group's answers that have a token at t."""
    out = [[0.0] * len(row) for row in logprobs]
    for group in groups_of(range(len(rewards)), size):
        for t in range(len(logprobs[0])):
            going = [i for i in group if t < lengths[i]]
            energy = {i: sum(1 - 2 * math.exp(logprobs[i][u]) + squares[i][u] for u in range(t + 1)) for i in going}
            for i in going:
                out[i][t] = rewards[i] - sum(energy[j] * rewards[j] for j in going) / sum(energy.values())
    return out


def prompt_mean(advantages, lengths, size):
    """Each answer's advantage over the tokens of its prompt, times the number of the prompt's answers."""
    rows = zip(groups_of(advantages, size), groups_of(lengths, size), strict=True)
    return [a * size / sum(tokens) for group, tokens in rows for a in group]


def to_go(reward, gaps, gamma, beta):
    """One answer: rho_t = -beta (log pi_old - log pi_ref)_t, the reward on the last; discounted sums from t on."""
    rho = [-beta * gap for gap in gaps]
    rho[-1] += reward
    return [sum(gamma ** (u - t) * rho[u] for u in range(t, len(rho))) for t in range(len(rho))]


def whitened(answers):
    """(x - mean) / (std + 1e-8) over all tokens of all answers, divisor n - 1."""
    tokens = [x for answer in answers for x in answer]
    average = sum(tokens) / len(tokens)
    sigma = math.sqrt(sum((x - average) ** 2 for x in tokens) / (len(tokens) - 1))
    return [[(x - average) / (sigma + 1e-8) for x in answer] for answer in answers]
