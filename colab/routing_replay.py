# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does the ratio swing because experts change?
#
# Three short runs of one tiny mixture-of-experts policy from the same warm start: GRPO, GRPO with routing replay (R2)
# and GSPO. Then pictures: which layers change their experts, how much of the ratio's variance comes from that, and how
# much gradient each objective lets through. A few minutes on two CPU cores.
#
# The first cell installs the package where it is missing (Colab with a CPU, GPU or TPU runtime; choose the runtime
# first). If Colab then asks to restart the runtime, do so and run the cells again from the top.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Where to clone from when the package is neither here nor installed: the address that [project.urls] of pyproject.toml
# has, which is none yet.
REPOSITORY = os.environ.get("JAXRL_LLM_REPOSITORY", "")
here = [folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "configs" / "base.py").exists()]
CHECKOUT = here[0] if here else Path("jaxrl_llm_checkout").resolve()
if here or importlib.util.find_spec("jaxrl_llm") is None:
    if not CHECKOUT.exists() and not REPOSITORY:
        raise RuntimeError(
            "jaxrl_llm is not installed, and has no public address to clone from ([project.urls] of its "
            "pyproject.toml): install its wheel, or set JAXRL_LLM_REPOSITORY to the address of a repository"
        )
    if not CHECKOUT.exists():
        subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, str(CHECKOUT)], check=True)
    sys.path.insert(0, str(CHECKOUT))
    needed = ("array_record", "jaxtyping", "ml_collections", "optax", "orbax", "tensorboardX")
    if any(importlib.util.find_spec(package) is None for package in needed):
        tpu = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
        extras = ["colab", *(["gpu"] if shutil.which("nvidia-smi") else ["tpu"] if tpu else [])]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"{CHECKOUT}[{','.join(extras)}]"], check=True)

# %%
# %matplotlib inline
import tempfile

import jax
from IPython.display import display

from jaxrl_llm.config import loading
from jaxrl_llm.config.start_up import start_jax
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.report import figures, tables
from jaxrl_llm.report.page import text_table
from jaxrl_llm.report.read import load
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.run.trainer import train

start_jax()  # the compilation cache: run these cells a second time and nothing is compiled again
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
VARIANT = os.environ.get("NOTEBOOK_VARIANT", "")  # "smoke": the smallest form
DIR = Path(os.environ.get("NOTEBOOK_DIR") or tempfile.mkdtemp())
ARMS = {
    "GRPO": {"objective.name": "grpo"},
    "GRPO+R2": {"objective.name": "grpo", "replay.mode": "R2"},
    "GSPO": {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
}

# %% [markdown]
# Each arm is the same configuration with two or three fields changed. Every run leaves a DIR with `metrics.jsonl`,
# `samples.jsonl` and a checkpoint, as from the command line.

# %%
for arm, fields in ARMS.items():
    config = loading.load(loading.find(f"routing_replay:{VARIANT}"))
    config.log.diagnostics_every = 2
    config.update_from_flattened_dict(fields)
    settings = validate(config)
    with RunLog(DIR / arm, settings.steps) as log:
        log.write_config({"config": config.to_dict(), "config_hash": config_hash(config)})
        log.result(train(build(settings), log, config_hash(config)))

# %%
study = load(DIR)
print(text_table(*tables.arm_table(study, "")))

# %% [markdown]
# **Learning curves.** Does the reward rise, and does it stay? Where the curves of arms coincide, each
# shows through the dashes of the others.

# %%
PICTURES = {plot.stem: plot for plot in figures.PLOTS}
display(PICTURES["curves"].draw(study, ""))

# %% [markdown]
# **Flips by layer and update.** Routing drifts within a rollout: brighter to the right.

# %%
display(PICTURES["flips"].draw(study, ""))

# %% [markdown]
# **What moves the ratio.** The share of Var(log r) that comes from the changed selection of experts alone, scored
# without replay in every arm.

# %%
display(PICTURES["decomposition"].draw(study, ""))

# %% [markdown]
# **Gradient weights.** How much of each token's gradient the objective keeps, by the sign of its advantage: the one
# clip fraction that compares across objectives.

# %%
display(PICTURES["gradient_weights"].draw(study, ""))
