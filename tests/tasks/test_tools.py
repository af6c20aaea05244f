"""Tool calls as models write them, what is said to wrong ones, and the tool that runs Python."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.config.loading import load_module
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import named_tasks
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Step
from jaxrl_llm.tasks.environments.python_tool import python
from jaxrl_llm.tasks.environments.reading import Continuation, opened
from jaxrl_llm.tasks.environments.tool_calls import Call, ToolEnvironment, result, schemas, tool_calls
from tests.reference.page_commands import ROOT, blocks
from tests.tasks.test_environments import Templated


def hermes(name="python", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_BOTH = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>"
XML = f"<tool_call>\n<function=add>\n{_BOTH}\n</function>\n</tool_call>"
ADDED = Call("add", {"a": "1", "b": "2"})


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("It is 4.", []),
        (hermes(code="print(1)"), [Call("python", {"code": "print(1)"})]),
        (f"Two.\n{hermes(code='a')}\n{hermes('b')}", [Call("python", {"code": "a"}), Call("b", {})]),
        (f"<think>{hermes(code='no')}</think>4", []),
        (hermes(code="</tool_call><tool_call>"), [Call("python", {"code": "</tool_call><tool_call>"})]),
        (XML, [ADDED]),
        (f"{XML}\n{XML}", [ADDED, ADDED]),
        (XML.removeprefix("<tool_call>\n"), [ADDED]),
        ("<function=f><parameter=x>1</parameter></function>", [Call("f", {"x": "1"})]),
        ("<function=f>\n<parameter=x>\n</parameter> a </function>\n</parameter>\n</function>\n</tool_call>",
         [Call("f", {"x": "</parameter> a </function>"})]),
        ("<function=f></function>", [Call("f", {})]),
    ],
)  # fmt: skip
def test_calls_of_both_forms(answer, calls):
    assert tool_calls(answer) == calls


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("<tool_call>\nnot json\n</tool_call>", "Expecting value"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}', "Expecting ',' delimiter"),
        ('<tool_call>{"name": "python"}</tool_call>', '{"name": "...", "arguments": {...}}'),
        ("<tool_call>[1]</tool_call>", '{"name": "...", "arguments": {...}}'),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1", "</function>"),
        ("<tool_call>", "Expecting value"),
    ],
)
def test_a_broken_call_says_what_is_wrong_with_it(answer, fault):
    (call,) = tool_calls(answer)
    assert fault in call.fault


@pytest.mark.parametrize(("family", "right"), [("qwen3-hermes", 50), ("qwen3-xml", 52)])
def test_the_fixtures_of_canitoolcall(family, right):
    """50 answers of Qwen3 and 54 of Qwen3-Coder and Qwen3.5; where no call can be read, ours has its fault."""
    package = pytest.importorskip("canitoolcall")
    found, count = 0, 0
    for file in sorted((Path(package.__file__).parent / "_data" / "fixtures" / family).glob("*.jsonl")):
        for fixture in map(json.loads, file.read_text().splitlines()):
            calls, expected = tool_calls(fixture["raw_output"]), fixture.get("expected", {})
            kinds = {
                (tool["function"]["name"], name): schema.get("type")
                for tool in fixture["tools"]
                for name, schema in tool["function"].get("parameters", {}).get("properties", {}).items()
            }
            read = [
                {"name": name, "arguments": {k: as_said(v, kinds.get((name, k))) for k, v in given.items()}}
                for name, given, fault in calls
                if not fault
            ]
            count += 1
            found += read == [{k: c[k] for k in ("name", "arguments")} for c in expected.get("tool_calls") or []]
    assert (found, count) == (right, {"qwen3-hermes": 50, "qwen3-xml": 54}[family])


def as_said(value, kind):
    """A value of the second form, all of which are texts, by the type of its JSON schema."""
    if not isinstance(value, str) or kind == "string":
        return value
    try:
        return json.loads(value.lower() if kind == "boolean" else value)
    except ValueError:
        return value


def add(a: int, b: float = 0.5, fine: bool = True, names: list[str] | None = None) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
        fine: As said.
        names: Of no use.
    """
    if not fine:
        raise ZeroDivisionError("not fine")
    return f"{a + b:g}"


