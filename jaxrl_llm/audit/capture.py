"""A captured batch: its schema, and the file that holds one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.ground.ranges import suggestion

Fault = tuple[str, str]  # name and evidence

# name: (axes, meaning). b answers of the micro-batch, t places of an answer, s = places of prompt and answer, n answers
# of the generation batch, f reward functions, l layers, k experts of a token. A star: any axes.
SCHEMA = {
    "logprobs": ("b t", "current log-probs of the answer's tokens, after the temperature"),
    "mask": ("b t", "answer tokens that count in the loss, EOS included"),
    "advantages": ("b | b t", "as the loss used them"),
    "reported_loss": ("", "loss of this micro-batch, divided by the accumulation steps if the stack does so"),
    "reported_dlogprobs": ("b t", "gradient of `reported_loss` by `logprobs`"),
    "old_logprobs": ("b t", "log-probs before the first update; absent: those of now, so that every ratio is 1"),
    "ref_logprobs": ("b t", "log-probs of the reference model, if a KL to it is in the loss"),
    "sampler_logprobs": ("b t", "log-probs that the rollout engine recorded"),
    "sampler_ratio": ("b t", "weights for the mismatch of sampler and trainer, as the loss used them"),
    "entropy": ("b t", "entropy of the distribution that each token was scored under"),
    "tokens": ("b s", "prompt, padded on the left, then the answer in the last t columns, padded on the right"),
    "attention_mask": ("b s", "tokens that the model attended to"),
    "rewards": ("b", "weighted sum of the reward functions"),
    "rewards_by_function": ("b f", "reward of each function"),
    "group": ("b", "number of the answer's prompt"),
    "row": ("b", "place of the answer in the generation batch"),
    "batch_rewards": ("n", "rewards of the generation batch, from which advantages were made; groups are contiguous"),
    "batch_rewards_by_function": ("n f", "reward of each function in the generation batch"),
    "batch_group": ("n", "number of each answer's prompt in the generation batch"),
    "batch_advantages": ("n", "advantages of the generation batch"),
    "batch_tokens": ("", "tokens of the generation batch that count in the loss"),
    "accumulation": ("", "micro-batches of an optimizer step; absent: those of the generation batch"),
    "temperature": ("", "temperature that the answers were sampled at"),
    "update": ("", "optimizer steps since the answers were sampled: 0 for the first pass"),
    "token_rewards": ("b t", "rewards by token that GAE sums, with a KL inside where there is one"),
    "values": ("b t", "the critic's values of the state before each token, now"),
    "old_values": ("b t", "the same before the first update, from which advantages were made"),
    "returns": ("b t", "what the critic learns"),
    "reported_value_loss": ("", "value loss of this micro-batch, with its coefficient"),
    "experts": ("l b * k", "experts that each token was sent to, -1 where there is no record"),
    "router_logits": ("l b * e", "scores of all experts, of which `experts` are the highest"),
    "kept_tokens": (
        "b t v",
        "token ids that truncated sampling could have drawn at each place, -1 where there are none",
    ),
}
REQUIRED = ("logprobs", "mask", "advantages", "reported_loss")
METRIC = "metric."  # a prefix: what the stack logged for this micro-batch


@dataclasses.dataclass(frozen=True)
class Capture:
    """The arrays of a captured batch, numbers as float64, and the names that the schema does not have."""

    arrays: Mapping[str, np.ndarray]
    unknown: tuple[str, ...] = ()
    replayed: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)  # gradients of the KL, as they are shared

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The array, or the default."""
        return self.arrays.get(name, default)

    def has(self, *names: str) -> bool:
        """True if all of these arrays are there."""
        return all(name in self.arrays for name in names)

    @property
    def mask(self) -> np.ndarray:
        return self["mask"]

    @property
    def old(self) -> np.ndarray:
        """The old log-probs; those of now where the stack passed none."""
        return self.get("old_logprobs", self["logprobs"])

    @property
    def advantages(self) -> np.ndarray:
        """The advantages by token, [b t]."""
        return np.broadcast_to(self["advantages"].reshape(len(self.mask), -1), self.mask.shape)


def read(path: Path) -> Capture:
    """Read a capture from a safetensors file.

    Raises:
      ValueError: the file is no safetensors file, lacks an array, or has one of a wrong shape or kind.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise ValueError(f"{path} is no file; give the safetensors file of a captured batch (docs/audit.md)")
    try:
        return checked(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); save the arrays of docs/audit.md") from error


def checked(arrays: Mapping[str, Any]) -> Capture:
    """A capture of these arrays; what an answer has in its generation batch is read there where it is not beside it.

    Raises:
      ValueError: an array is missing, or has a wrong shape or kind.
    """
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        close = suggestion(missing[0], arrays)
        raise ValueError(f"the capture has no {missing[0]}{close}; docs/audit.md lists the arrays and two hooks")
    out: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for name in (*(name for name in SCHEMA if name in arrays), *(name for name in arrays if name.startswith(METRIC))):
        x, axes = np.asarray(arrays[name]), SCHEMA.get(name, ("",))[0]
        _check(name, x, axes, sizes)
        x = x > 0 if name in ("mask", "attention_mask") else x.astype(int if x.dtype.kind in "iub" else float)
        out[name] = x if axes else x.reshape(())  # a stack may store a scalar as [1]
    for name in ("rewards", "rewards_by_function", "group"):
        whole = out.get(f"batch_{name}")
        if name not in out and whole is not None and "row" in out and set(out["row"]) <= set(range(len(whole))):
            out[name] = whole[out["row"]]
    if not out["mask"].any():
        raise ValueError("mask has no token that counts; capture a batch with at least one")
    if not out.get("temperature", np.ones(())) > 0:
        raise ValueError(f"temperature is {out['temperature']}; capture answers that were drawn at one above 0")
    return Capture(out, tuple(sorted(set(arrays) - set(out))))


def _check(name: str, x: np.ndarray, axes: str, sizes: dict[str, int]) -> None:
    """ValueError unless the array fits the schema and the other arrays; `sizes` gathers their axes."""
    whole = name in ("tokens", "group", "row", "batch_group", "experts", "kept_tokens")
    if whole and x.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {x.dtype}; give integers")
    if "*" in axes and x.ndim >= 3:
        return
    for letters in (choice.split() for choice in axes.split(" | ")):
        own = dict(zip(letters, x.shape, strict=False))
        if (len(letters) == x.ndim or (not letters and x.size == 1)) and own.items() <= (own | sizes).items():
            sizes.update(own)
            return
    given = ", ".join(f"{letter} = {n}" for letter, n in sizes.items())
    raise ValueError(f"{name} has shape {list(x.shape)}, and is to be [{axes}] with {given or 'one shape'}")
