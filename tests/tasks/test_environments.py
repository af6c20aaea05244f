"""The environments that ship, against their best play; how an observation continues a chat; what is refused."""

import dataclasses
import importlib
import importlib.util
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.check.data_rows import right_answers
from jaxrl_llm.config.loading import load_module
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.pass_rate import WHOLE
from jaxrl_llm.run.assembly import evaluator
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import named_tasks
from jaxrl_llm.tasks.drawn_splits import generate
from jaxrl_llm.tasks.environments.calculator import Calculator
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Step
from jaxrl_llm.tasks.environments.guess import Guessing
from jaxrl_llm.tasks.environments.reading import Continuation, opened
from jaxrl_llm.tasks.tokenizers.chat_template import rendered
from tests.reference.page_commands import ROOT, blocks
from tests.reference.tiny_environments import Counting
from tests.reference.tiny_rollout import tiny


def played(low, high, hidden, turns, guess):
    """(reward, turns) of one game against a guesser of (low, high)."""
    game = Guessing()
    game.init({"low": low, "high": high, "hidden": hidden, "turns": turns})
    for turn in itertools.count(1):
        number = guess(low, high)
        heard, reward, done = game.step(f"{number:02}")
        if done:
            return reward, turn
        low, high = (number + 1, high) if heard == "h" else (low, number - 1)


@pytest.mark.parametrize(("numbers", "turns", "mean_turns"), [(31, 5, 129 / 31), (15, 4, 49 / 15), (63, 6, 321 / 63)])
def test_halving_wins_every_game(numbers, turns, mean_turns):
    """A full binary tree of depth d holds 2^(k-1) numbers at turn k: sum k 2^(k-1) = (d - 1) 2^d + 1 turns in all."""
    found = [played(1, numbers, hidden, turns, lambda a, b: (a + b) // 2) for hidden in range(1, numbers + 1)]
    assert [reward for reward, _ in found] == [1.0] * numbers
    assert np.mean([turn for _, turn in found]) == pytest.approx(mean_turns)
    assert sum(turn for _, turn in found) == (turns - 1) * 2**turns + 1


def test_one_turn_less_loses_half():
    found = [played(1, 31, hidden, 4, lambda a, b: (a + b) // 2)[0] for hidden in range(1, 32)]
    assert sum(found) == 15  # the leaves are out of reach


@pytest.mark.parametrize("answer", ["", "7", "007", "ab", "19", "51", "²²"])
def test_what_is_no_number_of_the_range_ends_the_game(answer):
    game = Guessing()
    game.init({"low": 20, "high": 50, "hidden": 30, "turns": 5})
    assert game.step(answer) == ("", 0.0, True)


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        ("?47*86", ("4042", 0.0, False)),
        ("?10-99", ("-89", 0.0, False)),
        ("?1+1", ("2", 0.0, False)),
        ("!4042", ("", 1.0, True)),
        ("!4041", ("", 0.0, True)),
        ("!", ("", 0.0, True)),
        ("4042", ("e", 0.0, False)),
        ("?47/86", ("e", 0.0, False)),
        ("?9999*99", ("e", 0.0, False)),  # six characters
        ("?", ("e", 0.0, False)),
    ],
)
def test_the_calculator_computes_and_judges(answer, heard):
    tool = Calculator()
    tool.init({"answer": "!4042", "prompt": "four seven times eight six="})
    assert tool.step(answer) == heard


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_demonstrations_are_episodes_of_the_environment(name):
    """Played again they are heard the same, and the supervised rows learn the answers alone."""
    task = tasks.make(name)
    rng, rewards = np.random.default_rng(1), []
    for _ in range(200):
        prompt, answer, row = task.sample(rng)
        assert len(task.tokenizer.encode(prompt)) <= task.prompt_length
        game, said = task.environment(), row[DEMONSTRATION]
        game.init({**row, "prompt": prompt, "answer": answer})
        for i in range(0, len(said), 2):
            assert len(task.ids_of_answer(said[i])) <= task.answer_length
            heard, reward, done = game.step(said[i])
            assert done == (i == len(said) - 1)
            assert done or heard == said[i + 1]
        rewards.append(reward)
    assert 0.4 < np.mean(rewards) < 0.65  # uniform guesses win .543; half of the sums and few others are right


def test_supervised_rows_learn_answers_and_read_observations(tmp_path):
    task = tasks.make("guess", train_size=32, test_size=8)
    batch = next(tasks.supervised(task, seed=0, batch_size=4, data_dir=tmp_path))
    examples = tasks.examples(task, "train", tmp_path)
    for uid, tokens, mask, held in zip(*(batch[k] for k in ("uid", "tokens", "loss_mask", "segment_ids")), strict=True):
        said = examples[int(uid)]["row"][DEMONSTRATION]
        text = task.tokenizer.encode(examples[int(uid)]["prompt"])
        learnt = [0] * len(text)
        for i, one in enumerate(said):
            ids = [*task.tokenizer.encode(one), *([1] if i % 2 == 0 else [])]
            text, learnt = text + ids, learnt + [1 - i % 2] * len(ids)
        assert tokens[: held.sum()].tolist() == text
        assert mask.tolist() == [bool(x) for x in learnt] + [False] * (len(mask) - len(learnt))


def test_a_prompt_may_come_again_with_another_row():
    """What tells the episodes of one prompt apart is what the environment hides, and not how they were demonstrated."""

    def sample(rng):
        return "?", "b", {"hidden": int(rng.integers(64)), DEMONSTRATION: [str(rng.random())]}

    task = tasks.Task("hide", 1, 2, tasks.ByteTokenizer(), sample=sample, environment=Counting, turns=2, train_size=40,
                      test_size=4)  # fmt: skip
    splits = generate(task)
    hidden = {name: [one["row"]["hidden"] for one in split.examples] for name, split in splits.items()}
    assert len({*hidden["train"], *hidden["test"]}) == 44


CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
DROPPING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].lstrip() }}<|end|>\n{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Templated:
    """A byte tokenizer with a chat template, whose <|end|> is one id."""

    template: str
    end_ids = (1,)
    pad_id, vocab_size, fingerprint = 0, 258, "templated"

    def encode(self, text):
        first, *others = text.split("<|end|>")
        ids = [byte + 2 for byte in first.encode()]
        return ids + [i for one in others for i in (1, *(byte + 2 for byte in one.encode()))]

    encode_plain = encode
    decode = tasks.ByteTokenizer.decode

    def chat(self, messages, *, add_generation_prompt=True, **options):
        import jinja2

        template = jinja2.Template(self.template + HEADER)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **options)


