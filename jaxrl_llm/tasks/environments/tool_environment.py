"""Episodes with tools: a call is answered by the tool, and an answer without a call is judged."""

from collections.abc import Sequence

from jaxrl_llm.tasks.base import Row
from jaxrl_llm.tasks.environments.environment import Environment
from jaxrl_llm.tasks.environments.tool_calls import Tool, result, tool_calls
from jaxrl_llm.tasks.messages import Message


class ToolEnvironment(Environment):
    """An environment of functions that the model may call; a subclass says which, and what an answer is worth.

    A call that is wrong, or a tool that raises, is answered by a text that says so.
    """

    tools: Sequence[Tool] = ()
    most_calls = 4  # in one answer
    most_bytes = 1024  # of what all calls of one answer hear; of longer results the end

    def judge(self, answer: str) -> float:
        """Return the reward of an answer without a call, which ends the episode."""
        raise NotImplementedError("a subclass says what an answer is worth")

    def init(self, row: Row) -> None:
        self.row = row

    def step(self, answer: str) -> tuple[str | list[Message], float, bool]:
        calls = tool_calls(answer)
        if not calls:
            return "", self.judge(answer), True
        said = [f"error: {len(calls)} calls at once; make at most {self.most_calls}"]
        if len(calls) <= self.most_calls:
            said = [result(self.tools, call) for call in calls]
        return [{"role": "tool", "content": _end(one, self.most_bytes // len(said))} for one in said], 0.0, False


def _end(text: str, most: int) -> str:
    whole = text.encode(errors="replace")
    cut = whole if len(whole) <= most else b"..." + whole[-max(most - 3, 1) :]
    return cut.decode(errors="ignore")
