"""Functions for worker processes that leave what they should not: processes, allocated memory."""

import os
import signal
import time
from pathlib import Path


def forks(folder, count, then):
    """Start processes that stay, each with its id as a file of the folder; then hang, die or return."""
    for i in range(count):
        if not os.fork():
            if i % 4 == 1:
                os.setsid()  # out of the worker's group
            if i % 4 == 2 and os.fork():
                os._exit(0)  # and its child has no parent
            if i % 4 == 3:
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(folder, str(os.getpid())).touch()
            time.sleep(1000)
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    if then == "hang":
        time.sleep(1000)
    if then == "die":
        os._exit(3)
    return then


def allocate(count):
    return len(bytearray(count))


class Coloured:
    """Prints what names a window and colours its text."""

    def __call__(self):
        print("\x1b]0;title\x07 \x1b[31mred\x1b[0m")
        return 1
