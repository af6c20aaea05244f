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
# # A mixture and its routing
#
# In a mixture of experts a router chooses a few experts for every token. An update of the policy moves the parameters
# and, with them, the choice: the importance ratio then compares two different networks. Here one rollout of a tiny
# mixture is taken apart, layer by layer: which experts compute a token, how many of them change within 32 updates, what
# that does to the ratio, and what replaying the old choice takes away. One to two minutes on two CPU cores.

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
# ## The policy and one rollout
#
# The policy has 4 layers with 16 experts each, of which 4 compute a token, and is warm-started on sorting ten digits.
# The config `routing_replay` takes 256 answers a rollout and 32 updates, at a rate that is too high on purpose.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display

from jaxrl_llm.config import loading
from jaxrl_llm.config.start_up import start_jax
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models import Routing, no_record, scoring
from jaxrl_llm.report.style import colour, label_ends, line, panels
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training import gaps

start_jax()  # keeps what is compiled: run these cells a second time and nothing is compiled again
run = build(validate(loading.load(loading.find("routing_replay"))))
state = run.start(lambda line: None)
drawn = run.source.next(run.source.stream(), 1, state)
batch, task = drawn.rollout, run.settings.task
e_old = Routing(batch.routes.scored.experts)  # the experts that the old policy used
layers, answers, _, chosen = e_old.experts.shape
LAYERS = [f"layer {layer}" for layer in range(layers)]
tokens = [task.tokenizer.decode([int(i)]) or "EOS" for i in batch.tokens[0][batch.segment_ids[0] != 0]]
print(f"the routing of {answers} answers, experts [layer, answer, token, choice]: {e_old.experts.shape}")
print("the first answer:", *tokens)

# %% [markdown]
# Which 4 experts compute each token of that answer, in every layer:

# %%
figure, axes = panels(LAYERS, columns=2, height=2.7, along="token")
for layer, ax in enumerate(axes):
    used = np.zeros((run.settings.model.num_experts, len(tokens) - 1))
    for place in range(len(tokens) - 1):  # the last token was never fed, so it has no experts
        used[np.asarray(e_old.experts[layer, 0, place]), place] = 1
    ax.imshow(used, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1.3, interpolation="none")
    ax.set_xticks(range(len(tokens) - 1), tokens[:-1])
    ax.set_ylabel("expert", fontsize=8.5)
    ax.grid(False)
display(figure)

# %% [markdown]
# ## Flips
#
# The 32 updates of GRPO on this rollout. After each, the share of the activated experts that the current router no
# longer picks (a difference of sets: the order of the experts says nothing).


# %%
def updated(state, batch):
    """The policy after the updates of one epoch, and the share of changed experts [update, layer]."""
    state, flips = jax.tree.map(jnp.copy, state), []  # an update overwrites the state that it is given
    for layout in drawn.epochs[0]:
        state, metrics = run.learner.update(state, batch, layout)
        flips.append(M.finalize(jax.device_get(metrics))["routing/flips_old_current_by_layer"])
    return state.policy.trained, np.array(flips)


old = state.policy.trained
new, flips = updated(state, batch)
figure, (ax,) = panels(["experts changed since the rollout"], columns=1, height=3.2, along="update")
for layer, name in enumerate(LAYERS):
    ax.plot(range(1, len(flips) + 1), 100 * flips[:, layer], **line([None, *LAYERS], name) | {"marker": ""})
label_ends(ax, [(100 * flips[-1, i], name, colour([None, *LAYERS], name)) for i, name in enumerate(LAYERS)])
ax.set_ylabel("% of the activated experts", fontsize=8.5)
display(figure)
print(f"after the last update {flips[-1].mean():.1%} of the activated experts are others")

# %% [markdown]
# ## Replay
#
# Routing is an argument of a forward as it is a result. Given the experts that another pass recorded, a forward uses
# those; the gates are the softmax of its own router at these experts, so the router keeps its gradient. Replaying to a
# policy the experts that it chose itself changes nothing.

# %%
forward = jax.jit(
    lambda params, routing: scoring.score(run.model, params, batch.tokens, batch.segment_ids, routing=routing)
)
mask = np.asarray(batch.loss_mask)
free, own, held = forward(new, None), forward(old, e_old), forward(new, e_old)
old_logprobs = forward(old, None).logprobs
same, other = abs(own.logprobs - old_logprobs)[mask].max(), abs(held.logprobs - free.logprobs)[mask].max()
print(f"old policy with its own experts replayed: log-probs differ by {same:.1e} at most")
print(f"new policy with the old experts replayed: log-probs differ by {other:.1e} at most")

