"""Episodes with tools: a call is answered by the tool, and an answer without a call is judged.

Calls are read in the two forms that most open models write.

Hermes, Qwen2.5, Qwen3:  <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>
Qwen3-Coder, Qwen3.5:    <tool_call><function=python><parameter=code>print(1)</parameter></function></tool_call>
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.ground.worker_errors import described
from jaxrl_llm.tasks.base import Row
from jaxrl_llm.tasks.environments.environment import Environment
from jaxrl_llm.tasks.messages import Message

Tool = Callable[..., Any]  # a function with types, and a docstring with "Args:"

_OPENED = re.compile(r"<tool_call>\s*|(?=<function=)")  # some models leave the first tag out before the second
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>\s*(?:</tool_call>|\Z|(?=<function=))", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(?:\n(.*?)\n|(.*?))</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)

_KINDS: Mapping[Any, Any] = {str: str, int: int, float: (int, float), bool: bool, list: list, dict: dict}


class Call(NamedTuple):
    """A call of a tool. fault: "", or why it cannot be read."""

    name: str
    arguments: Mapping[str, Any]  # in the second form all are texts
    fault: str = ""


def tool_calls(answer: str) -> list[Call]:
    """Return the calls that follow the thoughts of an answer, in order; what follows a broken one is not read."""
    text, found = answer.rpartition("</think>")[2], list[Call]()
    while opened := _OPENED.search(text):
        text = text[opened.end() :]
        if function := _FUNCTION.match(text):
            text = text[function.end() :]
            given = {name: lines or short for name, lines, short in _PARAMETER.findall(function[2].strip())}
            found.append(Call(function[1], given))
            continue
        try:
            if text.startswith("<function="):
                raise ValueError("it does not end with </function></tool_call>")
            said, end = json.JSONDecoder().raw_decode(text)
            if not isinstance(said, dict) or not isinstance(said.get("arguments"), dict):
                raise ValueError('write {"name": "...", "arguments": {...}}')
            found.append(Call(str(said.get("name")), said["arguments"]))
            text = text[end:]
        except ValueError as error:
            return [*found, Call("", {}, f"a call cannot be read: {error}")]
    return found


def result(tools: Sequence[Tool], call: Call) -> str:
    """Return what the called tool returns, or a text that says what is wrong with the call."""
    known = {tool.__name__: tool for tool in tools}
    if call.fault:
        return f"error: {call.fault}"
    if call.name not in known:
        return f"error: there is no tool {call.name!r:.60}; there are {', '.join(known)}"
    tool = known[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
        kinds = typing.get_type_hints(tool)
        named = {name: _typed(name, value, kinds.get(name, Any)) for name, value in call.arguments.items()}
        return str(tool(**named))
    except Exception as error:
        return f"error: {call.name}: {described(error)}"


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value, read from its text if it is to be something else; raises TypeError if it is none of that kind."""
    plain = typing.get_origin(kind) or kind
    if plain not in _KINDS:
        return value
    read = value
    if isinstance(value, str) and plain is not str:
        read = json.loads(value.lower() if plain is bool else value)
    if not isinstance(read, _KINDS[plain]) or (isinstance(read, bool) and plain is not bool):
        raise TypeError(f"{name} must be {plain.__name__}, not {value!r:.60}")
    return read


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return what a chat template reads as `tools`: the name, the types and the docstring of each.

    Raises:
      ValueError: a tool has no docstring, or one without a line for each argument.
      ImportError: transformers is not installed.
    """
    from jaxrl_llm.tasks.tokenizers.chat_template import import_transformers

    library = import_transformers()
    try:
        return [library.utils.get_json_schema(tool) for tool in tools]
    except Exception as error:  # exceptions of its own
        raise ValueError(
            f'a tool cannot be described ({error}); give it types, and a docstring with a line for each of its "Args:"'
        ) from error


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