@pytest.mark.parametrize(
    ("call", "heard"),
    [
        (Call("add", {"a": 1, "b": 2}), "3"),
        (Call("add", {"a": "1"}), "1.5"),
        (Call("add", {"a": "1", "fine": "True", "b": "2"}), "3"),
        (Call("add", {"a": 1, "names": ["x"]}), "1.5"),
        (Call("ad", {}), "error: there is no tool 'ad'; there are add"),
        (Call("add", {}), "error: add: TypeError: missing a required argument: 'a'"),
        (Call("add", {"a": 1, "c": 2}), "error: add: TypeError: got an unexpected keyword argument 'c'"),
        (Call("add", {"a": 1.5}), "error: add: TypeError: a must be int, not 1.5"),
        (Call("add", {"a": True}), "error: add: TypeError: a must be int, not True"),
        (Call("add", {"a": "one"}), "error: add: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (Call("add", {"a": 1, "fine": False}), "error: add: ZeroDivisionError: not fine"),
        (Call("", {}, "a call cannot be read: why"), "error: a call cannot be read: why"),
    ],
)
def test_a_tool_is_called_or_the_call_is_answered(call, heard):
    assert result([add], call) == heard


class Adding(ToolEnvironment):
    tools = (add,)
    most_bytes = 64

    def judge(self, answer):
        return float(answer == self.row["answer"])


def test_an_episode_with_tools():
    own = Adding()
    own.init({"answer": "3"})
    call = hermes("add", a=1, b=2)
    assert own.step(call) == ([{"role": "tool", "content": "3"}], 0.0, False)
    for _ in range(500):
        assert own.step(call * 2) == ([{"role": "tool", "content": "3"}] * 2, 0.0, False)
    ((message,), reward, done) = own.step(call * 1000)
    assert (message["content"], reward, done) == ("error: 1000 calls at once; make at most 4", 0.0, False)
    ((message,), _, _) = own.step(hermes("ad\ud800" + "é" * 50))
    assert message["content"].startswith("...")
    assert 62 <= len(message["content"].encode()) <= 64
    assert own.step("3") == ("", 1.0, True)
    assert own.step("4") == ("", 0.0, True)


def test_python_runs_and_says_what_went_wrong():
    assert python("print(6 * 7)") == "42"
    assert python("x = 1") == "it printed nothing"
    assert python("1 / 0").endswith("ZeroDivisionError: division by zero")
    assert python("import sys; print(sys.stdin.read() + 'read'); sys.exit(3)") == "read"
    assert python("import os; print(os.listdir(), dict(os.environ).get('HOME'))") == "[] None"
    long = python("print('x' * 10**8)")
    assert len(long) < 2**17
    assert "x" * 1000 in long


@pytest.mark.slow
def test_python_has_limits_of_time_and_memory():
    """What hangs is answered, what it leaves behind is ended, and no program has more memory than an episode."""
    assert python("print('so far', flush=True)\nwhile True: pass") == "so far\nerror: it took longer than 2 s"
    assert python("import os, time\nif not os.fork(): time.sleep(1000)\nelse: print('parent')") == "parent"
    task = tasks.make("python")
    own = opened(task)
    own("init", {0: {"prompt": "1+1=", "answer": "2"}})
    said = own("step", {0: hermes(code="bytearray(2**31)")})[0]
    assert said.observation[0]["content"].endswith("MemoryError")
    for i in range(25):
        said = own("step", {0: hermes(code=f"print({i})") * 4})[0]
        assert [one["content"] for one in said.observation] == [f"{i}"] * 4
    assert own("step", {0: "It is 2"}) == {0: Step("", 1.0, True)}


def test_demonstrations_call_python(tmp_path):
    task, rng, rewards = tasks.make("python"), np.random.default_rng(0), []
    for _ in range(8):
        prompt, answer, row = task.sample(rng)
        own, said = task.environment(), row[DEMONSTRATION]
        own.init({"prompt": prompt, "answer": answer})
        for i in range(0, len(said), 2):
            heard, reward, done = own.step(said[i])
            assert done == (i == len(said) - 1)
            assert done or heard == said[i + 1]
        rewards.append(reward)
    assert 0 < np.mean(rewards) < 1


TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}"
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"


