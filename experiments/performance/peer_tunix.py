"""Tunix's GRPOLearner on a workload. Runs in Tunix's own environment and reports CPU seconds of every step.

rollout = RLCluster.generate; train = RLCluster.update_actor, waited for.
"""

# pyright: reportMissingImports=false

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from experiments.performance import workload as workloads
from experiments.performance.turns import Turns
from experiments.performance.workload import Workload

_MANY = 1000  # steps; the driver ends the process


def make_cluster(w: Workload) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = qwen3.ModelConfig(
        num_layers=w.L,
        vocab_size=w.V,
        embed_dim=w.d,
        hidden_dim=w.ff,
        num_heads=w.H,
        head_dim=w.hd,
        num_kv_heads=w.KV,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=False,
        num_experts=w.E or None,
        num_experts_per_tok=w.k if w.E else None,
    )
    with mesh:
        actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-4),
        eval_every_n_steps=10**6,
        max_steps=_MANY,
        mini_batch_size=w.NP,
        train_micro_batch_size=w.NP,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=w.C,
        max_prompt_length=w.P,
        kv_cache_size=w.P + w.C,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    cluster = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=rollout,
    )
    return rl_cluster.RLCluster(
        actor=actor, reference=None, tokenizer=workloads.make_tokenizer(w.V), cluster_config=cluster
    )


class TakeTurns:
    """A turn lasts from before generation to after the update of the actor."""

    def __init__(self, cluster: Any):
        self.turns, self.began, self.rollout = Turns(), 0.0, 0.0
        generate, update = cluster.generate, cluster.update_actor

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            self.turns.begin()
            self.began, start = time.perf_counter(), time.process_time()
            result = generate(*args, **kwargs)
            self.rollout = time.process_time() - start
            return result

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = update(*args, **kwargs)
            jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
            self.turns.end(
                rollout_cpu_s=self.rollout,
                train_cpu_s=time.process_time() - start,
                wall_s=time.perf_counter() - self.began,
            )
            return result

        cluster.generate, cluster.update_actor = timed_generate, timed_update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    w = workloads.load(parser.parse_args().workload)
    cluster = make_cluster(w)
    TakeTurns(cluster)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=w.G, num_iterations=1, beta=0.0, epsilon=0.2, loss_algo="grpo"),
        reward_fns=lambda prompts, completions, **_: [workloads.reward_of(text) for text in completions],
    )

    def batches() -> Iterator[dict[str, Any]]:
        for seed in range(_MANY):
            yield {"prompts": np.array(w.prompts(w.NP, seed=seed))}

    learner.train(batches())


if __name__ == "__main__":
    main()
