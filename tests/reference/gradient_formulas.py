"""Closed forms of d(objective)/d(log pi_t), derived by hand from the papers, as loops over answers and tokens.

Same answers as in objective_loops; every function returns one list of gradients an answer.
"""

import math

from tests.reference.objective_loops import contracted_range, cppo_keeps, dppo_keeps


def _ratios(a):
    return [math.exp(n - o) for n, o in zip(a["new"], a["old"], strict=True)]


def _clip_weight(ratio, advantage, low, high):
    """r where the unclipped branch is the smaller one, 0 where the constant one is."""
    beyond = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return 0.0 if beyond else ratio


def _weigh(answers, weight, scale):
    """scale(answer) A_t weight(answer)_t."""
    return [[scale(a) * adv * w for adv, w in zip(a["advantage"], weight(a), strict=True)] for a in answers]


def _per_answer(answers):
    return lambda a: 1 / len(answers) / len(a["new"])


def _per_token(answers):
    tokens = sum(len(a["new"]) for a in answers)
    return lambda a: 1 / tokens


def _clip(low, high):
    return lambda a: [
        _clip_weight(r * g, adv, low, high) for r, g, adv in zip(_ratios(a), a["gamma"], a["advantage"], strict=True)
    ]


def _without_router(answers):
    return [{**a, "gamma": [1.0] * len(a["new"])} for a in answers]


def reinforce(answers):
    return _weigh(answers, lambda a: [1.0] * len(a["new"]), lambda a: 1 / len(answers))


def grpo(answers):
    return _weigh(_without_router(answers), _clip(0.2, 0.2), _per_answer(answers))


def rloo(answers):
    """W_i A_i for every token of the answer, not divided by |y_i|, or 0 for all of them."""

    def weight(a):
        return [_clip_weight(math.prod(_ratios(a)), adv, 0.2, 0.2) for adv in a["advantage"]]

    return _weigh(answers, weight, lambda a: 1 / len(answers))


def ppo(answers):
    return _weigh(_without_router(answers), _clip(0.2, 0.2), _per_token(answers))


def dapo(answers):
    return _weigh(_without_router(answers), _clip(0.2, 0.28), _per_token(answers))


def dr_grpo(answers, max_length=8):
    return _weigh(_without_router(answers), _clip(0.2, 0.2), lambda a: 1 / len(answers) / max_length)


def rspo(answers):
    return _weigh(answers, _clip(0.2, 0.2), _per_answer(answers))


def gspo(answers):
    """s_i A_i / |y_i| for every token of the answer, or 0 for all of them (A constant along the answer)."""

    def weight(a):
        s = math.exp(sum(math.log(r) for r in _ratios(a)) / len(a["new"]))
        return [_clip_weight(s, adv, 3e-4, 4e-4) for adv in a["advantage"]]

    return _weigh(answers, weight, _per_answer(answers))


gspo_token = gspo


def luspo(answers):
    """s_i A_i for every token of the answer, not divided by |y_i|, or 0 for all of them."""
    return [[g * len(row) for g in row] for row in gspo(answers)]


def sapo(answers):
    def weight(a):
        out = []
        for r, adv in zip(_ratios(a), a["advantage"], strict=True):
            tau = 1.0 if adv > 0 else 1.05
            out.append(r / math.cosh(tau / 2 * (r - 1)) ** 2)
        return out

    return _weigh(answers, weight, _per_answer(answers))


def cispo(answers):
    return _weigh(answers, lambda a: [min(r, 5.0) for r in _ratios(a)], _per_token(answers))


def gmpo(answers):
    """A G / |y| where the token's own bound does not bind, G the bounded geometric mean."""
    out = []
    for a in answers:
        logs = [math.log(r) for r in _ratios(a)]
        beyond = [x > 0.4 if adv > 0 else x < -0.4 for x, adv in zip(logs, a["advantage"], strict=True)]
        bounded = [math.copysign(0.4, adv) if b else x for x, b, adv in zip(logs, beyond, a["advantage"], strict=True)]
        g = math.exp(sum(bounded) / len(bounded))
        out.append(
            [0.0 if b else adv * g / len(logs) / len(answers) for b, adv in zip(beyond, a["advantage"], strict=True)]
        )
    return out


def vespo(answers):
    def weight(a):
        w = math.prod(_ratios(a))
        return [
            w**c1 * math.exp(c2 * (1 - w))
            for c1, c2 in ((2.0, 3.0) if adv > 0 else (3.0, 2.0) for adv in a["advantage"])
        ]

    return _weigh(answers, weight, _per_token(answers))


def sat(answers):
    """As GRPO, with the range of each token contracted by the factor that the batch gives it."""
    out = []
    for a, row in zip(answers, contracted_range(answers), strict=True):
        weights = [
            _clip_weight(r, adv, 0.2 * c, 0.2 * c) for r, c, adv in zip(_ratios(a), row, a["advantage"], strict=True)
        ]
        out.append([adv * w / len(row) / len(answers) for w, adv in zip(weights, a["advantage"], strict=True)])
    return out


def dppo(answers):
    def weight(a):
        tokens = zip(_ratios(a), a["new"], a["old"], a["advantage"], strict=True)
        return [r if dppo_keeps(n, o, adv) else 0.0 for r, n, o, adv in tokens]

    return _weigh(answers, weight, _per_token(answers))


def cppo(answers):
    def weight(a):
        return [r * keep for r, keep in zip(_ratios(a), cppo_keeps(a | {"frozen": a["new"]}), strict=True)]

    return _weigh(answers, weight, _per_token(answers))


def a3po(answers):
    """The ratio to the sampler, 0 where its power 1 / age leaves the range."""

    def weight(a):
        tokens = zip(_ratios(a), a["age"], a["advantage"], strict=True)
        return [r if _clip_weight(r ** (1 / max(age, 1)), adv, 0.2, 0.2) else 0.0 for r, age, adv in tokens]

    return _weigh(answers, weight, _per_token(answers))


def opsm(answers):
    """As GRPO, without the wrong answers that the policy has left by more than 0.1 a token."""
    kept = [
        adv[0] > 0 or sum(math.log(1 / r) for r in _ratios(a)) / len(adv) <= 0.1
        for a in answers
        if (adv := a["advantage"])
    ]
    return [[g * keep for g in row] for row, keep in zip(grpo(answers), kept, strict=True)]


GRADIENTS = {
    "reinforce": reinforce, "rloo": rloo, "ppo": ppo, "grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo,
    "gspo_token": gspo_token, "sapo": sapo, "cispo": cispo, "gmpo": gmpo, "vespo": vespo, "rspo": rspo, "sat": sat,
    "dppo": dppo, "cppo": cppo, "opsm": opsm, "a3po": a3po, "luspo": luspo, "reinforce_pp": ppo,
    "reinforce_pp_baseline": ppo,
}  # fmt: skip
