"""Which pairs a run learns from, as its config says: those made of its task, or those of a file."""

import dataclasses

from jaxrl_llm.ground.declared import Block, declared, declared_by

CORRUPTIONS = ("replace", "drop", "repeat", "swap")


@dataclasses.dataclass(frozen=True)
class PairRules(Block, prefix="preference."):
    """How the two answers of a pair are made.

    A larger `label_noise` swaps the pairs of a smaller one and more.
    """

    corruption: str = declared("any", "how a right answer becomes a wrong one", among=(*CORRUPTIONS, "any"))
    equal_share: float = declared(
        0.0, "share of pairs whose answers are equally correct, the shorter one chosen", least=0, most=1
    )
    label_noise: float = declared(
        0.0, "probability that chosen and rejected of a training pair are swapped", least=0, most=1
    )
    seed: int = declared(0, "of the pairs", least=0, most=2**32 - 1)


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
