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
# # Is my loss the paper's?
#
# A training stack of a few lines stands here for yours. Its batch, its loss and the gradient of that loss by the
# log-probs are all that `audit` sees: it names the objective and the conventions, says what the batch cannot tell, and
# finds slips that are planted below. Less than a minute on two CPU cores. For TRL and verl, hooks that save such a
# batch from a real run are in `docs/audit.md`, with the whole schema.

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

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from safetensors.numpy import save_file

from jaxrl_llm.audit.capture import checked, read
from jaxrl_llm.audit.opinion import opinion
from jaxrl_llm.audit.opinion_page import table
from jaxrl_llm.report.style import panels

jax.config.update("jax_enable_x64", True)

# %% [markdown]
# ## A stack
#
# Eight answers to two prompts, rewarded 0, 0.5 or 1, at the second update: the policy has moved since it sampled. The
# loss is what a reader of the DAPO paper may have written: group advantages, a clip that is wider above, a mean over
# all tokens.

# %%
rng = np.random.default_rng(0)
lengths = np.array([9, 12, 3, 7, 12, 5, 8, 2])
mask = np.arange(12) < lengths[:, None]
old = np.where(mask, -np.abs(rng.normal(1.0, 0.6, mask.shape)) - 0.01, 0)
now = np.where(mask, np.minimum(old + rng.normal(0, 0.3, mask.shape), -0.001), 0)
rewards = np.array([1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0])


def advantages(ddof=1):
    groups = rewards.reshape(2, 4)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / (groups.std(1, ddof=ddof, keepdims=True) + 1e-6)).ravel()


def loss(logprobs, A, low=0.2, high=0.28, mask=mask, ratio=lambda now, old: jnp.exp(now - old)):
    r, A = ratio(logprobs, old), A[:, None]
    term = jnp.minimum(r * A, jnp.clip(r, 1 - low, 1 + high) * A)
    return -jnp.sum(term * mask) / jnp.sum(mask)


def batch(A=None, **settings):
    """The arrays that a hook would save."""
    A = advantages() if A is None else A
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(now), A, **settings)
    told = {"reported_loss": np.asarray(value), "reported_dlogprobs": np.asarray(gradient)}
    prompts = np.repeat([0, 1], 4)
    made = {"batch_rewards": rewards, "batch_group": prompts, "batch_advantages": A, "row": np.arange(8)}
    return told | made | {"logprobs": now, "old_logprobs": old, "mask": mask, "advantages": A, "rewards": rewards}


# %% [markdown]
# ## What it computes
#
# `loss off` and `gradient off` are how far our replay is from what the stack reported: rounding. `settings` are those
# that differ from the recipe's own. The convention of the advantages is found as well.

# %%
print(table(opinion(checked(batch()))))

# %% [markdown]
# ## What a batch cannot tell
#
# At the first update every ratio is 1, no token is clipped, and many recipes are one. All of them are listed, and none
# is preferred: capture a second update to tell them apart.

# %%
first = batch(ratio=lambda now, old: jnp.exp(now - jax.lax.stop_gradient(now)))
print(table(opinion(checked(first | {"old_logprobs": now}))))

# %% [markdown]
# ## Slips
#
# Each of these trains, and none shows in a curve of rewards at a glance. The first is seen in the stored arrays alone;
# the others change loss and gradient, and are found by replaying known mistakes where no objective fits.

# %%
SLIPS = {
    "the deviation of all, not of a sample": batch(advantages(ddof=0)),
    "clip ranges exchanged": batch(low=0.28, high=0.2),
    "padding in the sum and in the count": batch(mask=np.ones_like(mask)),
    "the ratio upside down": batch(ratio=lambda now, old: jnp.exp(old - now)),
}
for what, arrays in SLIPS.items():
    made = opinion(checked(arrays))
    print(f"{what}:")
    for name, evidence in made.faults:
        print(f"  FAULT {name}: {evidence}")

# %% [markdown]
# ## Why the gradient tells so much
#
# Over `-A` and times the number of tokens, the gradient of a token is its ratio where it keeps its gradient, and 0
# where it was clipped. The places where points fall to 0 are the clip range itself; a loss is one number and could be
# right by chance.

# %%
sound, swapped = batch(), SLIPS["clip ranges exchanged"]
figure, axes = panels(["as the paper has it", "clip ranges exchanged"], columns=2, along="ratio")
for ax, arrays in zip(axes, (sound, swapped), strict=True):
    A = np.broadcast_to(arrays["advantages"][:, None], mask.shape)[mask]
    ratio, slope = np.exp(now - old)[mask], -arrays["reported_dlogprobs"][mask] / A * mask.sum()
    for good, look in ((True, "A > 0"), (False, "A < 0")):
        chosen = (A > 0) == good
        ax.scatter(ratio[chosen], slope[chosen], s=14, label=look)
    for bound in (0.8, 1.28):
        ax.axvline(bound, color="#b0b0b0", linewidth=0.8)
axes[0].set_ylabel("gradient over -A, times tokens", fontsize=8.5)
axes[0].legend(frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# ## From a file
#
# A capture is one safetensors file, which any trainer can write. `python -m jaxrl_llm.audit batch.safetensors` prints
# the same table, `--page` and `--json` write it, and `--model FOLDER` scores the tokens with the checkpoint itself.

# %%
save_file({name: np.ascontiguousarray(x) for name, x in batch(low=0.2, high=0.2).items()}, "batch.safetensors")
print(table(opinion(read(Path("batch.safetensors")))))
