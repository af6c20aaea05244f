"""A training step and a decode step of 0.6 to 1 B parameters on one accelerator, against what the device could do.

python -m experiments.performance.accelerator --json OUT.json [--model dense moe 0.6b] [--smallest]

Compute is bfloat16; parameters and gradients are float32 where they and the moments, which always are, take at most
half of the memory, else bfloat16. A model runs in a process of its own, and its figures are in the file when it ends.
A figure is the wall time of the best repeat; what the first one took more is `compile s`.

A model is measured after the kernels that it takes were held to plain products (`kernels.py`); one that is wrong on
this device is an error.

MFU        model FLOPs (`roofline.train_flops`) / seconds / peak bfloat16 FLOP/s; a step is all micro-batches and AdamW
bandwidth  bytes that a decode step must read (weights of the batch once, and the cache) / seconds / bytes a second;
           seconds a step = (whole answers - answers of one token) / (tokens - 1), so without the prefill
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.performance import kernels, roofline
from jaxrl_llm import objectives
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model, ModelConfig, choose_attention
from jaxrl_llm.models.experts.implementations import choose_implementation
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.layout import UpdateConfig, lay_out
from jaxrl_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner

__all__ = ["CASES", "SMALLEST", "Case", "implementations", "measure", "parameter_dtype", "table"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and rows of prompt + answer tokens: `rows` in a training step, `slots` decoded at once in groups."""

    model: ModelConfig
    prompt: int = 256
    answer: int = 768
    rows: int = 64
    micro_batch_rows: int = 8
    slots: int = 64
    group: int = 8

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("answer", 2), ("rows", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}; set --{name}")
        for whole, part in (("rows", "micro_batch_rows"), ("slots", "group")):
            if getattr(self, part) < 1 or getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{part}={getattr(self, part)} must divide {whole}={getattr(self, whole)}")


