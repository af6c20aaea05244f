"""Stand-ins for what a run would download or has trained before: a tiny random checkpoint with its tokenizer, a GSM8K
made of sums, the DIR of a random reward model or policy.

They are written into the user's cache folder at the first request and reused by later ones; equal requests give equal
files. The `:smoke` variants of the configs that need such things run on them.
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import tasks
from jaxrl_llm.ground.machine import cache_folder
from jaxrl_llm.models import Model, ModelConfig, Published, complete_fields, save_pretrained
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import write_json
from jaxrl_llm.training.reward_sources import RewardConfig

_VERSION = 4  # goes up when what is written changes
_TEMPLATES = (
    "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
    "A box holds {a} red and {b} green pens. How many pens are in the box?",
    "{name} read {a} pages in the morning and {b} in the evening. How many pages is that?",
)
_NAMES = ("Ada", "Ben", "Cleo", "Dan")
# Fields of a run's model block that no checkpoint holds; the vocabulary is the tokenizer's.
_NOT_STORED = ("pretrained", "vocab_size", "remat", "experts_implementation", "attention_implementation")


def gsm8k() -> str:
    """A folder with train.jsonl and test.jsonl as GSM8K publishes them: questions whose answers are sums below 10."""
    return str(_made("gsm8k", {}, _write_questions))


def checkpoint(model: Mapping[str, Any]) -> str:
    """A folder in the Hugging Face layout: random parameters of the architecture that a config's `model` block sets.

    Its byte-level BPE tokenizer with a chat template is trained on the questions of `gsm8k` and sets the vocabulary.
    """
    fields = {name: value for name, value in model.items() if value is not None and name not in _NOT_STORED}
    return str(_made("checkpoint", fields, lambda folder: _write_checkpoint(folder, fields)))


def reward_model(config: Mapping[str, Any]) -> str:
    """The DIR of a reward model with random parameters, for the task and the model of a config."""
    return _run_of("reward_model", config)


def teacher(config: Mapping[str, Any]) -> str:
    """The DIR of a policy with random parameters, for the task and the model of a config."""
    return _run_of("grpo", config)


def _run_of(objective: str, config: Mapping[str, Any]) -> str:
    read = {name: config[name] for name in ("task", "rollout", "model", "lora")}
    return str(_made(objective, read, lambda folder: _write_run(folder, objective, read)))


def _made(kind: str, fields: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """The folder of these fields, whole or absent."""
    digest = hashlib.sha256(json.dumps([_VERSION, fields], sort_keys=True, default=str).encode()).hexdigest()[:12]
    place = cache_folder() / "stand_ins" / f"{kind}-{digest}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{place}.lock"):
        if not place.exists():
            part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}."))
            try:
                write(part)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return place


def _write_questions(folder: Path) -> None:
    rows = [
        {
            "question": template.format(name=name, a=a, b=b),
            "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
        }
        for a, b in itertools.product(range(10), repeat=2)
        if a + b < 10
        for template, name in itertools.product(_TEMPLATES, _NAMES)
    ]
    unique = list({row["question"]: row for row in rows}.values())
    for split, rows in (("test", unique[::8]), ("train", [row for i, row in enumerate(unique) if i % 8])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_checkpoint(folder: Path, fields: Mapping[str, Any]) -> None:
    questions = [json.loads(line) for line in (Path(gsm8k()) / "train.jsonl").read_text().splitlines()]
    tokenizer = write_tokenizer(folder, [f"{row['question']} {row['answer']}" for row in questions], 384)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **fields)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    ids = json.loads(files["generation_config.json"])
    published = Published({**ids, "max_position_embeddings": 4096}, files)
    save_pretrained(_drawn(Model(config)), config, folder, published=published)


def _write_run(folder: Path, objective: str, config: Mapping[str, Any]) -> None:
    tokenizer = tasks.make(config["task"]["name"], **config["task"]["options"]).tokenizer
    model = Model(ModelConfig(**complete_fields(config["model"], tokenizer.vocab_size)))
    size = model.config.hidden_size
    kernel = jnp.asarray(np.random.default_rng(1).standard_normal(size) * size**-0.5, jnp.float32)
    params = _drawn(model) | {"value_head": {"kernel": kernel, "bias": jnp.zeros((), jnp.float32)}}
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"params": params}, {})
    checkpoints.close()
    recorded = {**config, "objective": {"name": objective}, "rewards": dataclasses.asdict(RewardConfig())}
    recorded |= {"optimizer": {}, "warm_start": {}, "checkpoint": {}}
    write_json(folder / "config.json", {"format": FORMAT, "config": recorded, "config_hash": "stand-in"})


def _drawn(model: Model) -> Any:
    """Parameters at the scale of `Model.init`, drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name or "bias" in name:
            return jnp.asarray(np.full(leaf.shape, "norm" in name, leaf.dtype))
        fan_in = leaf.shape[-1 if "embedding" in name else -2]
        return jnp.asarray((rng.standard_normal(leaf.shape) * fan_in**-0.5).astype(leaf.dtype))

    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)
