"""The gate of a mixture of experts: which experts a token is sent to, with which weights, and how likely each is.

Everything that reads a router asks this value, so a router of another family is a class here and an entry in
`ModelConfig.gate`. It answers from logits; a choice that was made is never made again from them, since noise, a bias or
a replay may have decided it: records hold it (`Routing`).
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.ground.masking import segment_sum
from jaxrl_llm.models.routing import EXACT, Router, Routing, is_recorded, no_record, routing_dtype


@dataclasses.dataclass(frozen=True)
class Gate:
    """Scores, a choice and weights, three values that a family sets.

        l = x W                                      moved on purpose where `router` says so; logit_bias: x W + a
        s = softmax(l) or sigmoid(l)                 scores
        c = s + b                                    selection_bias: b decides the choice and nothing else
        c_i = -inf outside of the best groups        groups > 1: by the sum of their two largest c, or by the largest
        e = top_k(c), or the recorded experts
        g_i = scale s_i / sum_{j in e} s_j           normalise; of a softmax, the softmax over the chosen logits
        g_i = scale s_i                              otherwise

    Sources: softmax and renormalising Qwen3, arXiv 2505.09388; sigmoid, bias and groups DeepSeek-V3, arXiv 2412.19437,
    eqs. 12 to 16; groups by their largest score DeepSeek-V2, arXiv 2405.04434. A family with other scores overrides
    `log_scores` and `scores`, one with another choice `ranks`, one with more weights `shapes`.
    """

    num_experts: int
    num_chosen: int
    normalise: bool = True
    router: Router = EXACT
    scoring: str = "softmax"
    selection_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "top2"
    scale: float = 1.0
    logit_bias: bool = False

    def shapes(self, size: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Shape and logical axes of each weight, for states of this size. A vector starts at 0 and stays float32."""
        names = {"router_bias": self.selection_bias, "router_logit_bias": self.logit_bias}
        biases = {name: ((self.num_experts,), ("router",)) for name, has in names.items() if has}
        return {"router": ((size, self.num_experts), ("embed", "router")), **biases}

    def log_scores(self, logits: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        """Return logarithms of numbers that the scores are proportional to.

        Args:
          logits: of all e experts, float32.

        Returns:
          [*n e]. Value and gradient are finite for any finite logit, also where the score itself underflows. Their
          softmax is the probability of an expert, which `weights`, `logprob` and `balance` read.
        """
        return jax.nn.log_sigmoid(logits) if self.scoring == "sigmoid" else logits

    def scores(self, logits: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        """Return the scores of all e experts. They are in the order of the logits, on which `ranks` relies."""
        return jax.nn.sigmoid(logits) if self.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)

    def ranks(self, logits: Float[Array, "*n e"], weights: Mapping[str, Array]) -> Float[Array, "*n e"]:
        """Return the numbers whose k largest are chosen. No gradient reaches the bias.

        Args:
          logits: of all e experts. weights: by the names of `shapes`, of which `router_bias` [e] is read.

        Returns:
          [*n e]; -inf outside of the kept groups.
        """
        if not self.selection_bias and self.groups == 1:
            return logits  # in the order of the scores
        ranks = self.scores(logits)
        if self.selection_bias:
            ranks = ranks + jnp.broadcast_to(jax.lax.stop_gradient(weights["router_bias"]), ranks.shape)
        if self.groups == 1:
            return ranks
        grouped = ranks.reshape(*ranks.shape[:-1], self.groups, -1)
        scores = jnp.sum(jax.lax.top_k(grouped, 1 if self.group_score == "max" else 2)[0], axis=-1)
        best = jax.lax.top_k(scores, self.kept_groups)[1]
        kept = jnp.any(jax.nn.one_hot(best, self.groups, dtype=bool), axis=-2)
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranks.shape)

    def __call__(
        self,
        x: Float[Array, "*n d"],
        weights: Mapping[str, Array],
        replay: Routing | None = None,
        choice: Integer[Array, "*n k"] | None = None,
    ) -> tuple[Routing, Float[Array, "*n k"]]:
        """Return the routing of states and the weights of the experts used; choice: what the gate chose before."""
        logits = self.router.logits(x, weights["router"])
        if self.logit_bias:
            logits = logits + jnp.broadcast_to(weights["router_logit_bias"], logits.shape)
        return self.choose(logits, weights, replay, choice)

    def choose(
        self,
        logits: Float[Array, "*n e"],
        weights: Mapping[str, Array],
        replay: Routing | None = None,
        choice: Integer[Array, "*n k"] | None = None,
    ) -> tuple[Routing, Float[Array, "*n k"]]:
        """Return the routing and weights by one code path for routing and for replaying.

        A token that `replay` has a record of uses the recorded experts, and the recorded logits where there are some.
        The weights are gathered from the logits, never from probabilities zeroed outside the top k, so the router keeps
        its gradient under a replay of experts. Source: R3, arXiv 2510.11370, gate weights from the current router.
        """
        chosen = choice
        if chosen is None:
            chosen = jax.lax.top_k(self.ranks(self.router.choosing(logits), weights), self.num_chosen)[1]
        if replay is None:
            return Routing(chosen, logits), self.weights(logits, chosen)
        recorded = is_recorded(replay.experts)[..., None]
        used = jnp.where(recorded, replay.experts.astype(jnp.int32), chosen)
        scored = logits if replay.logits is None else jnp.where(recorded, replay.logits, logits)
        return Routing(used, logits, chosen), self.weights(scored, used)

    def weights(self, logits: Float[Array, "*n e"], experts: Integer[Array, "*n k"]) -> Float[Array, "*n k"]:
        """Weights of the outputs of given experts, from scores without the bias.

        Args:
          logits: of all e experts. experts: indices of k of them.

        Returns:
          k weights a token, in float32; they add up to `scale` where the gate normalises.
        """
        if self.normalise:
            weights = jax.nn.softmax(jnp.take_along_axis(self.log_scores(logits), experts, axis=-1), axis=-1)
        else:
            weights = jnp.take_along_axis(self.scores(logits), experts, axis=-1)
        return weights if self.scale == 1 else self.scale * weights

    def logprob(self, logits: Float[Array, "*n e"], recorded: Integer[Array, "*n k"]) -> Float[Array, "*n k"]:
        """Log-probabilities, among all experts, of the recorded ones; 0 where there is no record."""
        known = recorded != no_record(recorded)
        at = jnp.where(known, recorded, 0).astype(jnp.int32)
        logprobs = jax.nn.log_softmax(self.log_scores(logits), axis=-1)
        return jnp.where(known, jnp.take_along_axis(logprobs, at, axis=-1), 0)

    def balance(
        self,
        logits: Float[Array, "l b t e"],
        chosen: Integer[Array, "l b t k"],
        mask: Bool[Array, "b t"],
        sequence_ids: Integer[Array, "b t"],
        num_sequences: int,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Load-balance loss of each sequence, summed over sequences and averaged over layers: (total, count).

        E sum_e f_e p_e per sequence and layer, with f_e the share of the sequence's (token, slot) pairs sent to expert
        e and p_e its mean probability over the sequence's tokens; 1 when balanced. It is taken per sequence, not per
        batch, so that it does not depend on how the batch is cut. Source: Switch Transformer, arXiv 2101.03961, eq. 4;
        sequence-wise as in DeepSeek-V3, arXiv 2412.19437, eq. 17.

        Args:
          chosen: what the router chose, whatever was replayed.
          mask: the tokens that count. sequence_ids: of every token, below num_sequences.

        Returns:
          The sum over sequences, and the number of sequences with a token that counts.
        """
        num_experts, num_chosen = logits.shape[-1], chosen.shape[-1]
        tokens = segment_sum(mask.astype(jnp.float32), mask, sequence_ids, num_sequences)
        length = jnp.maximum(tokens, 1)

        @functools.partial(jax.vmap, in_axes=-1, out_axes=-1)
        def mean_per_sequence(x: Array) -> Array:
            return segment_sum(x, mask, sequence_ids, num_sequences) / length

        def of_layer(layer_logits: Array, layer_chosen: Array) -> Array:
            probs = jax.nn.softmax(self.log_scores(layer_logits), axis=-1)
            sent = jnp.sum(jax.nn.one_hot(layer_chosen, num_experts), axis=-2) / num_chosen
            return num_experts * jnp.sum(mean_per_sequence(sent) * mean_per_sequence(probs))

        return jnp.mean(jax.vmap(of_layer)(logits, chosen)), jnp.sum(tokens > 0).astype(jnp.float32)

    def blank(self, *shape: int, logits: bool = False, chosen: bool = False) -> Routing:
        """Return an empty record [*shape k], with logits [*shape e] and the router's own choice where asked."""
        dtype = routing_dtype(self.num_experts)
        experts = jnp.full((*shape, self.num_chosen), jnp.iinfo(dtype).max, dtype)
        scores = jnp.zeros((*shape, self.num_experts), jnp.float32) if logits else None
        return Routing(experts, scores, experts if chosen else None)
