"""TRL's GRPOTrainer on a workload. Runs in TRL's own environment and reports CPU seconds of every step.

rollout = model.generate; train = training_step without generation and scoring, plus the optimizer's step.
"""

# pyright: reportMissingImports=false

import argparse
import os
import tempfile
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_DISABLED": "true"}

import torch
from datasets import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.performance import workload as workloads
from experiments.performance.turns import Turns
from experiments.performance.workload import Workload

_MANY = 1000  # steps; the driver ends the process


def make_model(w: Workload) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=w.V,
        hidden_size=w.d,
        intermediate_size=w.ff,
        num_hidden_layers=w.L,
        num_attention_heads=w.H,
        num_key_value_heads=w.KV,
        head_dim=w.hd,  # pyright: ignore[reportCallIssue]: a field of the model, not of the class's signature
        num_experts=w.E,
        num_experts_per_tok=w.k,
        moe_intermediate_size=w.ff,
        norm_topk_prob=True,
        max_position_embeddings=max(512, w.P + w.C),
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=w.V,  # outside the vocabulary: never sampled
        bos_token_id=None,
        router_aux_loss_coef=0.0,
        output_router_logits=False,
    )
    return Qwen3MoeForCausalLM(config).float()


class CpuSeconds:
    """Process seconds spent in wrapped methods, by name."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.of[name] = self.of.get(name, 0.0) + time.process_time() - start

        setattr(owner, method, timed)


class TakeTurns(TrainerCallback):
    """One turn a step, from before its generation to after its optimizer step."""

    def __init__(self, seconds: CpuSeconds):
        self.seconds, self.turns, self.began = seconds, Turns(), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turns.begin()
        self.seconds.of.clear()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        of = self.seconds.of
        self.turns.end(
            rollout_cpu_s=of["generate"],
            score_cpu_s=of["generate and score"] - of["generate"],
            train_cpu_s=of["step"] - of["generate and score"] + of["optimizer"],
            wall_s=time.perf_counter() - self.began,
            **self.figures(),
        )

    def figures(self) -> dict[str, float]:
        """Further figures of a step."""
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    w = workloads.load(parser.parse_args().workload)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, seconds = make_model(w), CpuSeconds()
    seconds.wrap(model, "generate", "generate")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=w.rows,
            gradient_accumulation_steps=1,
            num_generations=w.G,
            max_completion_length=w.C,
            beta=0.0,
            num_iterations=1,
            loss_type="grpo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            epsilon=0.2,
            learning_rate=1e-4,
            max_steps=_MANY,
            max_grad_norm=1e9,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            router_aux_loss_coef=0.0,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda prompts, completions, **_: [workloads.reward_of(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": w.prompts(w.NP * 32)}),
            processing_class=workloads.make_tokenizer(w.V),
        )
        seconds.wrap(trainer, "_generate_and_score_completions", "generate and score")
        seconds.wrap(trainer, "training_step", "step")
        trainer.create_optimizer()
        seconds.wrap(trainer.optimizer, "step", "optimizer")
        trainer.add_callback(TakeTurns(seconds))
        trainer.train()


if __name__ == "__main__":
    main()