_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
_TINY = {"vocab_size": 128, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
_COMMON = {"tie_word_embeddings": True, "dtype": "bfloat16"}

CASES = {
    # Blocks of Qwen3-1.7B, half as many: 1.02 B parameters.
    "dense": Case(ModelConfig(**_QWEN3, **_COMMON, num_hidden_layers=14, hidden_size=2048, intermediate_size=6144)),
    # Attention of Qwen3-0.6B; experts as narrow for the width as Qwen3-30B-A3B's, eight a token: 0.97 B, 0.31 B active.
    "moe": Case(
        ModelConfig(
            **_QWEN3,
            **_COMMON,
            num_hidden_layers=10,
            hidden_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=384,
        )
    ),
    # Qwen3-0.6B with long answers.
    "0.6b": Case(
        ModelConfig(**_QWEN3, **_COMMON, num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, remat="dots"),
        prompt=512,
        answer=3584,
        rows=32,
        slots=32,
    ),
}
_SMALL = {"prompt": 8, "answer": 24, "rows": 4, "micro_batch_rows": 2, "slots": 4, "group": 2}
SMALLEST = {
    "dense": Case(ModelConfig(**_TINY, **_COMMON, num_hidden_layers=1, intermediate_size=64), **_SMALL),
    "moe": Case(
        ModelConfig(**_TINY, **_COMMON, num_hidden_layers=1, num_experts=4, moe_intermediate_size=16), **_SMALL
    ),
    "0.6b": Case(ModelConfig(**_TINY, **_COMMON, num_hidden_layers=2, intermediate_size=64, remat="dots"), **_SMALL),
}


def implementations(config: ModelConfig) -> dict[str, str | None]:
    """The implementations that the model itself picks on this platform."""
    attention = choose_attention(config, sharding.platform(None))
    experts = choose_implementation(config.experts_implementation) if config.num_experts else None
    return {"attention": attention, "experts": experts}


def parameter_dtype(count: int, memory: int | None) -> str:
    """float32 if parameters, moments, gradients and those of a micro-batch take at most half of the memory (bytes)."""
    return "float32" if memory is None or 5 * 4 * count <= memory / 2 else "bfloat16"


def measure(
    case: Case, repeats: int, peak_flops: float | None = None, bandwidth: float | None = None
) -> dict[str, Any]:
    """Every figure of one model on the first device; MFU and the share of the bandwidth are None on an unknown one.

    Raises:
      ValueError: repeats < 1 (the first run compiles), or flash attention where there is none.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1, the first run compiles; set --repeats")
    here = jax.devices()[0]
    device = roofline.device_named(here.device_kind, peak_flops, bandwidth)
    count, memory = roofline.parameters(Model(case.model)), (here.memory_stats() or {}).get("bytes_limit")
    config = dataclasses.replace(case.model, param_dtype=parameter_dtype(count, memory))
    chosen = implementations(config)
    checked = kernels.attention() if chosen["attention"] == "flash" else {}
    matmul = kernels.grouped() if chosen["experts"] == "grouped" else None
    if matmul is not None:
        kernels.grouped(kernels.MANY, repeats=1)
    case = dataclasses.replace(case, model=config)
    params = Model(config).init_sharded(jax.random.key(0))
    decode = _decode(case, params, repeats, device)  # first: the peak of the memory only grows
    decode["peak_bytes"] = _peak_bytes(here)
    train = _train(case, params, repeats, device)
    train["peak_bytes"] = _peak_bytes(here)
    return {
        "device": device._asdict() | {"platform": here.platform, "jax": jax.__version__},
        "parameters": count,
        "active_parameters": config.active_parameters,
        "param_dtype": config.param_dtype,
        "dtype": config.dtype,
        "remat": config.remat,
        **chosen,
        "attention_kernels": checked,
        "grouped_matmul": matmul,
        "train": train,
        "decode": decode,
    }


def _peak_bytes(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _decode(case: Case, params: Any, repeats: int, device: roofline.Device) -> dict[str, Any]:
    config = case.model
    model, prompts = Model(config), case.slots // case.group
    eos = config.vocab_size  # never sampled
    engine = Engine(model, Sampling(), case.group, case.answer, end_ids=(eos,), dtype=config.dtype)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (prompts, case.prompt)).astype(np.int32)

    def run(answer: int) -> Rollout:
        limits, lengths = np.full(case.slots, answer, np.int32), np.full(prompts, case.prompt, np.int32)
        return engine.generate(params, tokens, lengths, np.arange(prompts), jax.random.key(1), limits)

    whole, compile_s = kernels.times(lambda: run(case.answer), repeats)
    first, _ = kernels.times(lambda: run(1), repeats)
    seconds = (whole - first) / (case.answer - 1)
    used = _experts_used(run(case.answer), case)
    columns = case.prompt + case.answer / 2  # answer token i = 1 .. answer - 1 is fed where prompt + i columns are seen
    weights, cache = roofline.weight_bytes(model, used), roofline.cache_bytes(config, case.slots, columns)
    bound = None if device.bandwidth is None else (weights + cache) / device.bandwidth
    return {
        "slots": case.slots,
        "prompt": case.prompt,
        "answer": case.answer,
        "seconds_per_step": seconds,
        "tokens_per_s": case.slots / seconds,
        "prefill_s": first,
        "experts_used": used,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "bytes_per_step": weights + cache,
        "bandwidth_share": None if bound is None else bound / seconds,
        "compile_s": compile_s,
    }


def _experts_used(trajectory: Rollout, case: Case) -> float:
    """Experts that some token of a decode step chose: mean over layers and steps."""
    if trajectory.routes.sampled is None:
        return 0.0
    fed = np.asarray(trajectory.routes.sampled.experts)[:, :, case.prompt : case.prompt + case.answer - 1]
    return float(np.mean([len(np.unique(step)) for layer in fed for step in layer.swapaxes(0, 1)]))


def _train(case: Case, params: Any, repeats: int, device: roofline.Device) -> dict[str, Any]:
    model, width, rows = Model(case.model), case.prompt + case.answer, case.rows
    adamw = OptimizerConfig(learning_rate=1e-6)
    optimizer = make_optimizer(adamw, 1, masters=False)
    learner = Learner(model=model, objective=objectives.make("grpo"), optimizer=optimizer, rows="padded")
    state = make_state(model, params, learner.optimizer)
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(width) >= case.prompt, (rows, width))
    batch = Rollout(
        tokens=jnp.asarray(rng.integers(0, case.model.vocab_size, (rows, width)), jnp.int32),
        segment_ids=jnp.ones((rows, width), jnp.int32),
        loss_mask=jnp.asarray(mask),
        advantages=jnp.asarray(np.where(mask, rng.standard_normal((rows, 1)), 0), jnp.float32),
        sampler_logprobs=jnp.zeros((rows, width), jnp.float32),
    )
    cut = UpdateConfig(minibatches=1, micro_batch_rows=case.micro_batch_rows)
    layout = lay_out(np.arange(rows), np.full(rows, width), width, cut)
    skipped: Any = None

    def run() -> Any:
        nonlocal state, skipped
        state, metrics = learner.update(state, batch, layout)
        skipped = metrics["update/not_finite"]
        return state

    seconds, compile_s = kernels.times(run, repeats)
    if float(skipped.value) > 0:
        raise RuntimeError("the update was skipped: its loss or gradient is not finite")
    flops = roofline.train_flops(case.model, rows, width)
    return {
        "rows": rows,
        "micro_batch_rows": case.micro_batch_rows,
        "tokens": rows * width,
        "seconds": seconds,
        "tokens_per_s": rows * width / seconds,
        "flops": flops,
        "mfu": None if device.peak_flops is None else flops / seconds / device.peak_flops,
        "compile_s": compile_s,
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: one row a model, and below it what was run."""
    head = (
        "| model | parameters (active) | train s | tokens/s | MFU | decode ms/step | tokens/s | of bandwidth | peak GB "
        "| compile s |"
    )
    rows, notes = [head, "|---" * 10 + "|"], []
    for name, figures in results.items():
        train, decode, device = figures["train"], figures["decode"], figures["device"]
        peak = train["peak_bytes"]
        rows.append(
            f"| {name} | {figures['parameters'] / 1e6:.4g} M ({figures['active_parameters'] / 1e6:.4g} M) "
            f"| {train['seconds']:.4g} | {train['tokens_per_s']:.0f} | {_percent(train['mfu'])} "
            f"| {1e3 * decode['seconds_per_step']:.4g} | {decode['tokens_per_s']:.0f} "
            f"| {_percent(decode['bandwidth_share'])} | {'unknown' if peak is None else f'{peak / 1e9:.1f}'} "
            f"| {train['compile_s']:.0f} + {decode['compile_s']:.0f} |"
        )
        notes.append(
            f"{name}: {device['kind']}, {figures['dtype']} compute, {figures['param_dtype']} parameters, remat "
            f"{figures['remat']}, attention {figures['attention']}, experts {figures['experts'] or 'none'}; "
            f"{train['rows']} rows of {train['tokens'] // train['rows']} tokens in micro-batches of "
            f"{train['micro_batch_rows']}, {decode['slots']} slots"
        )
        for kernel, found in figures["attention_kernels"].items():
            notes.append(f"{name}: attention's kernel {kernel} is the plain form's to {max(found['errors']):.1g}")
        for dtype, kernel in (figures["grouped_matmul"] or {}).items():
            forward, both = (kernel[part] / 1e12 for part in ("forward", "forward_and_backward"))
            notes.append(
                f"{name}: grouped matmul in {dtype} is the dense form's to {max(kernel['errors']):.1g}; {forward:.0f} "
                f"TFLOP/s, with both gradients {both:.0f}"
            )
        if device["peak_flops"] is None or device["bandwidth"] is None:
            notes.append(f"{name}: no figures are known for {device['kind']!r}; set --peak_flops and --bandwidth")
    return "\n".join([*rows, "", *notes])


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _changed(case: Case, arguments: Mapping[str, Any]) -> Case:
    """The case with what the command line sets."""
    of_model = {"remat": "remat", "attention": "attention_implementation", "experts": "experts_implementation"}
    model = {field: arguments[flag] for flag, field in of_model.items() if arguments[flag] is not None}
    shape = {f.name: arguments[f.name] for f in dataclasses.fields(Case) if arguments.get(f.name) is not None}
    return dataclasses.replace(case, **(shape | {"model": dataclasses.replace(case.model, **model)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_argument_group("in place of the model's own")
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--smallest", action="store_true", help="tiny models, for a look at the output on any machine")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--repeats", type=int, default=5, help="runs after the first")
    parser.add_argument("--peak_flops", type=float, help="dense bfloat16 FLOP/s of the device")
    parser.add_argument("--bandwidth", type=float, help="bytes a second of the device's memory")
    cases.add_argument("--remat", help="none, block or dots")
    cases.add_argument("--attention", help="auto, plain or flash")
    cases.add_argument("--experts", help="auto, dense, grouped or blocks")
    for field in dataclasses.fields(Case)[1:]:
        cases.add_argument(f"--{field.name}", type=int)
    given = parser.parse_args()
    results = {}
    try:
        for name in given.model:
            case = _changed((SMALLEST if given.smallest else CASES)[name], vars(given))
            fresh = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
                results[name] = pool.submit(measure, case, given.repeats, given.peak_flops, given.bandwidth).result()
            if given.json:
                Path(given.json).write_text(json.dumps(results, indent=1))
    except (ValueError, RuntimeError) as error:
        remedy = (
            "; set --remat dots, or fewer --micro_batch_rows or --slots" if "RESOURCE_EXHAUSTED" in str(error) else ""
        )
        sys.exit(f"error: {error}{remedy}")
    print(table(results))


if __name__ == "__main__":
    main()
