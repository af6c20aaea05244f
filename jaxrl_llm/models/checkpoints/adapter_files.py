"""LoRA adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxrl_llm.models.checkpoints.tensor_names import stacked_arrays
from jaxrl_llm.models.checkpoints.tensor_parts import whole_name
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import Model

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapters(
    adapters: Any, config: LoRAConfig, model: Model, path: str | os.PathLike[str], *, base: str, revision: str | None
) -> None:
    """Write adapters so that PEFT reads them: W + (lora_alpha / r) B A with lora_A [r in] and lora_B [out r].

    Every expert has a pair of its own, under the name of its Linear in the published checkpoint; where transformers
    stacks experts (version 5), PEFT merges the pairs as it reads them.

    Args:
      adapters: of `init_adapters`; every array addressable by this process.
      base: path or hub name of the checkpoint under them, with its revision.

    Raises:
      FileExistsError: the folder holds a checkpoint or adapters already.
      ValueError: dense layers or a shared expert beside experts have adapters, which PEFT would leave out in silence;
        or the family keeps several matrices in one tensor.
    """
    folder = Path(path)
    if any(folder.glob("*.safetensors")) or (folder / ADAPTER_CONFIG).exists():
        raise FileExistsError(f"path={str(path)!r} holds a checkpoint already; give an empty folder")
    arrays, tensors, modules = stacked_arrays(model), {}, set()
    pairs: dict[Any, Any] = flatten_dict(adapters, is_leaf=lambda _, x: set(x) == {"a", "b"})
    beside = [(keys[0].endswith("dense") and keys[1] == "mlp") or keys[1:3] == ("mlp", "shared") for keys in pairs]
    if model.config.num_moe_layers and any(beside):
        raise ValueError(
            "PEFT (0.21, with transformers 5) takes gate_proj, up_proj and down_proj for those of experts and leaves "
            "out the adapters of the model's dense layers and shared expert; export the policy with all its weights"
        )
    named = {keys: arrays[jax.tree_util.keystr(tuple(map(jax.tree_util.DictKey, keys)))].names for keys in pairs}
    if together := sorted(whole_name(names.flat[0]) for names in named.values() if "[" in names.flat[0]):
        raise ValueError(
            f"{together[0]} holds several matrices, for which PEFT's adapters have no names; export the policy with "
            "all its weights"
        )
    for keys, pair in pairs.items():
        names = named[keys]
        for place in np.ndindex(names.shape):
            module = str(names[place]).removesuffix(".weight")
            modules.add(module.rpartition(".")[2])
            for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
                matrix = np.asarray(pair[ours][place])
                tensors[f"base_model.model.{module}.{theirs}.weight"] = np.ascontiguousarray(matrix.T)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written, indent=2) + "\n")  # last, as without it nothing loads
