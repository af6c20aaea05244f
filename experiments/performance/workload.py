"""The workload that is timed: the shapes of a model, its prompts and its answers. Imports neither jax nor torch."""

import dataclasses
import json
import math
import random
import time
from pathlib import Path

__all__ = ["Workload", "gemm_gflops", "load", "make_tokenizer", "read_gb_s", "reward_of"]

_FOLDER = Path(__file__).parent / "workloads"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A Qwen3-MoE (E = 0: Qwen3) and a rollout of NP prompts with G answers each.

    L layers · d width · H heads · KV key heads · hd head size · E experts · k per token · ff width of an expert ·
    V vocabulary · P prompt tokens · C answer tokens · NP prompts · G answers a prompt.

    lengths: None = every answer has C tokens (EOS is never sampled); "lognormal" or "lognormal:SEED" = answer lengths
    with median C / 10 whose longest is C.
    """

    L: int
    d: int
    H: int
    KV: int
    hd: int
    E: int
    k: int
    ff: int
    V: int
    P: int
    C: int
    NP: int
    G: int
    lengths: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("L", "d", "H", "KV", "hd", "ff", "P", "C", "NP", "G"):
            if getattr(self, field) < 1:
                raise ValueError(f"workload.{field}={getattr(self, field)} must be at least 1")
        if self.V < 97:
            raise ValueError(f"workload.V={self.V} must be at least 97: a pad, an unknown and 95 printable characters")
        if self.lengths is not None and self.lengths.partition(":")[0] != "lognormal":
            raise ValueError(f"workload.lengths={self.lengths!r} is not known; use lognormal or lognormal:SEED")

    @property
    def rows(self) -> int:
        return self.NP * self.G

    @property
    def active_parameters(self) -> int:
        """Parameters that act on one token, without the embedding table."""
        attention = 2 * self.d * self.hd * (self.H + self.KV) + 2 * self.hd
        feed_forward = (self.k or 1) * 3 * self.d * self.ff + self.d * self.E
        return self.L * (attention + feed_forward + 2 * self.d) + self.V * self.d + self.d

    @property
    def parameters(self) -> int:
        idle = self.L * max(0, self.E - self.k) * 3 * self.d * self.ff if self.E else 0
        return self.active_parameters + idle + self.V * self.d

    def train_flops(self) -> float:
        """6 x active parameters x tokens: forward 2, backward 4; attention's own products are left out."""
        return 6.0 * self.active_parameters * self.total_tokens()

    def answer_lengths(self) -> list[int]:
        """Tokens of every answer, in (prompt, sample) order."""
        if self.lengths is None:
            return [self.C] * self.rows
        rng = random.Random(int(self.lengths.partition(":")[2] or 0))
        # sigma = log(10) / 2.33: one answer in a hundred reaches ten medians.
        sigma = math.log(10) / 2.33
        drawn = [min(self.C, max(1, round(self.C / 10 * math.exp(rng.gauss(0, sigma))))) for _ in range(self.rows)]
        drawn[rng.randrange(self.rows)] = self.C
        return drawn

    def answer_tokens(self) -> int:
        return sum(self.answer_lengths())

    def total_tokens(self) -> int:
        return self.rows * self.P + self.answer_tokens()

    def prompts(self, count: int, seed: int = 0) -> list[str]:
        """Sums as text, each exactly P characters, so P tokens."""
        rng = random.Random(seed)
        texts = (f"Compute {rng.randrange(1000):03d}+{rng.randrange(1000):03d} =" for _ in range(count))
        return [text.ljust(self.P)[: self.P] for text in texts]


def load(name: str) -> Workload:
    """An included workload (S, M, ...) or any JSON file with the fields of `Workload`.

    Raises:
      ValueError: no such file, or fields that a workload does not have or that are missing.
    """
    path = _FOLDER / f"{name}.json" if (_FOLDER / f"{name}.json").is_file() else Path(name)
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in _FOLDER.glob("*.json")))
        raise ValueError(f"workload={name!r} is neither one of {shipped} nor a JSON file")
    fields = json.loads(path.read_text())
    try:
        return Workload(**{"name": path.stem} | fields)
    except TypeError as error:
        raise ValueError(f"workload={name!r}: {error}") from None


def reward_of(text: str) -> float:
    """Share of digits: differs between the answers of an untrained model, so that groups have a gradient."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def gemm_gflops(size: int = 1536, repeats: int = 5) -> float:
    """float32 matrix product rate of one core, best of `repeats`: the basis of the floor. That of numpy or of XLA,
    whichever is faster: numpy's leads on the Intel Xeons, XLA's by twice on the AMD EPYC that were measured."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    factors = [rng.random((size, size), np.float32) for _ in range(2)]
    compiled, best = jax.jit(jax.numpy.matmul), math.inf
    for product, (a, b) in ((np.matmul, factors), (compiled, [jax.device_put(x) for x in factors])):
        for _ in range(repeats + 1):
            start = time.process_time()
            jax.block_until_ready(product(a, b))
            best = min(best, time.process_time() - start)
    return 2 * size**3 / best / 1e9


def read_gb_s(size: int = 2**27, repeats: int = 8) -> float:
    """GB/s of one core that reads an array of 0.5 GB from its start to its end, numpy's x . x, best of `repeats`."""
    import numpy as np

    x, best = np.ones(size, np.float32), math.inf
    for _ in range(repeats):
        start = time.process_time()
        np.dot(x, x)
        best = min(best, time.process_time() - start)
    return x.nbytes / best / 1e9


def make_tokenizer(vocabulary: int):
    """One token a character (0 pad, 1 unknown, printable ASCII, fillers); EOS = `vocabulary` lies outside the model."""
    # The peers' environments have these.
    from tokenizers import (  # pyright: ignore[reportMissingImports]
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    characters = [chr(i) for i in range(32, 127)] + [chr(0x4E00 + i) for i in range(vocabulary - 97)]
    table = {token: i for i, token in enumerate(["<pad>", "<unk>", *characters, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", padding_side="left"
    )
