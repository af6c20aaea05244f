"""Save the batches of a policy loss of verl (0.9) for `audit`: `capture("captures", "vanilla")` in the actor's process.

The KL and the entropy bonus, which verl adds outside of this function, are not in them.
"""

import itertools

import torch
from safetensors.torch import save_file
from verl.trainer.ppo import core_algos


def capture(folder, name="vanilla"):
    compute, number = core_algos.POLICY_LOSS_REGISTRY[name], itertools.count()

    def captured(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs):
        with torch.enable_grad():
            now = log_prob.detach().requires_grad_()
            loss = compute(old_log_prob, now, advantages, response_mask, *args, **kwargs)[0]
            gradient = torch.autograd.grad(loss, now)[0]
        arrays = {"logprobs": now, "old_logprobs": old_log_prob, "advantages": advantages, "mask": response_mask}
        arrays |= {"reported_loss": loss, "reported_dlogprobs": gradient}
        if kwargs.get("rollout_is_weights") is not None:
            arrays["sampler_ratio"] = kwargs["rollout_is_weights"]
        arrays = {key: x.detach().cpu().contiguous() for key, x in arrays.items()}
        save_file(arrays, f"{folder}/{next(number)}.safetensors")
        return compute(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)

    core_algos.POLICY_LOSS_REGISTRY[name] = captured