def chatting(template, **fields):
    prompting = tasks.Prompting(chat=True)
    return tasks.Task("talk", 99, 9, Templated(template), sample=lambda rng: ("a", "b"), environment=Counting, turns=2,
                      observation_length=64, prompting=prompting, **fields)  # fmt: skip


def test_an_observation_continues_a_chat_with_its_end_once():
    own = Continuation(chatting(CHATML))
    own.check()
    text = "\n<|user|>higher<|end|>\n<|assistant|>"
    assert own.ids("higher", ended=True) == Templated("").encode(text)
    assert own.ids("higher", ended=False) == [1, *Templated("").encode(text)]
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "2"}]
    assert own.ids(tools, ended=True) == Templated("").encode("\n<|tool|>4<|end|>\n<|tool|>2<|end|>\n<|assistant|>")


def test_a_template_that_drops_thoughts_is_refused_unless_the_user_keeps_them():
    with pytest.raises(ValueError, match=r"drops the thoughts of earlier turns, .* set task.keep_turns=True"):
        Continuation(chatting(DROPPING)).check()
    with pytest.raises(ValueError, match="drops the thoughts"):  # before a run begins
        evaluator(Model(tiny()), chatting(DROPPING), {}, 1, 9, sampling=WHOLE)
    kept = Continuation(chatting(DROPPING, keep_turns=True))
    kept.check()
    assert kept.ids("h", ended=True) == Continuation(chatting(CHATML)).ids("h", ended=True)


@dataclasses.dataclass(frozen=True)
class Published(Templated):
    """Every <|name|> is one id, and what a template writes first after an answer is taken for its end."""

    ids: dict = dataclasses.field(default_factory=dict, compare=False)

    def encode(self, text):
        parts = re.split(r"(<[|\uff5c]?[^<>]+>)", text)
        return [i for part in parts for i in ([self.ids.setdefault(part, len(self.ids) + 1)] if part else [])]

    def chat(self, messages, *, add_generation_prompt=True, **options):
        values = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None}
        return rendered(
            self.template, messages, values | {"add_generation_prompt": add_generation_prompt}, "2026-11-28"
        )


REFUSED = {
    "drops the thoughts": "deepseek_r1_distill deepseekv3 glm4moe lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl "
    "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra",
    "the last turn in another way": "qwen3 qwen3_5_nothink qwen3_5_think qwen3_6",
    "does not write an answer once": "idefics3 smolvlm",  # images: content in parts
    "no attribute 'text'": "llava_next",
}


