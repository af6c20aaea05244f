"""The terms of one update written again in numpy, from the states that the model leaves after every token.

Only the forward is the model's own; the shift by one, the temperature, the entropy, the counts and every equation are
spelt out here, one answer a row.
"""

import functools

import jax
import numpy as np


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens, segment_ids, routing=None):
    return model.apply(params, tokens, segment_ids=segment_ids, routing=routing, router_logits=True)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def before(states):
    """What the state before a token says of it: the state after its predecessor, nothing for the first token."""
    return np.concatenate([np.zeros_like(states[:, :1]), states[:, :-1]], axis=1)


def scores(model, params, out, tokens, temperature):
    """(log p(token_t | before t), entropy of that distribution, V(state before t)), each [b t] in float64."""
    hidden = np.asarray(out.hidden, np.float64)
    log_p = log_softmax(before(hidden @ np.asarray(model.head(params), np.float64)) / temperature)
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    logprobs = np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0]
    if "value_head" not in params:
        return logprobs, entropy, None
    head = params["value_head"]
    return logprobs, entropy, before(hidden @ np.asarray(head["kernel"], np.float64) + float(head["bias"]))


def top_k(logits, k):
    return np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., :k]


def load_balance(logits, experts, mask):
    """Mean over layers and non-empty answers of E sum_e f_e p_e, f_e the share of (token, slot) pairs at expert e."""
    p, experts, found = np.exp(log_softmax(logits)), np.asarray(experts), []
    for row in np.flatnonzero(mask.any(1)):
        for layer in range(len(p)):
            used = experts[layer, row, mask[row]].ravel()
            share = np.bincount(used, minlength=p.shape[-1]) / len(used)
            found.append(p.shape[-1] * share @ p[layer, row, mask[row]].mean(0))
    return np.mean(found)


def router_shift(logits, old_logits, k, gamma_min):
    """RSPO's gamma [b t]: both softmaxes at the experts that the old router chose when this very token was fed."""
    experts = top_k(old_logits, k)
    new, old = (np.take_along_axis(log_softmax(x), experts, -1) for x in (logits, old_logits))
    return np.maximum(np.exp(-np.abs(new - old).mean((0, 3))), gamma_min)
