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
# # Train and compare
#
# Four short runs of one tiny mixture of experts from the same warm start, with the same prompts and sampling keys:
# GRPO, GRPO with routing replay (R2), GSPO and SAPO. Then the report that the package writes of them, and how to read
# it. Two to four minutes on two CPU cores.

# %% [markdown]
# The next cell installs the package where it is missing: from its wheel beside the notebook, from the checkout around
# it, or from the public address. On Colab choose the runtime first (CPU, GPU or TPU); if it then asks to restart, do so
# and run the cells again from the top.

# %%
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ADDRESS = ""  # what [project.urls] of pyproject.toml says

if importlib.util.find_spec("jaxrl_llm") is None:
    wheels = [path.resolve() for path in Path().glob("jaxrl_llm-*.whl")]
    checkouts = [path for path in Path.cwd().parents if (path / "jaxrl_llm" / "__init__.py").exists()]
    sources = [*(path.as_uri() for path in wheels + checkouts), *([f"git+{ADDRESS}"] if ADDRESS else [])]
    if not sources:
        raise RuntimeError("jaxrl_llm has no public address yet; put its wheel beside this notebook")
    tpu = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
    extras = "colab,gpu" if shutil.which("nvidia-smi") else "colab,tpu" if tpu else "colab"
    package = f"jaxrl_llm[{extras}] @ {sources[0]}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)

# %% [markdown]
# ## Train
#
# Each arm is one configuration with two or three fields changed. `train` runs it and leaves a DIR, as the command does:
#
# ```
# python -m jaxrl_llm.main --config routing_replay --workdir runs/GRPO --config.steps=12
# ```
#
# The config is that of the routing-replay study, 32 updates a rollout, here at twice the rate that was tuned for it and
# from a shorter warm start, so that there is something to learn and something to lose within minutes. Every run begins
# with the mathematics of its objective. The same command on a DIR resumes it, so this cell may be run again.

# %%
from jaxrl_llm import train

ARMS = {
    "GRPO": {"objective.name": "grpo"},
    "GRPO+R2": {"objective.name": "grpo", "replay.mode": "R2"},
    "GSPO": {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
    "SAPO": {"objective.name": "sapo"},
}
SHARED = {
    "optimizer.learning_rate": 1e-4,
    "warm_start.steps": 120,
    "steps": 12,
    "evaluation.every": 12,
    "checkpoint.every": 12,
    "log.diagnostics_every": 3,
}
for arm, own in ARMS.items():
    train("routing_replay", f"runs/{arm}", SHARED | own)

# %% [markdown]
# ## The report
#
# `python -m jaxrl_llm.report runs` prints a table and writes `runs/report.html`, one file with all figures. Read the
# table from the left: held-out accuracy at the start and at the end, then the share of tokens that a clip cut, and the
# share of experts that changed. The objectives do not clip alike, so "clipped" does not compare across arms.

# %%
from IPython.display import Image, display

from jaxrl_llm.report.write import write_report

print(write_report("runs", width=100))

# %% [markdown]
# **Learning curves.** Does the reward rise, and does it stay? Where the curves of arms coincide, each shows through the
# dashes of the others. With one seed a gap at the end is no finding: look at how far a single curve jumps.

# %%
display(Image("runs/figures/curves.png"))

# %% [markdown]
# **Flips by layer and update.** Experts that the current policy no longer picks. Brighter to the right: the routing
# drifts within a rollout. Replay does not stop that drift, it only keeps it out of the ratio.

# %%
display(Image("runs/figures/flips.png"))

# %% [markdown]
# **What moves the ratio.** The share of Var(log r) that comes from the changed selection of experts alone, scored
# without replay in every arm.

# %%
display(Image("runs/figures/decomposition.png"))

# %% [markdown]
# **Gradient weights.** How much of each token's gradient the objective keeps, by the sign of its advantage: what the
# clip fraction cannot tell across objectives.

# %%
display(Image("runs/figures/gradient_weights.png"))

# %% [markdown]
# ## What this shows, and what it does not
#
# One seed each, at one rate: an arm that ends higher here has ended higher once, and the order changes from one seed
# or machine to the next. Over many paired seeds the study sees no gain of replay at a tuned rate, and a collapse of
# SAPO at one that is too high. Such a claim needs a sweep (`python -m jaxrl_llm.sweep --sweep FILE --workdir DIR`),
# whose report adds paired differences with their intervals and says which are undecided.
#
# Next: [a published model learns](published_model.ipynb).
