"""Profile of the time of a rollout or of a training step.

python -m experiments.performance.profile [--workload S] [--phase update|rollout] [--top 25]
python -m experiments.performance.profile --draw 32x49152

Traces one run of the compiled program with jax.profiler, takes each instruction's own time (without what it calls) and
names it by the operation of the source that it was compiled from. A nested loop counts as experts, which holds where
layers are unrolled and a minibatch is one micro-batch, as in S and M. With --draw it times the draw of a token from the
logits of so many rows and a vocabulary.
"""

import argparse
import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.performance import workload as workloads
from experiments.performance.ours import System
from jaxrl_llm.config import start_up
from jaxrl_llm.rollout.sampling import Sampling, draw

__all__ = ["by_kind", "draws", "own_times", "self_times"]

_INSTRUCTION = re.compile(r'%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name="([^"]*)"')
_KINDS = (
    ("attention, matmuls", r"bk[qs][sdx],"),
    ("experts, matmuls", r"(closed_call/while|while/body/while).*dot_general"),
    ("experts, rest", r"closed_call/while|while/body/while|/sort"),
    ("other matmuls", r"dot_general|/transpose$"),
    ("sampling", r"threefry|random|argmax|exponential"),
)


def self_times(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Own time by name of nested spans (start, duration, name) of one thread."""
    own: dict[str, float] = collections.defaultdict(float)
    open_spans: list[tuple[float, str]] = []
    for start, duration, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        if open_spans:
            own[open_spans[-1][1]] -= duration
        own[name] += duration
        open_spans.append((start + duration, name))
    return own


def own_times(run: Callable[[], Any]) -> dict[str, float]:
    """Own nanoseconds of every instruction while `run` runs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        total: dict[str, float] = collections.defaultdict(float)
        for plane in data.planes:
            for line in plane.lines:
                if line.name.startswith("tf_XLA") or plane.name.startswith("/device:"):
                    spans = ((e.start_ns, e.duration_ns, e.name) for e in line.events)
                    for name, time in self_times(spans).items():
                        total[name] += time
    return {n: t for n, t in total.items() if t > 0 and "wait" not in n and not n.startswith("end:")}


def by_kind(own: Mapping[str, float], sources: Mapping[str, str]) -> dict[str, float]:
    """Times summed by the purpose of the instructions; those without a rule are listed by their operation."""
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, time in own.items():
        source = sources.get(name, "")
        kind = next((kind for kind, pattern in _KINDS if re.search(pattern, source)), None)
        kinds[kind or source.rpartition("/")[2] or re.sub(r"[.\d]+$", "", name)] += time
    return kinds


def _largest(times: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:count]


def draws(rows: int, vocabulary: int, repeats: int = 20) -> dict[str, float]:
    """CPU seconds of the draw of one token a row, best of `repeats`, by the sampler's settings.

    Logits are normal. With a deviation of 5 the 1024 most probable of 49152 tokens hold 0.95, as a model's usually do;
    with one of 1 they do not, and top_p sorts the vocabulary.
    """
    normal = jax.random.normal(jax.random.key(0), (rows, vocabulary))
    keys, index = jax.random.split(jax.random.key(1), rows), jnp.zeros(rows, jnp.int32)
    found = {}
    for name, sampling, deviation in (
        ("temperature 1", Sampling(), 5),
        ("top_k 50", Sampling(top_k=50), 5),
        ("top_p 0.95", Sampling(top_p=0.95), 5),
        ("top_p 0.95, flat", Sampling(top_p=0.95), 1),
    ):
        compiled = jax.jit(lambda logits, sampling=sampling: draw(logits, keys, index, sampling))
        logits, best = deviation * normal, float("inf")
        for _ in range(repeats + 1):
            start = process_time()
            jax.block_until_ready(compiled(logits))
            best = min(best, process_time() - start)
        found[name] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="S")
    parser.add_argument("--phase", choices=("update", "rollout"), default="update")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--draw", metavar="ROWSxVOCABULARY", help="time the draw of a token instead")
    arguments = parser.parse_args()
    if arguments.draw:
        start_up.start_jax()
        for name, seconds in draws(*map(int, arguments.draw.split("x"))).items():
            print(f"{1e3 * seconds:7.2f} ms  {name}")
        return
    system = System(workloads.load(arguments.workload))
    run, text = system.compiled(arguments.phase)
    jax.block_until_ready(run())
    own, sources = own_times(run), dict(_INSTRUCTION.findall(text))
    total = sum(own.values())
    print(f"{arguments.phase} of {system.workload.name}: {total / 1e9:.3f} s of own time")
    for kind, time in _largest(by_kind(own, sources), arguments.top):
        print(f"{100 * time / total:5.1f} %  {kind}")
    print("\nlargest instructions")
    for name, time in _largest(own, arguments.top):
        print(f"{100 * time / total:5.1f} %  {name:40s} {sources.get(name, '')[-70:]}")


if __name__ == "__main__":
    main()
