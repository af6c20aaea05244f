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
# # Objectives by hand
#
# An objective takes arrays and gives a loss. Here four of its kinds are drawn and differentiated: the clip of PPO and
# GRPO, its dual form, the soft gate of SAPO and the sequence ratio of GSPO. Every gradient is taken by `jax.grad` and
# compared with the equation of the paper; a cell fails if they differ. Less than a minute on a CPU.

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
import ipywidgets as widgets
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display

from jaxrl_llm import objectives
from jaxrl_llm.objectives import ratios, surrogates
from jaxrl_llm.report.style import label_ends, line, panels

# %% [markdown]
# ## From rewards to advantages
#
# Four answers to one prompt, of which the first is right. The group is its own baseline: an advantage says how much
# better an answer is than the others. A group whose answers are all right, or all wrong, teaches nothing.

# %%
for rewards in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]):
    advantages = objectives.group_advantages(jnp.array(rewards, float), group_size=4, std="sample")
    print(rewards, "->", [f"{advantage:+.3f}" for advantage in advantages])

# %% [markdown]
# ## What is maximised at one token
#
# `r` is the probability of the token under the current policy over that under the policy which sampled it, `A` its
# advantage. The clip is flat where the policy has gone far enough in the right direction: above `1 + clip_high` where
# `A > 0`, below `1 - clip_low` where `A < 0`. It has no bound where a bad token becomes likelier and likelier; the dual
# clip adds one. The soft gate bends instead of breaking.


# %%
def clip(r, A):
    return surrogates.clip(jnp.log(r), A, low=0.2, high=0.28)


def dual_clip(r, A):
    return surrogates.clip(jnp.log(r), A, low=0.2, high=0.28, dual_clip=3.0)


def soft_gate(r, A):
    return surrogates.soft_gate(jnp.log(r), A, tau_pos=1.0, tau_neg=1.05)


KINDS = {"clip": clip, "dual clip": dual_clip, "soft gate": soft_gate}
r = jnp.linspace(0.05, 4, 400)


def weights(kind, A):
    """The slope of what is maximised at every ratio, over A."""
    return jax.grad(lambda r: kind(r, jnp.full_like(r, A)).sum())(r) / A


figure, axes = panels(["A > 0: make it likelier", "A < 0: make it rarer"] * 2, columns=2, along="ratio r")
for ax, A in zip(axes, [1.0, -1.0, 1.0, -1.0], strict=True):
    slope = ax in axes[2:]
    for name, kind in KINDS.items():
        y = weights(kind, A) if slope else kind(r, jnp.full_like(r, A))
        ax.plot(r, y, label=name, **line(list(KINDS), name) | {"marker": "", "linewidth": 2.4})
    ax.axvline(1, color="#b0b0b0", linewidth=0.8)
    ax.set_ylabel("gradient weight w(r)" if slope else "what is maximised", fontsize=8.5)
