# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
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
# In Colab, install first: `!pip install "jaxrl_llm[colab] @ git+<the repository>"` and run from a checkout (the
# configurations live in `configs/`).

# %%
# %matplotlib inline
import os
import tempfile
from pathlib import Path

from IPython.display import display

from configs import routing_replay
from jaxrl_llm.reporting import figures, tables
from jaxrl_llm.reporting.page import text_table
from jaxrl_llm.reporting.read import load
from jaxrl_llm.run_log import RunLog
from jaxrl_llm.settings import config_hash, validate
from jaxrl_llm.trainer import build, train

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
    config = routing_replay.get_config(VARIANT)
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
# **Learning curves.** Does the reward rise, and does it stay?

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
