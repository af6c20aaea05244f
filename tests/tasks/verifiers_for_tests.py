"""Verifiers that misbehave, as functions of a module, which a worker process can import."""

import os
import time


def length(prompt, answer, gold, row):
    return len(answer) - 10 * row.get("minus", 0)


def process(prompt, answer, gold, row):
    return os.getpid()


def troubled(prompt, answer, gold, row):
    """Hangs, raises, dies or returns no number, as the answer says."""
    if answer == "hang":
        time.sleep(1000)
    if answer == "spin":  # never gives the interpreter back
        return float(len(str(7 ** (7**9))))
    if answer == "raise":
        raise KeyError("no such thing")
    if answer == "die":
        os._exit(3)
    if answer == "print":
        print("a verifier may print")
    return {"nan": float("nan"), "none": None, "text": "x"}.get(answer, 2.5)


class Unloadable:
    def load(self):
        raise ImportError("something is not installed")

    def __call__(self, prompt, answer, gold, row):
        """Never called: it does not load."""
