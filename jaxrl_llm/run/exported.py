"""A policy in the Hugging Face layout (weights, configuration and the tokenizer's files), its adapters as PEFT reads
them, and the card of both on a hub."""

import json
from pathlib import Path

from jaxrl_llm import tasks
from jaxrl_llm.ground import hub_names
from jaxrl_llm.models import ADAPTER_CONFIG, Published, read_published, save_adapters, save_pretrained
from jaxrl_llm.records.recorded import read_record
from jaxrl_llm.run.loaded import LoadedPolicy
from jaxrl_llm.run.tokenizer_files import tokenizer_files

# What the names of a tokenizer's files begin with.
_OF_THE_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")

_CARD = "A policy that was trained with jaxrl_llm, policy optimisation of language models in JAX."


def export(policy: LoadedPolicy, folder: Path) -> None:
    """Write a policy with its configuration and its tokenizer.

    Raises:
        FileExistsError: the folder holds a checkpoint already.
        ValueError: no published family computes this model, or its tokenizer has no tokenizer.json.
    """
    pretrained = "" if policy.run is None else policy.run.settings.pretrained
    published = read_published(pretrained) if pretrained else Published({}, {})
    own = policy.tokenizer  # which the run may have taken from elsewhere
    if "tokenizer.json" not in published.files or tasks.load_tokenizer(pretrained).fingerprint != own.fingerprint:
        published = with_tokenizer(published, own)
    save_pretrained(policy.params, policy.model.config, folder, published=published)


def export_adapters(policy: LoadedPolicy, folder: Path) -> None:
    """Write the adapters of a run alone, as PEFT reads them beside the checkpoint that the run started from.

    Raises:
        FileExistsError: as `save_adapters`.
        ValueError: the run has no adapters, or no published checkpoint is their base.
    """
    assert policy.run is not None
    s, merged = policy.run.settings, "leave --adapter out, which exports the policy with all its weights"
    if not s.lora.rank:
        raise ValueError(f"--adapter: the run has lora.rank=0 and trains no adapters; {merged}")
    if not s.pretrained or s.warm_start.steps or s.pretrained.endswith(".gguf"):
        kind = "a GGUF file" if s.pretrained.endswith(".gguf") else "the run's own start"
        raise ValueError(f"--adapter: the base of the adapters is {kind}, which PEFT cannot read; {merged}")
    adapters = {name: x for name, x in policy.state.policy.trained.items() if name != "value_head"}
    base, _, revision = s.pretrained.partition("@")
    if not hub_names.is_name(s.pretrained):
        base, revision = str(Path(s.pretrained).expanduser().absolute()), ""
    save_adapters(adapters, s.lora, policy.model, folder, base=base, revision=revision or None)


def write_card(policy: LoadedPolicy, workdir: Path, folder: Path) -> None:
    """Write README.md with where the policy comes from, unless the folder has one."""
    assert policy.run is not None
    s, record, path = policy.run.settings, read_record(workdir) or {}, folder / "README.md"
    if path.exists():
        return
    about = {"library_name": "peft" if (folder / ADAPTER_CONFIG).exists() else "transformers"}
    about |= {"base_model": s.pretrained.partition("@")[0]} if hub_names.is_name(s.pretrained) else {}
    head = "\n".join(f"{name}: {value}" for name, value in about.items())
    source = record.get("source", {})
    config = ":".join(filter(None, (Path(source.get("file", "")).stem, source.get("variant", ""))))
    rows = {
        "objective": s.objective_name,
        "task": s.task.name,
        "started from": Path(s.pretrained).name if s.pretrained and "base_model" not in about else s.pretrained,
        "steps": f"{policy.step} of {s.rollout.prompts} prompts with {s.rollout.group_size} answers each",
        "config": config,
        "commit of jaxrl_llm": record.get("commit"),
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in rows.items() if value)
    path.write_text(f"---\n{head}\ntags:\n- jaxrl_llm\n- {s.objective_name}\n---\n\n{_CARD}\n\n{lines}\n")


def with_tokenizer(published: Published, tokenizer: tasks.Tokenizer) -> Published:
    """The tokenizer's files instead of any others; generation settings other than ids are kept."""
    files = {name: x for name, x in published.files.items() if not name.startswith(_OF_THE_TOKENIZER)}
    written = tokenizer_files(tokenizer)
    settings = json.loads(files.get("generation_config.json", b"{}")) | json.loads(written["generation_config.json"])
    written["generation_config.json"] = json.dumps(settings, indent=2).encode() + b"\n"
    ids = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in settings}
    return Published({**ids, **published.config}, files | written)
