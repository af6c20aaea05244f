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
# # Your own objective, task and reward
#
# Three files of about twenty lines each: a surrogate that replaces the clip, a task with its own verifier, and a reward
# for questions of your own. The commands take them by their path, and nothing of the package is changed. One to two
# minutes on two CPU cores.

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
# ## An objective
#
# A surrogate is what is maximised at a token. This one subtracts a penalty for leaving ratio 1, in place of a bound.
# Its field is a hyper-parameter with a default, a meaning and a limit, set as `--config.objective.width=0.1`.

# %%
# %%writefile quadratic.py
"""r A - (r - 1)^2 |A| / (2 width) in place of a clip."""

import dataclasses

import jax.numpy as jnp

from configs import base
from jaxrl_llm import objectives
from jaxrl_llm.objectives import surrogates


@dataclasses.dataclass(frozen=True)
class Quadratic(surrogates.Surrogate):
    width: float = objectives.hyperparameter(0.2, "how far the ratio goes before the gradient is 0", above=0)
    equation = "r A - (r - 1)^2 |A| / (2 {width:g})"

    def __call__(self, log_ratio, batch):
        step = jnp.expm1(log_ratio)
        return (1 + step) * batch.advantages - step**2 / (2 * self.width) * jnp.abs(batch.advantages)


objectives.register("quadratic", objectives.recipe("grpo")._replace(surrogate=Quadratic()))


def get_config(variant=""):
    config = base.get_config(variant)
    config.objective.name = "quadratic"
    return config


# %% [markdown]
# Loaded, it is a recipe as the others are. Its gradient on one token of ratio `r`, beside GRPO's:

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
from IPython.display import display

from jaxrl_llm import objectives, train
from jaxrl_llm.config.loading import load_module
from jaxrl_llm.report.page import text_table
from jaxrl_llm.report.read import load
from jaxrl_llm.report.samples import changes
from jaxrl_llm.report.style import label_ends, line, panels

load_module(Path("quadratic.py"))
r = jnp.linspace(0.5, 1.6, 200)


def weights(name, advantage):
    """Share of its gradient that a token of ratio r keeps; each answer has one token."""
    objective, old = objectives.make(name), jnp.full((len(r), 1), -1.0)
    batch = {"advantages": jnp.full(len(r), advantage), "mask": jnp.ones((len(r), 1), bool)}

    def loss(logprobs):
        return objective(logprobs=logprobs, old_logprobs=old, **batch)[0]

    return -jax.grad(loss)(old + jnp.log(r)[:, None])[:, 0] * len(r) / advantage


figure, axes = panels(["A > 0", "A < 0"], columns=2, along="ratio r")
for ax, advantage in zip(axes, (1.0, -1.0), strict=True):
    ends = []
    for name in ("grpo", "quadratic"):
        y, look = weights(name, advantage), line(["grpo", "quadratic"], name)
        ax.plot(r, y, **look | {"marker": ""})
        ends.append((float(y[-1]), name, look["color"]))
    label_ends(ax, ends)
display(figure)

# %% [markdown]
# ## A task
#
# A task draws prompts with a right answer and judges what a model writes. Its keyword arguments are options, set as
# `--config.task.options.letters=4`. The reward may be any number; here it is the share of letters in their place.

# %%
# %%writefile reverse.py
"""Write a word backwards: 'abc=' -> 'cba'."""

from ml_collections import ConfigDict

from configs import base
from jaxrl_llm import tasks


@tasks.register
def reverse(*, letters: int = 3) -> tasks.Task:
    def sample(rng):
        word = "".join(rng.choice(list("abcdefgh"), size=letters))
        return f"{word}=", word[::-1]

    def verify(prompt, answer, gold, row):
        return sum(a == b for a, b in zip(answer, gold)) / max(len(answer), len(gold))

    tokenizer = tasks.CharTokenizer("abcdefgh=")
    return tasks.Task("reverse", letters + 1, letters + 1, tokenizer, sample=sample, verify=verify)


def get_config(variant=""):
    config = base.get_config(variant)
    config.task.name = "reverse"
    config.task.options = ConfigDict({"letters": 3, "train_size": 400, "test_size": 40})
    return config


# %% [markdown]
# Train on it, from a short warm start on right answers. `:smoke` makes the model tiny, and the fields below make the
# run long enough to learn.

# %%
SIZES = {
    "rollout.prompts": 32,
    "rollout.group_size": 8,
    "evaluation.every": 20,
    "evaluation.prompts": 64,
    "checkpoint.every": 20,
    "log.samples": 8,
}


def trained(config, workdir, own):
    train(config, workdir, SIZES | own)
    (run,) = load(workdir).runs
    return run


short = {"steps": 40, "warm_start.steps": 60, "optimizer.learning_rate": 3e-3}
reversing = trained("reverse.py:smoke", "runs/reverse", short)

# %% [markdown]
# ## A reward
#
# Questions of your own are a file with one JSON object a line, and the reward is a function of a file. Here a word is
# to be shouted: `abcd:` -> `ABCD`. Half of the answers in the file end with an exclamation mark, and the reward gives
# half a point more for one, which the data do not say. The function runs in worker processes with a time limit, so it
# may be slow, and may fail.

# %%
# %%writefile loud.py
"""The share of right capitals; a whole word with an exclamation mark earns half a point more."""


def reward(prompt, answer, gold, row):
    word = gold.removesuffix("!")
    right = sum(a == b for a, b in zip(answer, word)) / len(word)
    return 1.5 if answer == f"{word}!" else right


# %%
import json
import random

letters, draw = "abcdefgh", random.Random(0)
words = sorted({"".join(draw.choices(letters, k=4)) for _ in range(900)})
with open("words.jsonl", "w") as file:
    for word in words:
        file.write(json.dumps({"prompt": f"{word}:", "answer": word.upper() + draw.choice(["", "!"])}) + "\n")
options = {"path": "words.jsonl", "verifier": "loud.py:reward", "prompt_length": 5, "answer_length": 6}

# %% [markdown]
# All three kinds of own parts go together: the objective of the first file learns from this reward.

# %%
own = {"task.name": "jsonl", "task.options": options}
own |= {"steps": 20, "warm_start.steps": 120, "optimizer.learning_rate": 1e-3}
shouting = trained("quadratic.py:smoke", "runs/loud", own)

# %%
changed, (start, end) = changes(shouting)
rows = [[c.prompt, f"{c.before} ({c.before_reward:g})", f"{c.after} ({c.after_reward:g})"] for c in changed]
print(text_table(["prompt", f"after {start} rollouts (reward)", f"after {end} rollouts (reward)"], rows))

# %%
titles = ["your task: reward of reversing", "your reward and objective: shouting"]
figure, axes = panels(titles, columns=2, along="rollout")
for ax, run in zip(axes, (reversing, shouting), strict=True):
    ax.plot(*run.series("reward/mean"), **line(["one"], "one"))
    ax.set_ylim(0, 1.55)
display(figure)

# %% [markdown]
# Every command knows these DIRs: `python -m jaxrl_llm.evaluation --workdir runs/loud`, `report runs`, `generate` and
# `export`. A DIR that runs code of yours says so and asks for `--trust-code` where it was made by others.
