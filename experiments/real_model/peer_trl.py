"""TRL's GRPOTrainer on the prompts of our run: rewards, and CPU seconds of every step. It takes turns, see compare.py.

rollout = model.generate; train = training_step without generation and scoring, plus the optimizer's step.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_DISABLED": "true"}

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from experiments.performance.peer_trl import CpuSeconds, TakeTurns
from experiments.real_model.reward import reward_of


class Rewards:
    """`of` is a reward function of TRL's form; the mean of every step is kept."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def of(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        rewards = [reward_of(text, gold) for text, gold in zip(completions, columns["answer"], strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        return rewards


class Rewarded(TakeTurns):
    """Turns that also tell the step's mean reward."""

    def __init__(self, seconds: CpuSeconds, rewards: Rewards):
        super().__init__(seconds)
        self.rewards = rewards

    def figures(self) -> dict[str, float]:
        return {"reward": self.rewards.means[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="JSON of compare.py: the model's folder, prompts, settings")
    work = json.loads(Path(parser.parse_args().work).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if work["end_ids"] == [len(tokenizer)]:  # no token of the model may end an answer: GRPOTrainer asks the tokenizer
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    model.config.eos_token_id = model.generation_config.eos_token_id = work["end_ids"]
    seconds, rewards = CpuSeconds(), Rewards()
    seconds.wrap(model, "generate", "generate")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=work["rows"],
            gradient_accumulation_steps=1,
            num_generations=work["group_size"],
            max_completion_length=work["max_new_tokens"],
            mask_truncated_completions=False,
            shuffle_dataset=False,
            beta=0.0,
            num_iterations=1,
            loss_type="grpo",
            scale_rewards="group",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            epsilon=0.2,
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=work["b1"],
            adam_beta2=work["b2"],
            adam_epsilon=work["eps"],
            weight_decay=0.0,
            max_grad_norm=work["clip_norm"],
            max_steps=work["steps"],
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=work["seed"],
        )
        rank, alpha = work["lora"]  # on every matrix of a layer, as ours
        adapters = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear") if rank else None
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards.of,  # pyright: ignore[reportArgumentType]
            args=config,
            train_dataset=Dataset.from_dict({"prompt": work["prompts"], "answer": work["answers"]}),
            processing_class=tokenizer,
            peft_config=adapters,
        )
        seconds.wrap(trainer, "_generate_and_score_completions", "generate and score")
        seconds.wrap(trainer, "training_step", "step")
        trainer.create_optimizer()
        seconds.wrap(trainer.optimizer, "step", "optimizer")
        trainer.add_callback(Rewarded(seconds, rewards))
        trainer.train()


if __name__ == "__main__":
    main()
