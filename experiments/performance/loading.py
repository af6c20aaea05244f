"""Seconds and memory of loading a checkpoint of several GB, against reading its files.

Command:  python -m experiments.performance.loading --folder DIR [--layers 24] [--dtype bfloat16]

DIR receives a generated checkpoint, unless it holds one. Every measurement is a process of its own, in turns, so that
the peaks are apart: `read` goes through the files in pieces of 16 MiB and keeps nothing, `keep` reads them into memory
and leaves them there unchanged, `load` is `load_pretrained`. The difference between `read` and `keep` is the cost of
touching new memory, which every way of loading pays.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.models import Model, ModelConfig, load_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import to_published
from jaxrl_llm.models.checkpoints.safetensors_files import INDEX
from jaxrl_llm.models.checkpoints.tensor_names import stacked_arrays

__all__ = ["generate", "measure"]

_MODEL = ModelConfig(
    vocab_size=65536,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def generate(folder: Path, layers: int, dtype: str) -> None:
    """A checkpoint of random numbers, one file a layer."""
    config = dataclasses.replace(_MODEL, num_hidden_layers=layers, param_dtype=dtype, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    rng, files, total = np.random.default_rng(0), {}, 0
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    tensors: dict[str, dict[str, tuple[int, ...]]] = {}
    for array in stacked_arrays(Model(config)).values():
        for name in array.names.flat:
            layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
            tensors.setdefault(f"model-{layer}.safetensors", {})[name] = array.stored
    for file, shapes in tensors.items():
        made = {name: rng.standard_normal(shape, np.float32).astype(kind) for name, shape in shapes.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(made, file)
        total += sum(x.nbytes for x in made.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(to_published(config)))


def measure(folder: Path, what: str) -> dict[str, float]:
    """Seconds of the clock and of the processor, and the peak of the process's memory above what it had before."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before, began, processor = _peak(), time.perf_counter(), time.process_time()
    size = largest = 0
    if what == "read":
        buffer = memoryview(bytearray(16 * 2**20))
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    size += count
    elif what == "keep":
        kept = [np.fromfile(path, np.uint8) for path in sorted(folder.glob("*.safetensors"))]
        size = sum(x.nbytes for x in kept)
    else:
        model, params = jax.block_until_ready(load_pretrained(folder))
        size = sum(x.nbytes for x in jax.tree.leaves(params))
        largest = max(
            math.prod(array.own) * array.dtype.itemsize for array in stacked_arrays(Model(model.config)).values()
        )
    return {
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - processor,
        "bytes": size,
        "peak": _peak() - before,
        "largest": largest,
    }


def _peak() -> int:
    """The largest resident set of this process so far, in bytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", choices=("read", "keep", "load"))
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, arguments.measure)))
        return
    if not (arguments.folder / "config.json").exists():
        generate(arguments.folder, arguments.layers, arguments.dtype)
    runs: dict[str, list[dict[str, float]]] = {"read": [], "keep": [], "load": []}
    for _ in range(arguments.turns):
        for what, records in runs.items():
            command = [sys.executable, "-m", __spec__.name, "--folder", str(arguments.folder), "--measure", what]
            records.append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    for what, records in runs.items():
        clock, processor = (statistics.median(record[key] for record in records) for key in ("seconds", "processor"))
        size, peak = (records[0][key] / 1e9 for key in ("bytes", "peak"))
        print(
            f"{what}: {size:.2f} GB in {clock:.2f} s ({processor:.2f} s of a core), peak {peak:.2f} GB above the start"
        )
    load = runs["load"][0]
    print(f"peak beyond the parameters: {(load['peak'] - load['bytes']) / load['largest']:.2f} x the largest tensor")


if __name__ == "__main__":
    main()
