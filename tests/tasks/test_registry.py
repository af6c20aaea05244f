from types import SimpleNamespace

import pytest

from jaxrl_llm import tasks


def test_names():
    assert set(tasks.names()) >= {"addition", "countdown", "modular", "sort", "subtraction"}


def test_a_task_knows_its_options_and_lengths():
    task = tasks.make("sort", digits=4, test_size=16)
    assert (task.name, task.prompt_length, task.answer_length) == ("sort", 5, 5)
    assert (task.train_size, task.test_size, dict(task.options)) == (8192, 16, {"digits": 4})
    assert task.tokenizer.vocab_size == 13


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("sort", {}, "sort: Write the digits of the prompt in ascending order"),
        ("addition", {"digits": 2}, "addition: Add two numbers of at most 2 digits"),
        ("jsonl", {"path": "a/questions.jsonl"}, "jsonl: Answer the prompts of a/questions.jsonl"),
        ("gsm8k", {}, "gsm8k: Solve word problems of school arithmetic"),
    ],
)
def test_a_task_says_what_it_asks(name, options, sentence):
    assert tasks.make(name, **options).sentence == sentence


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("srot", {}, "unknown task 'srot' .did you mean 'sort'.*known tasks: .*countdown"),
        ("zzz", {}, "unknown task 'zzz'; known tasks"),
        ("sort", {"digit": 3}, "'sort' has no option 'digit' .did you mean 'digits'.*its options: digits, train_size"),
        ("sort", {"digits": 0}, r"sort\.digits=0 is out of range; give sort\.digits between 1 and 64"),
        ("sort", {"digits": "3"}, r"sort\.digits='3' must be a whole number, for example 4"),
        ("sort", {"digits": True}, r"sort\.digits=True must be a whole number"),
        ("addition", {"digits": 19}, r"addition\.digits=19 is out of range"),
        ("subtraction", {"reverse": 1}, r"subtraction\.reverse=1 must be True or False"),
        ("modular", {"modulus": 1}, r"modular\.modulus=1 is out of range"),
        ("modular", {"operators": "+/"}, r"modular\.operators='\+/'"),
        ("modular", {"operators": ""}, r"modular\.operators=''"),
        ("modular", {"operators": "++"}, r"modular\.operators='\+\+'"),
        ("countdown", {"numbers": 7}, r"countdown\.numbers=7 is out of range"),
        ("countdown", {"maximum": 1}, r"countdown\.maximum=1 is out of range"),
        ("countdown", {"target_maximum": 9}, r"countdown\.target_maximum=9 is out of range"),
        ("sort", {"train_size": 0}, r"sort\.train_size=0 is out of range"),
    ],
)
def test_bad_names_and_options_are_explained(name, options, message):
    with pytest.raises(ValueError, match=message):
        tasks.make(name, **options)


def test_two_tasks_cannot_share_a_name():
    def sort(*, digits: int = 1):
        """Never made: its name is taken."""

    with pytest.raises(ValueError, match=r"'sort' is already registered by jaxrl_llm\.tasks\.sort"):
        tasks.register(sort)


def test_an_option_needs_a_default():
    def unfinished(*, digits: int):
        """Never made: its option has no default."""

    with pytest.raises(ValueError, match="option 'digits' of task 'unfinished' needs a default"):
        tasks.register(unfinished)
    assert "unfinished" not in tasks.names()


def test_a_task_needs_a_tokenizer():
    """Asked without the tests' own check of types."""
    mute = SimpleNamespace(name="mute", sample=print, source=None, tokenizer=None)
    with pytest.raises(ValueError, match=r"mute\.tokenizer=None is none; give it, as tasks\.ByteTokenizer\(\)"):
        tasks.Task.__post_init__(mute)