@pytest.mark.slow
def test_the_templates_of_published_models():
    """The 41 of TRL's wheel: 24 continue an answer, the others are refused with the reason."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs the templates of TRL")
    paths = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    expected = {name: why for why, names in REFUSED.items() for name in names.split()}
    said = {}
    for path in paths:
        if path.stem.endswith("_training"):
            continue
        task = dataclasses.replace(chatting(CHATML), tokenizer=Published(path.read_text()))
        try:
            Continuation(task).check()
        except ValueError as error:
            said[path.stem] = str(error)
    assert said.keys() == expected.keys()
    assert all(why in said[name] for name, why in expected.items())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", "begins with none of the ids"),
        ("{% for m in messages %}{{ m.content if m.role == 'assistant' }}<|end|>{% endfor %}", "drops the observation"),
        ("{{ messages[0].content }}<|end|>", "does not write an answer once"),
        (CHATML.replace("{{ m.content | trim }}", "{{ '#' if loop.last }}{{ m.content }}"), "last turn in another way"),
    ],
)
def test_a_template_without_a_continuation_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        Continuation(chatting(template)).check()


def test_the_example_of_the_page_is_a_task(tmp_path, monkeypatch):
    """A worker loads it by its file, as a config's, and halving finds each of the 9 doors in 4 turns."""
    code, _ = blocks(ROOT / "docs" / "environments.md", "python")
    (tmp_path / "doors.py").write_text(code)
    monkeypatch.setattr(named_tasks, "_REGISTERED", {})
    config = load_module(tmp_path / "doors.py").get_config("smoke")
    task = validate(config).task
    assert task.asks == "Open one of 9 doors"
    doors = opened(task)
    for prize in "159":
        assert doors("init", {0: {"prize": prize}}) == {0: Step(done=False)}
        low, high, said = 1, 9, None
        while said is None or not said.done:
            middle = (low + high) // 2
            said = doors("step", {0: str(middle)})[0]
            low, high = (middle + 1, high) if said.observation == "r" else (low, middle - 1)
        assert said == Step("", 1.0, True, "")


def test_a_check_does_not_ask_an_environment_for_the_verdict_on_a_right_answer():
    task = tasks.make("guess")
    found = right_answers(task, [task.sample(np.random.default_rng(0))], best=0.5)
    assert (found.verdict, found.seen) == ("ok", "an environment judges episodes; the best one sampled gets 0.5")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards.functions": ("exact",)}, "rewards.functions"),
        ({"task.think_end_token": "</think>"}, "task.think_end_token"),
        ({"rollout.max_episode_length": 11}, "set it to at least 12"),
        ({"task.name": "sort", "task.options": {}, "rollout.max_turns": 2}, "task.name='sort' has no environment"),
        ({"task.name": "sort", "task.options": {}, "rewards.turn_gamma": 0.9}, "rewards.turn_gamma=0.9"),
    ],
)
def test_what_turns_do_not_do_yet_is_refused_by_name(fields, message):
    config = importlib.import_module("configs.turns").get_config("smoke")
    with config.unlocked():
        config.update_from_flattened_dict(fields)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_bounds_of_the_run_replace_the_tasks():
    config = importlib.import_module("configs.turns").get_config("smoke")
    config.rollout.max_turns, config.rollout.max_observation_length, config.rollout.max_episode_length = 3, 4, 20
    settings = validate(config)
    assert (settings.task.turns, settings.task.observation_length) == (3, 4)
    assert (settings.sampled_length, settings.task.row_length(3)) == (9, 20)  # 9 + 3 * 3 + 2 * 4 without the bound


def test_several_turns_need_an_environment():
    with pytest.raises(ValueError, match="needs a verify for one turn, or an environment for turns=2"):
        dataclasses.replace(tasks.make("sort"), turns=2)
    with pytest.raises(ValueError, match="needs a verify"):
        tasks.Task("none", 1, 2, tasks.ByteTokenizer(), sample=lambda rng: ("a", "b"))


def test_the_file_of_an_environment_is_imported_once_for_all_episodes(tmp_path):
    (tmp_path / "doors.py").write_text(
        "import os\n"
        "PROCESS = os.getpid()\n"
        "class Doors:\n"
        "    def init(self, row): ...\n"
        "    def step(self, answer): return f'{PROCESS} {os.getpid()}', 1.0, True\n"
        "    def close(self): ...\n"
    )
    doors = load_module(tmp_path / "doors.py").Doors
    open_episodes = opened(dataclasses.replace(tasks.make("guess"), environment=doors, isolated=True))
    open_episodes("init", {number: {} for number in range(3)})
    steps = open_episodes("step", dict.fromkeys(range(3), ""))
    said = [step.observation.split() for step in steps.values()]
    assert len({importing for importing, _ in said}) == 1
    assert len({own for _, own in said}) == 3