# %% [markdown]
# ## The parts of the ratio
#
# With `e_old` the experts of the old policy and `e` those of the current one, the log-ratio of a token is the sum of
# two parts:
#
# - parameters: `log pi(.|e_old) - log pi_old(.|e_old)`, what remains if the experts are held
# - routing: `log pi(.|e) - log pi(.|e_old)`, what the changed selection adds
#
# They sum exactly. The tokens are split by whether the state that predicts them was computed by other experts in any
# layer; a changed expert reaches the tokens after that as well, through attention.

# %%
log_ratio = np.asarray(free.logprobs - old_logprobs)
parameters = np.asarray(held.logprobs - old_logprobs)
routing = np.asarray(free.logprobs - held.logprobs)
np.testing.assert_allclose((parameters + routing)[mask], log_ratio[mask], atol=1e-5)
share, both = gaps.differ(e_old, free.routing)  # of the experts of each layer, answer and token
flipped = np.asarray(scoring.previous(((share > 0) & both).any(axis=0))) & mask
swapped = forward(old, free.routing)  # the other order: the old parameters with the new experts
parts = gaps.decompose(free.logprobs, held.logprobs, swapped.logprobs, old_logprobs, batch.loss_mask)
found = M.finalize(jax.device_get(parts))
print(f"{flipped.sum() / mask.sum():.0%} of the answers' tokens are predicted by other experts")
print(f"routing explains {found['routing/share_of_variance']:.1%} of Var(log r), parameters first")
print(f"             and {found['routing/share_of_variance_shapley']:.1%} in the mean of both orders")

titles = ["each answer token", "how far the ratio is from 1"]
figure, (scatter, spread) = panels(titles, columns=2, height=3.6, along="parameter part of log r")
for where, name, ink in ((mask & ~flipped, "same experts", "#0072B2"), (flipped, "other experts", "#D55E00")):
    scatter.plot(parameters[where], routing[where], ".", color=ink, alpha=0.35, markersize=4, label=name)
    size = np.sort(abs(log_ratio[where]))
    spread.semilogx(size, 1 - np.arange(len(size)) / len(size), color=ink, linewidth=2, label=name)
scatter.set_ylabel("routing part of log r", fontsize=8.5)
scatter.legend(frameon=False, fontsize=9)
spread.set_xlim(1e-4, None)
spread.set_xlabel("|log r|", fontsize=8.5)
spread.set_ylabel("share of tokens beyond", fontsize=8.5)
spread.legend(frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# ## Layer by layer
#
# A token without a record lets the router choose. So one layer at a time is set free while the others replay: whose
# changed experts move the log-probs?

# %%
alone = []
for layer in range(layers):
    one_free = Routing(e_old.experts.at[layer].set(no_record(e_old.experts)))
    alone.append(np.std((forward(new, one_free).logprobs - held.logprobs)[mask]))
titles = ["experts changed (%)", "what one free layer does: sd of the routing part"]
figure, (changed, moved) = panels(titles, columns=2, height=2.6)
changed.barh(LAYERS, 100 * flips[-1], color="#0072B2")
moved.barh([*LAYERS, "all"], [*alone, np.std(routing[mask])], color=["#0072B2"] * layers + ["#6b6b6b"])
display(figure)

# %% [markdown]
# ## Training with replay
#
# R2 replays the old experts in every training forward of these 32 updates. The ratio that the objective sees then has
# no routing part at all. The router moves all the same, since it keeps its gradient: replay holds the experts of the
# ratio, not those that the policy would choose. Where the parameters move the ratio most, it moves about as far.

# %%
replayed = batch.replace(routes=batch.routes.replace(replayed=e_old))
new_r2, _ = updated(state, replayed)
arms = {"GRPO": (free, free), "GRPO+R2": (forward(new_r2, e_old), forward(new_r2, None))}
for arm, (seen, fresh) in arms.items():
    share, both = gaps.differ(e_old, fresh.routing)
    changed = share.mean(where=both & (batch.segment_ids != 0)[None])
    sd = (seen.logprobs - old_logprobs)[mask].std()
    print(f"{arm:<8} sd of the log-ratio that the objective sees: {sd:.3f}; experts changed: {changed:.1%}")

# %% [markdown]
# One rollout of one seed: here the parameters move the ratio far more than the routing does. Whether replay helps to
# learn is another question, which needs whole runs and paired seeds.
#
# Next: [train and compare](compare.ipynb).