axes[0].legend(frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# Above: the quantity. Below: its slope over `A`, the weight that a token's gradient keeps. The clip keeps all or
# nothing; the gate is 1 at `r = 1` and fades to both sides. The papers' equations say the same, point by point:

# %%
A = jnp.array([[1.0], [-1.0]])
equations = {
    "clip": jnp.where(A > 0, r <= 1.28, r >= 0.8),
    "dual clip": jnp.where(A > 0, r <= 1.28, (r >= 0.8) & (r <= 3)),
    "soft gate": 1 / jnp.cosh(jnp.where(A > 0, 1.0, 1.05) * (r - 1) / 2) ** 2,
}
for name, kind in KINDS.items():
    ours = jnp.stack([weights(kind, 1.0), weights(kind, -1.0)])
    np.testing.assert_allclose(ours, equations[name], rtol=1e-4, atol=1e-5)
    gap = abs(ours - equations[name]).max()
    print(f"{name}: jax.grad and the equation agree at {ours.size} ratios, to {gap:.0e}")

# %% [markdown]
# ## With sliders
#
# Since `grad r = r grad log pi`, the gradient of a token's log-probability is weighed by `w(r) r`: under a clip without
# a bound a bad token that has become four times as likely weighs four times as much. Move the sliders. (A page without
# a kernel shows the picture at their start.)


# %%
def at(clip_low=0.2, clip_high=0.28, dual=3.0, tau=1.0, positive=False):
    A = 1.0 if positive else -1.0
    kinds = {
        "clip": lambda r, A: surrogates.clip(jnp.log(r), A, clip_low, clip_high),
        "dual clip": lambda r, A: surrogates.clip(jnp.log(r), A, clip_low, clip_high, dual),
        "soft gate": lambda r, A: surrogates.soft_gate(jnp.log(r), A, tau, tau),
    }
    title = f"weight w(r) r of grad log pi, A {'>' if positive else '<'} 0"
    figure, (ax,) = panels([title], columns=1, along="ratio r")
    ends = []
    for name, kind in kinds.items():
        y, look = weights(kind, A) * r, line(list(kinds), name) | {"marker": ""}
        ax.plot(r, y, **look)
        ends.append((float(y[-1]), name, look["color"]))
    label_ends(ax, ends)
    display(figure)


widgets.interactive(
    at, clip_low=(0.05, 0.9, 0.05), clip_high=(0.05, 1.0, 0.01), dual=(1.5, 4.0, 0.1), tau=(0.2, 4.0, 0.1)
)

# %% [markdown]
# ## One ratio for a whole answer
#
# GSPO takes the geometric mean of the token ratios of an answer. Six tokens, of which the policy has moved two: under
# GRPO the token whose ratio left the range loses its gradient and the others keep their own, under GSPO all six get
# the same weight, or none does.

# %%
log_ratio = jnp.array([[0.0, 0.45, 0.02, -0.12, 0.0, 0.05]])  # log r_t of one answer with A = 1
mask = jnp.ones((1, 6), bool)
old = jnp.full((1, 6), -1.0)


def answer_weights(name, at=log_ratio, **ranges):
    objective = objectives.make(name, **ranges)

    def loss(logprobs):
        return objective(logprobs=logprobs, old_logprobs=old, advantages=jnp.ones(1), mask=mask)[0]

    return -jax.grad(loss)(old + at)[0] * 6  # of each token, over A / |y|


ranges = {"clip_low": 0.2, "clip_high": 0.2}
by_token, by_answer = answer_weights("grpo", **ranges), answer_weights("gspo", **ranges)
ratio, s = jnp.exp(log_ratio[0]), jnp.exp(ratios.sequence_log_ratio(log_ratio, mask)[0, 0])
np.testing.assert_allclose(by_token, jnp.where(ratio <= 1.2, ratio, 0), rtol=1e-5)
np.testing.assert_allclose(by_answer, jnp.full(6, s), rtol=1e-5)
print("token ratios", *(f"{x:.3f}" for x in ratio), f"with the geometric mean {s:.3f}")

figure, (ax,) = panels(["weight of each token's gradient"], columns=1, along="token of the answer")
for shift, (name, heights) in zip((-0.2, 0.2), {"GRPO": by_token, "GSPO": by_answer}.items(), strict=True):
    ax.bar(np.arange(1, 7) + shift, heights, 0.36, label=name, color=line(["GRPO", "GSPO"], name)["color"])
ax.plot(np.arange(1, 7), ratio, "k_", markersize=26, label="ratio r of the token")
ax.legend(frameon=False, fontsize=9, ncols=3, loc="upper right")
ax.set_ylim(0, 2)
display(figure)

# %% [markdown]
# The mean of many log-ratios hardly moves, so GSPO's range has to be far narrower than GRPO's, and the narrower the
# longer the answer is. Random answers whose tokens all have the same spread:

# %%
lengths = 2 ** jnp.arange(3, 14)
token = 0.1 * jax.random.normal(jax.random.key(0), (256, int(lengths[-1])))
answers = [token[:, :n] for n in lengths]
spread = [jnp.std(ratios.sequence_log_ratio(x, jnp.ones_like(x, bool))[:, 0]) for x in answers]
figure, (ax,) = panels(["spread of log s over 256 answers"], columns=1, along="tokens of the answer")
ax.loglog(lengths, spread, **line(["measured"], "measured"), label="measured")
ax.loglog(lengths, 0.1 / np.sqrt(lengths), "--", color="#6b6b6b", label="spread of a token / sqrt(length)")
ax.legend(frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# ## All recipes at a ratio of 1
#
# A recipe is a choice of advantage, ratio, surrogate and aggregation. Before the first update every ratio is 1, and
# there the recipes that divide by the answer's length have one gradient: they differ only in what they do once the
# policy has moved.

# %%
for name in ("grpo", "gspo", "gspo_token", "sapo", "gmpo"):
    np.testing.assert_allclose(answer_weights(name, at=0 * log_ratio), 1, rtol=1e-5)
    (maximised, *_), where = objectives.make(name).formula()
    print(f"{name:<11} {maximised}\n{'':<11} {'; '.join(where)}")

# %% [markdown]
# Next: [a mixture and its routing](mixture.ipynb), where the ratio moves because other experts compute it.
