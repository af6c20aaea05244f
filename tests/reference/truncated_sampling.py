"""The distribution that temperature, top-k and top-p leave, one row and one step at a time."""

import numpy as np


def truncated(logits, temperature, top_k, top_p, min_p=0.0):
    """Probabilities over the whole vocabulary, float64; ties go to the lower index."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    p[p < min_p * p.max()] = 0
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    mass = 0.0
    for i in order:
        if mass >= top_p:
            p[i] = 0
        mass += p[i]
    return p / p.sum()
