"""The demo: the tiny MoE learns to sort ten digits, by GRPO and by GSPO from the same warm start.

Command:  make demo, which is
          python -m jaxrl_llm.main --config configs/demo.py:grpo --workdir runs/demo/grpo
          python -m jaxrl_llm.main --config configs/demo.py:gspo --workdir runs/demo/gspo
          python -m jaxrl_llm.report runs/demo
Minutes:  at most 10 on two CPU cores, from nothing
Expect:   held-out accuracy rises clearly above that of the warm start for both
"""

import importlib

from ml_collections import ConfigDict


def get_config(variant: str = "gspo") -> ConfigDict:
    name, _, size = variant.partition("_")
    if name not in ("grpo", "gspo") or size not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; this config has grpo, gspo, grpo_smoke and gspo_smoke")
    config = importlib.import_module(f"configs.{name}").get_config(size)
    if not size:
        config.steps = 60
    return config
