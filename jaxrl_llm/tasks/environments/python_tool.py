"""Questions that may be answered with the help of Python: '47*86+12=' -> a call -> '4054' -> '4054'."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION
from jaxrl_llm.tasks.environments.tool_calls import ToolEnvironment
from jaxrl_llm.tasks.golds import AnyRight
from jaxrl_llm.tasks.jsonl import jsonl
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import ByteTokenizer
from jaxrl_llm.tasks.verifiers import verifier as named_verifier

_SECONDS = 2  # of one program
_WRITTEN = 2**16  # most bytes of what it prints, and of each file that it writes
# A child sets its own limits and becomes the program: `preexec_fn` forks, which a process with threads may not.
_BOUNDED = f"""import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({_WRITTEN}, {_WRITTEN}))
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
os.execv(sys.executable, [sys.executable, "-I", "-c", sys.argv[1]])"""


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It knows nothing of earlier ones.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        program = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOUNDED, code],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=folder,
            env={},
            process_group=0,
        )
        try:
            late = program.wait(_SECONDS) == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # and what it has started
            program.wait()
        said.seek(0)
        printed = said.read().decode(errors="replace").strip()
        return (
            f"{printed}\nerror: it took longer than {_SECONDS} s".strip() if late else printed or "it printed nothing"
        )


class PythonEnvironment(ToolEnvironment):
    """One tool, `python`; an answer without a call is verified, as that of a task of one turn."""

    tools = (python,)

    def __init__(self, verify: AnyRight, most_bytes: int):
        self._verify, self.most_bytes = verify, most_bytes
        verify.load()

    def judge(self, answer: str) -> float:
        return self._verify(self.row["prompt"], answer, self.row["answer"], self.row)


def python_tool(
    *,
    path: str = "",
    verifier: str = "numeric",
    turns: int = 4,
    prompt_length: int = 512,
    answer_length: int = 512,
    observation_length: int = 256,
) -> Task:
    """Answer questions with a Python program where it helps, in at most `turns` turns.

    The rows are those of the task `jsonl` at `path`, or else sums such as 47*86+12. Half of the sums' demonstrations
    call the tool, and half guess a result.
    """
    fields: dict[str, Any] = {
        "environment": functools.partial(
            PythonEnvironment, AnyRight(named_verifier(verifier)[0]), observation_length // 2
        ),
        "tools": PythonEnvironment.tools,
        "turns": turns,
        "observation_length": observation_length,
        "isolated": True,
        "time_limit": PythonEnvironment.most_calls * _SECONDS + 5.0,
    }
    if path:
        rows = jsonl(path=path, verifier=verifier, prompt_length=prompt_length, answer_length=answer_length)
        return dataclasses.replace(rows, name="python", **fields)
    return Task("python", 16, answer_length, ByteTokenizer(), sample=_sum, **fields)


def _sum(rng: np.random.Generator) -> tuple[str, str, Row]:
    left, right, more = map(int, rng.integers(10, 100, size=3))
    text, gold = f"{left}*{right}+{more}", str(left * right + more)
    call = json.dumps({"name": "python", "arguments": {"code": f"print({text})"}})
    called = [f"<tool_call>{call}</tool_call>", [{"role": "tool", "content": gold}], gold]
    return f"{text}=", gold, {DEMONSTRATION: called if rng.integers(2) else [str(int(rng.integers(1000, 9000)))]}
