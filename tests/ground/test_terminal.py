"""What others wrote reaches the terminal as text."""

import io

import pytest

from jaxrl_llm import evaluation, generate
from jaxrl_llm.config.command_line import complain
from jaxrl_llm.ground.terminal import one_line, visible, wrapped
from jaxrl_llm.records.screen import Screen

WRITTEN = "\x1b]0;x\x07\x1b[2J\rok\x9b1m"
SHOWN = r"\x1b]0;x\x07\x1b[2J\x0dok\x9b1m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (WRITTEN, SHOWN),
        ("a\n\tb", "a\n\tb"),
        ("naïve 日本語 👩‍👩‍👧 e\u0301 \u00a0 עברית\u200f", None),
        ("\u202etxt.exe\u2066\u2028", r"\u202etxt.exe\u2066\u2028"),
        ("half \ud83d", r"half \ud83d"),
        ("", None),
    ],
)
def test_what_could_steer_a_terminal_is_written_out(text, shown):
    assert visible(text) == (text if shown is None else shown)


def test_notes_errors_and_answers(capsys):
    stream = io.StringIO()
    Screen(1, stream=stream).note(WRITTEN)
    assert stream.getvalue() == f"{SHOWN}\n"
    assert complain(ValueError(f"no {WRITTEN}"), 2) == 2
    assert capsys.readouterr().err == f"error: no {SHOWN}\n".replace(r"\x0d", " ")  # in one line
    assert generate._print(iter([WRITTEN, "\n", "é"])) == f"{WRITTEN}\né"
    assert capsys.readouterr().out == f"{SHOWN}\né\n"


def test_samples_of_an_evaluation():
    row = {"prompt": WRITTEN, "greedy": WRITTEN, "reward": 1.0, "sampled": [WRITTEN], "sampled_reward": [0.0]}
    assert evaluation._readable(row, solved=1.0) == f"{SHOWN}  greedy: {SHOWN}   sampled: {SHOWN} ✗"


def test_a_line_keeps_both_ends_and_steers_nothing():
    assert one_line("a\n\tb\x07", 20) == r"a\n\tb\x07"
    assert one_line("0123456789" * 3, 15) == "01234 ... 56789"
    assert one_line("0123456789" * 3, 30) == "0123456789" * 3


def test_lines_break_at_words_and_no_path_does():
    assert wrapped("one two three\n    four five six", 12) == "one two\n  three\n    four\n  five six"
    assert wrapped("see /a/long-long/path now", 10) == "see\n  /a/long-long/path\n  now"
