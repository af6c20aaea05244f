"""Qwen3 / Qwen3-MoE one token and one head at a time, in float64.

Written from the equations (Qwen3, arXiv 2505.09388; RMSNorm, arXiv 1910.07467; RoPE, arXiv 2104.09864; SwiGLU, arXiv
2002.05202; top-k routing as in Qwen3-MoE's configuration) and from the names of the parameter tree; nothing is shared
with the package. A row may hold several segments: a token sees the earlier tokens of its own segment, and counts its
position from that segment's start.
"""

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def rope(x, position, theta):
    """Pair (i, i + d/2) of a head turns by position * theta^(-2i/d)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def mixture(x, mlp, config, given=None):
    """(output, experts in order of falling probability, router logits); `given` experts replace the router's choice."""
    logits = x @ mlp["router"]
    probs = softmax(logits)
    chosen = np.argsort(-probs, kind="stable")[: config.num_experts_per_tok] if given is None else given
    gates = probs[chosen]
    if config.norm_topk_prob:
        gates = gates / gates.sum()
    out = sum(
        g * swiglu(x, *(mlp[name][e] for name in ("gate", "up", "down"))) for g, e in zip(gates, chosen, strict=True)
    )
    return out, chosen, logits


def attention(x, p, config, past):
    """One token; `past` holds (key, value) [kv head][d] of the tokens it sees and gains its own."""
    d, eps, position = config.head_dim, config.rms_norm_eps, len(past)
    heads = lambda w: (x @ w).reshape(-1, d)  # noqa: E731
    keys = [rope(rms_norm(k, p["k_norm"]["scale"], eps), position, config.rope_theta) for k in heads(p["k"])]
    past.append((keys, list(heads(p["v"]))))
    outs = []
    for h, q in enumerate(heads(p["q"])):
        q = rope(rms_norm(q, p["q_norm"]["scale"], eps), position, config.rope_theta)
        kv = h // (config.num_attention_heads // config.num_key_value_heads)
        weights = softmax(np.array([q @ key[kv] / np.sqrt(d) for key, _ in past]))
        outs.append(sum(w * value[kv] for w, (_, value) in zip(weights, past, strict=True)))
    return np.concatenate(outs) @ p["o"]


def transformer(params, config, tokens, segment_ids=None, given=None):
    """(logits [b t v], experts [l b t k], router logits [l b t e]); zeros where a token is padding."""
    params = _float64(params)
    tokens = np.asarray(tokens)
    segment_ids = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids)
    kinds = [
        "moe"
        if config.num_experts and (i + 1) % config.decoder_sparse_step == 0 and i not in config.mlp_only_layers
        else "dense"
        for i in range(config.num_hidden_layers)
    ]
    shape = (kinds.count("moe"), *tokens.shape)
    logits = np.zeros((*tokens.shape, config.vocab_size))
    experts = np.zeros((*shape, config.num_experts_per_tok), int)
    router = np.zeros((*shape, config.num_experts))
    ends = params["ends"]
    head = ends["embedding"].T if config.tie_word_embeddings else ends["head"]
    for b, t in np.ndindex(tokens.shape):
        if segment_ids[b, t] == 0:
            continue
        if t == 0 or segment_ids[b, t] != segment_ids[b, t - 1]:
            pasts = [[] for _ in kinds]
        x = ends["embedding"][tokens[b, t]]
        for layer, kind in enumerate(kinds):
            index = kinds[:layer].count(kind)
            p = _layer(params[kind], index)
            x = x + attention(
                rms_norm(x, p["attention_norm"]["scale"], config.rms_norm_eps), p["attention"], config, pasts[layer]
            )
            y = rms_norm(x, p["mlp_norm"]["scale"], config.rms_norm_eps)
            if kind == "dense":
                x = x + swiglu(y, *(p["mlp"][name] for name in ("gate", "up", "down")))
            else:
                out, experts[index, b, t], router[index, b, t] = mixture(
                    y, p["mlp"], config, None if given is None else given[index, b, t]
                )
                x = x + out
        logits[b, t] = rms_norm(x, ends["norm"]["scale"], config.rms_norm_eps) @ head
    return logits, experts, router


def _float64(tree):
    return {k: _float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def _layer(tree, index):
    return {k: _layer(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}
