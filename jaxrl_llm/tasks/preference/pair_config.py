"""Which pairs a run learns from: those made of its task, or those of a file."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.ground.declared import Block, declared, declared_by
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.preference.pair_file import read_pairs
from jaxrl_llm.tasks.preference.pair_rules import Pair, PairRules, pairs
from jaxrl_llm.tasks.preference.pair_stream import PairEncoder
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True)
class PairSplits:
    """Pairs without a common prompt, their encoder, and one line on where they come from and what was left out."""

    train: Sequence[Pair]
    test: Sequence[Pair]
    encoder: PairEncoder
    source: str


@dataclasses.dataclass(frozen=True)
class PreferenceConfig(Block, prefix="preference."):
    """Pairs of answers, for objectives on pairs: see docs/preferences.md.

    Held-out pairs have no label noise. A rule that is set beside a file, which it does not reach, is refused.
    """

    file: str = declared("", "JSONL of your own pairs (prompt, chosen, rejected); empty: made of the task")
    bad_lines: str = declared("raise", "lines of that file that are no pair", among={"raise": "", "skip": "and count"})
    corruption: str = declared_by(PairRules, "corruption")
    equal_share: float = declared_by(PairRules, "equal_share")
    label_noise: float = declared_by(PairRules, "label_noise")
    seed: int = declared_by(PairRules, "seed")

    def check(self) -> None:
        rules = dataclasses.asdict(self.rules())
        for name, default in dataclasses.asdict(PairRules()).items():
            if self.file and rules[name] != default:
                raise ValueError(
                    f"preference.{name}={rules[name]!r} makes pairs of a task, and "
                    f"preference.file={self.file!r} brings its own; clear one of them"
                )

    def rules(self) -> PairRules:
        return PairRules(self.corruption, self.equal_share, self.label_noise, self.seed)

    def read(self, task: Task, encoder: PairEncoder, data_dir: str | None) -> PairSplits:
        """The pairs of both splits; a task's pairs are written first if they are not on disk.

        Raises:
            ValueError: see `pairs` and `read_pairs`; or no pair is held out.
        """
        if not self.file:
            clean = dataclasses.replace(self.rules(), label_noise=0.0)
            train = pairs(task, self.rules(), "train", data_dir=data_dir)
            test = pairs(task, clean, "test", data_dir=data_dir)
            return PairSplits(train, test, encoder, f"{len(train)} pairs of {task.name}, {len(test)} held out")
        tokenizer = encoder.tokenizer
        render = tokenizer.chat if isinstance(tokenizer, TextTokenizer) and tokenizer.template else None
        own = read_pairs(Path(self.file).expanduser(), encoder, render=render, bad=self.bad_lines)
        if not own.test:
            raise ValueError(
                f"preference.file={self.file!r} has no held-out pair among {len(own.train)}: one prompt in eight is "
                "held out; give it more prompts"
            )
        skipped = ", ".join(f"{reason} {count}" for reason, count in own.skipped.items())
        said = f"{len(own.train)} pairs of {self.file}, {len(own.test)} held out"
        whole = dataclasses.replace(encoder, prompting=None)
        return PairSplits(own.train, own.test, whole, said + (f"; lines left out: {skipped}" if skipped else ""))


def file_identity(path: str) -> str:
    """A digest of the file's content, or the path itself if there is no such file."""
    file = Path(path).expanduser()
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else path
