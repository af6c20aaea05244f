"""Environments of the tests, in a module that a worker process can import."""

import os
import time

LETTERS = "abcdefghijklmn"


class Counting:
    """Tells how many answers it has heard, 'b' for one; 'aa' ends it, and every other answer earns 1."""

    def init(self, row):
        self.heard = 0

    def step(self, answer):
        self.heard += 1
        return LETTERS[self.heard], float(answer != "aa"), answer == "aa"

    def close(self):
        pass


class Once:
    """A plain task: one answer, which earns 1."""

    def init(self, row):
        pass

    def step(self, answer):
        return "", 1.0, True

    def close(self):
        pass


class Misbehaving:
    """Hangs, dies, says what is no text or too much, raises, eats memory, as the answer says; 'i' earns a half."""

    def init(self, row):
        pass

    def step(self, answer):
        if answer == "a":
            time.sleep(1000)
        if answer == "b":
            os._exit(3)
        if answer == "g":
            raise KeyError("no such thing")
        if answer == "h":
            bytearray(2**31)  # twice what a process may have
        return {
            "c": (None, 1.0, False),
            "d": ("a" * 100_000, 1.0, False),
            "e": ("a", float("nan"), False),
            "f": "no tuple",
            "i": ("a", 0.5, False),
        }[answer]

    def close(self):
        pass


class Announcing(Counting):
    """Begins with what its row says, if that is no word for a fault."""

    begun = 0

    def init(self, row):
        super().init(row)
        says = row.get("says")
        if says == "hang":
            time.sleep(1000)
        if says == "raise":
            raise KeyError("no such thing")
        if says == "differ":
            Announcing.begun += 1
            return "cd"[Announcing.begun % 2]
        return says
