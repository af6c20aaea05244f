"""Names of metrics in words: the one table of names for columns, titles and axes."""

NAMES = {
    "reward/mean": "mean reward",
    "eval/greedy": "held-out accuracy, greedy",
    "eval/pass_at_1": "held-out accuracy, sampled",
    "eval/pass_at_k": "held-out accuracy, best of k",
    "eval/greedy_reward": "mean held-out reward, greedy",
    "eval/reward": "mean held-out reward, sampled",
    "eval/pair_accuracy": "held-out pairs ordered right",
    "clip/low + clip/high": "tokens clipped",
    "entropy": "entropy (nats per token)",
    "grad/norm": "gradient norm",
    "value/explained_variance": "variance that the critic explains",
    "rollout/length_mean": "answer length (tokens)",
    "rollout/tokens_per_s": "rollout tokens per second",
    "ratio/token_var": "variance of the token ratio",
    "ratio/sequence_var": "variance of the sequence ratio",
    "ratio/ess": "effective sample size",
    "ratio/token_p99": "99th percentile of the token ratio",
    "kl/old": "KL to the old policy",
    "kl/sampler": "KL between sampler and trainer",
    "kl/ref": "KL to the reference (nats per token)",
    "kl/ref_answer": "KL to the start (nats per answer)",
    "reward/reward_model": "score of the reward model",
    "routing/share_of_variance": "share of routing, parameters first",
    "routing/share_of_variance_shapley": "share of routing, mean of both orders",
    "routing/log_ratio_var": "variance of the log-ratio",
    "routing/parameter_var": "variance of the parameter part",
    "routing/routing_var": "variance of the routing part",
    "routing/flipped_tokens": "tokens after a changed expert",
    "routing/flips_old_current": "experts changed, old to current",
    "routing/flips_sampler_old": "experts changed, sampler to old",
    "routing/flips_numeric": "experts changed at equal parameters",
    "routing/flips_fresh": "experts changed, without replay",
    "gradient_weight/positive": "gradient weight, advantage above 0",
    "gradient_weight/negative": "gradient weight, advantage below 0",
    "gate/mean": "mean gate of SAPO",
    "pairs/accuracy": "training pairs ordered right",
    "eval/brier": "Brier score, held-out pairs (a coin: 1/4)",
    "eval/pair_margin": "reward margin, held-out pairs",
}


def in_words(key: str, k: object = "k") -> str:
    """The name of a metric, with the number of samples of "best of k"; of one without a name, its key in words.

    `eval/pass_at_4`, as `evaluate` computes it, is named like the others.
    """
    counted, _, samples = key.rpartition("_at_")
    if counted == "eval/pass" and samples not in ("1", "k"):
        key, k = "eval/pass_at_k", samples
    words = NAMES.get(key) or key.partition("/")[2].replace("_", " ") or key
    return words.removesuffix("k") + str(k) if key == "eval/pass_at_k" else words
