"""A mixture of experts out of a dense model: every expert begins as a copy of its layer's feed-forward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Params
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.models.architecture import ModelConfig

_ROUTER_STD = 0.02  # arXiv 2212.05055, appendix A.1.1


def upcycled(
    config: ModelConfig, params: Params, *, experts: int, chosen: int, redraw: float = 0.0, seed: int = 0
) -> tuple[ModelConfig, dict[str, Any]]:
    """The config and the parameters of the mixture, on one device.

    Each of the `experts` of a layer is a copy of the layer's SwiGLU, of which a token uses `chosen`, and the router is
    drawn from N(0, 0.02^2). The gates of a token sum to 1, so that the mixture of plain copies computes what the dense
    model does. With `redraw` each copy draws that share of its hidden units anew, others in every expert: the columns
    of gate and up and the rows of down, from normal numbers of the matrix's own mean and deviation.

    Args:
      params: of `Model(config)`, stacked; every array addressable by this process.
      redraw: 0 to 1.

    Raises:
      ValueError: the model has experts already, or a number is out of range.

    Source: Sparse Upcycling, arXiv 2212.05055; the re-drawn share: Drop-Upcycling, arXiv 2502.19261.
    """
    if config.num_moe_layers:
        raise ValueError(f"num_experts={config.num_experts}: the checkpoint is a mixture already; give a dense one")
    in_range("redraw", redraw, least=0, most=1)
    made = dataclasses.replace(
        config,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=(),
    )
    if not made.num_moe_layers:
        raise ValueError(f"experts={experts} makes no mixture; give at least 1")
    rng, dense = np.random.default_rng(seed), jax.device_get(params["dense"])
    layers, width, units = dense["mlp"]["gate"].shape
    copies = {name: np.repeat(dense["mlp"][name][:, None], experts, axis=1) for name in ("gate", "up", "down")}
    for layer in range(layers):
        for expert in range(experts):
            drawn = rng.permutation(units)[: round(redraw * units)]
            for name, place in (("gate", np.s_[:, drawn]), ("up", np.s_[:, drawn]), ("down", np.s_[drawn])):
                whole = dense["mlp"][name][layer].astype(np.float32)
                one = copies[name][layer, expert]
                one[place] = rng.normal(whole.mean(), whole.std(), one[place].shape)
    router = rng.normal(0, _ROUTER_STD, (layers, width, experts)).astype(dense["mlp"]["gate"].dtype)
    kept = {name: part for name, part in params.items() if name != "dense"}
    return made, jax.tree.map(jnp.asarray, {**kept, "moe": {**dense, "mlp": {"router": router, **copies}}})
