"""The signals that end a run; those that end a command at once are in config/test_guard.py."""

import os
import signal

from jaxrl_llm.ground.signals import ending_signals, interruptible


def test_a_second_signal_does_what_it_did_before():
    heard = []
    before = {number: signal.signal(number, lambda *got: heard.append(got[0])) for number in ending_signals()}
    ours = {number: signal.getsignal(number) for number in before}
    try:
        with interruptible() as interrupted:
            for number in before:
                os.kill(os.getpid(), number)
            assert interrupted() == next(iter(before))
        assert {number: signal.getsignal(number) for number in before} == ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == list(before)[1:]