def test_a_chat_template_is_told_of_the_tools():
    """Of their names, types and docstrings, unless task.chat_options says otherwise."""
    tokenizer = Templated(TOOLS + CHATML)
    task = tasks.make("python", tokenizer=tokenizer, prompting=tasks.Prompting(chat=True))
    (described,) = schemas([python])
    assert described["function"]["name"] == "python"
    assert described["function"]["parameters"]["required"] == ["code"]
    text = task.prompting.text(tokenizer, "1+1=")
    assert json.loads(text.removeprefix("<|system|>").partition("<|end|>")[0]) == [described]
    own = Continuation(task)
    own.check()
    heard = [{"role": "tool", "content": "4"}]
    assert own.ids(heard, ended=True) == tokenizer.encode("\n<|tool|>4<|end|>\n" + "<|assistant|>")
    plain = tasks.make("python", tokenizer=tokenizer, prompting=tasks.Prompting(chat=True, chat_options={"tools": []}))
    assert plain.prompting.text(tokenizer, "2+2=") == "<|user|>2+2=<|end|>\n<|assistant|>"


def test_a_template_without_tools_is_refused():
    silent = CHATML.replace("{{ m.content | trim }}", "{{ m.content if m.role != 'tool' }}")
    task = tasks.make("python", tokenizer=Templated(silent), prompting=tasks.Prompting(chat=True))
    with pytest.raises(ValueError, match=r"drops the observation 'Go on\.'; give it another role"):
        Continuation(task).check()


def test_a_tool_without_a_docstring_is_refused():
    def silent(x: int) -> int:
        return x

    with pytest.raises(ValueError, match="a tool cannot be described"):
        schemas([silent])


def test_without_a_chat_template_a_result_is_read_as_its_text():
    task = tasks.make("python")
    heard = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "2"}]
    assert Continuation(task).ids(heard, ended=True) == task.tokenizer.encode("4\n2")


def test_questions_of_a_file_may_be_answered_with_python(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": i}) for i in range(40)))
    task = tasks.make("python", path=str(tmp_path / "rows.jsonl"), turns=2)
    assert (task.name, task.turns, task.isolated) == ("python", 2, True)
    assert task.tools == (python,)
    examples = tasks.examples(task, "train", tmp_path / "data")
    own = task.environment()
    own.init({"prompt": examples[0]["prompt"], "answer": examples[0]["answer"]})
    assert own.step(examples[0]["answer"]) == ("", 1.0, True)


@pytest.mark.slow
def test_the_example_of_the_page_is_a_task(tmp_path, monkeypatch):
    _, code = blocks(ROOT / "docs" / "environments.md", "python")
    (tmp_path / "shop.py").write_text(code)
    monkeypatch.setattr(named_tasks, "_REGISTERED", {})
    own = opened(validate(load_module(tmp_path / "shop.py").get_config("smoke")).task)
    own("init", {0: {"prompt": "pear and plum?", "answer": "7"}})
    assert own("step", {0: hermes("price", thing="pear")})[0].observation == [{"role": "tool", "content": "5"}]
    wrong = own("step", {0: hermes("price", thing="egg")})[0]
    assert wrong == Step([{"role": "tool", "content": "error: price: KeyError: 'egg'"}], 0.0, False)
    assert own("step", {0: "7"}) == {0: Step("", 1.0, True)}


def test_the_variants_of_the_config():
    config = importlib.import_module("configs.turns").get_config("python_ppo_smoke")
    assert (config.task.name, config.task.options.turns, config.objective.name) == ("python", 3, "ppo")
