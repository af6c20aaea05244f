"""Episodes of gsm8k_multi_turn through SkyRL's own agent loop, with answers that are given.

`python -m tests.reference.skyrl_loop` writes tests/golden/skyrl_loop.json, where skyrl 0.3.0 (--no-deps), skyrl-gym
0.4.0, omegaconf, loguru and torch are installed. No engine runs: it answers what stands below, in ids that no tokenizer
would give.
"""

import asyncio
import importlib
import json
import tempfile
import typing
from pathlib import Path

from tests.reference.published_tokenizers import PUBLISHED

FILE = Path(__file__).parents[1] / "golden" / "skyrl_loop.json"
TOKENIZER, TURNS = "digits", 3
ROWS = [  # the question, what is right, what is answered turn by turn
    ("How many dollars for 9 fox?", "72", ["#### 70", "no", "#### 72"]),
    ("How many?", "5", ["They are #### 5"]),
    ("How lazy?", "9", ["I do not know", "#### 8", "#### 9.0"]),
]


def row(question: str, right: str) -> dict[str, typing.Any]:
    """A row of SkyRL's data."""
    return {
        "prompt": [{"role": "system", "content": "Be quick."}, {"role": "user", "content": question}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": right},
        "extra_info": {"max_turns": TURNS},
    }


class Given:
    """An engine that answers one letter after the other."""

    def __init__(self, tokenizer: typing.Any, answers: list[str]):
        self.tokenizer, self.left = tokenizer, list(answers)

    async def generate(self, asked: typing.Any, model: typing.Any = None) -> dict[str, list[typing.Any]]:
        text = self.left.pop(0)
        ids = [i for letter in text for i in self.tokenizer.encode(letter, add_special_tokens=False)]
        return {"responses": [text], "response_ids": [[*ids, self.tokenizer.eos_token_id]], "stop_reasons": ["stop"]}

    async def finish_session(self, session: str) -> None:
        pass


def played(tokenizer: typing.Any, question: str, right: str, answers: list[str]) -> dict[str, typing.Any]:
    """One episode as SkyRL's loop returns it, and what its environment said by itself."""
    config = importlib.import_module("skyrl.train.config")
    loop = importlib.import_module("skyrl.train.generators.skyrl_gym_generator")
    bounds = {"max_turns": TURNS, "batched": False, "use_conversation_multi_turn": True}
    generator = loop.SkyRLGymGenerator(
        config.GeneratorConfig(**bounds), config.SkyRLGymConfig(max_env_workers=0), Given(tokenizer, answers), tokenizer
    )
    given = row(question, right)
    extras = {key: value for key, value in given.items() if key not in ("prompt", "env_class")}
    out = asyncio.run(generator.agent_loop(given["prompt"], given["env_class"], dict(extras), 64, 4096))
    environment = importlib.import_module("skyrl_gym").make(given["env_class"], extras=extras | {"max_turns": TURNS})
    steps = [environment.step(answer) for answer in answers]
    return {
        "row": given,
        "answers": [[i for c in text for i in tokenizer.encode(c, add_special_tokens=False)] for text in answers],
        "prompt_ids": out.prompt_ids,
        "response_ids": out.response_ids,
        "loss_mask": out.loss_mask,
        "reward": out.reward,
        "steps": [[one["observations"], one["reward"], one["done"]] for one in steps],
    }


def main() -> None:
    import transformers
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # what pydantic wants before Python 3.12
    with tempfile.TemporaryDirectory() as folder:
        PUBLISHED[TOKENIZER].write(Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        episodes = [played(tokenizer, *one) for one in ROWS]
    FILE.write_text(json.dumps({"tokenizer": TOKENIZER, "turns": TURNS, "episodes": episodes}) + "\n")


if __name__ == "__main__":
    main()
