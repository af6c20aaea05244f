"""Save the batches of TRL's GRPOTrainer (1.16) for `audit`: `capture(trainer, "captures")` before `trainer.train()`."""

import torch
from safetensors.torch import save_file

OURS = {"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs", "num_items_in_batch":
        "batch_tokens", "sampling_per_token_logps": "sampler_logprobs", "importance_sampling_ratio": "sampler_ratio",
        "advantages": "advantages", "row": "row"}  # fmt: skip


def capture(trainer, folder):
    kept, score, loss_of = {}, trainer._generate_and_score_completions, trainer._compute_loss

    def scored(prompts):
        kept["batch"] = batch = score(prompts)
        return batch | {"row": torch.arange(len(batch["advantages"])).to(batch["advantages"].device)}  # is shuffled too

    def saved(model, x):
        loss, (now, entropy, _), by = loss_of(model, x), kept["forward"], kept["rewards"]
        arrays = {ours: x[theirs] for theirs, ours in OURS.items() if x.get(theirs) is not None}
        arrays |= {"logprobs": now, "entropy": entropy, "mask": x["completion_mask"] * x.get("tool_mask", 1)}
        arrays |= {"batch_rewards_by_function": by, "batch_group": torch.arange(len(by)) // trainer.num_generations}
        arrays["batch_rewards"] = (by * trainer.reward_weights.to(by.device)).nansum(1)
        arrays |= {"batch_advantages": kept["batch"]["advantages"], "temperature": torch.tensor(trainer.temperature)}
        arrays["accumulation"] = torch.tensor(trainer.current_gradient_accumulation_steps)
        arrays |= {"reported_loss": loss, "reported_dlogprobs": torch.autograd.grad(loss, now, retain_graph=True)[0]}
        for name, part in (("tokens", "ids"), ("attention_mask", "mask")):
            arrays[name] = torch.cat([x[f"prompt_{part}"], x[f"completion_{part}"]], 1)
        arrays = {name: y.detach().cpu().contiguous().clone() for name, y in arrays.items()}
        save_file(arrays, f"{folder}/{trainer._step}.safetensors")
        return loss

    def keep(name, function):
        return lambda *args, **keywords: kept.update({name: function(*args, **keywords)}) or kept[name]

    trainer._calculate_rewards = keep("rewards", trainer._calculate_rewards)
    trainer._get_per_token_logps_and_entropies = keep("forward", trainer._get_per_token_logps_and_entropies)
    trainer._generate_and_score_completions, trainer._compute_loss = scored, saved
