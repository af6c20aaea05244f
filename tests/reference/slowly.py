"""Parameters of which the quick tests take a part: all of them are worth a run, and few are worth everybody's time."""

import pytest


def first_quick(number, values, several=False):
    """The parameters, those after the first `number` marked slow.

    Args:
      several: a value is a tuple of several arguments.
    """
    values = list(values)
    rest = [pytest.param(*(one if several else (one,)), marks=pytest.mark.slow) for one in values[number:]]
    return [*values[:number], *rest]
