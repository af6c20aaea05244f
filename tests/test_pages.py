"""Commands and code of the pages, read from them: a command is parsed by its own parser, code and bash blocks run."""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm.__main__
from jaxrl_llm.config import command_line, loading

ROOT = Path(__file__).parents[1]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md")))
# Their tests run each block of the page and look at what it made.
RUN_ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/models.md": "models/test_models_doc.py",
    "docs/objectives.md": "objectives/test_documented.py",
    "docs/preferences.md": "test_preferences_doc.py",
    "docs/tasks.md": "tasks/test_tasks_doc.py",
}


def named(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, *languages):
    """The fenced blocks of these languages, "" for those without one."""
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, kind, text in fenced if kind in languages]


def commands():
    """{page and number: (module, arguments)} of every `python -m` and `jaxrl-llm` line of the pages.

    Of a synopsis: without what is in brackets, and the first of alternatives.
    """
    found = {}
    for page in PAGES:
        text = "\n".join(blocks(page, "", "bash", "sh", "text", "yaml")).replace("\\\n", " ")
        text = re.sub(r'^\w+=".*"$', "", text, flags=re.MULTILINE)  # a part of the commands below it
        lines = re.findall(r"(?:python -m ((?:jaxrl_llm|experiments)[.\w]*)|^jaxrl-llm (\w+))(.*)", text, re.MULTILINE)
        for number, (module, command, rest) in enumerate(lines):
            module = module or jaxrl_llm.__main__.COMMANDS[command][0]
            found[f"{named(page)} {number} {module}"] = module, words(rest)
    return found


def words(line):
    """The arguments of a shell line, with 0 for its variables."""
    line = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\$\{?\w+\}?", "0", line))
    line = re.sub(r"(\w)\|[\w|]+", r"\1", line).partition(" | ")[0]
    try:
        given = shlex.split(line, comments=True)
    except ValueError:  # the end of the quotes of a launcher around it
        given = shlex.split(line.rstrip()[:-1], comments=True)
    return given[: next((i for i, word in enumerate(given) if word in {"&", "&&", ";", ">"}), len(given))]


COMMANDS = commands()


def parsed(monkeypatch, module, arguments):
    """The exit code of a command that ends as soon as its arguments are parsed: 0 if they were taken."""
    for parser in (argparse.ArgumentParser, command_line.Parser):
        own = parser.parse_args
        monkeypatch.setattr(parser, "parse_args", lambda self, *a, own=own: (own(self, *a), sys.exit(0)))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    found = importlib.util.find_spec(module)
    assert found, module
    assert found.origin
    if found.submodule_search_locations:
        module = f"{module}.__main__"
    elif "parse_args" not in Path(found.origin).read_text():  # would run
        return 0
    try:
        return importlib.import_module(module).main()
    except SystemExit as end:
        return end.code


def test_commands_are_found():
    assert len(COMMANDS) > 50
    assert {"docs/quick_start.md", "docs/several_processes.md"} <= {line.split()[0] for line in COMMANDS}


def test_a_wrong_command_is_seen(monkeypatch):
    assert parsed(monkeypatch, "jaxrl_llm.main", ["--config=grpo", "--wokdir=runs/a"]) == 2
    assert parsed(monkeypatch, "jaxrl_llm.report", []) == 2


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_taken(line, monkeypatch, capsys):
    module, arguments = COMMANDS[line]
    assert parsed(monkeypatch, module, arguments) == 0, capsys.readouterr().err
    fields, rest = command_line.fields_and_rest(arguments)
    if module == "jaxrl_llm.main":
        config = rest[rest.index("--config") + 1]
        if re.fullmatch(r"[a-z0-9_]+(:\w+)?|configs/\w+\.py(:\w+)?", config):  # else a placeholder, or a file of yours
            loading.load(loading.find(config), fields)


def test_every_page_with_code_has_a_test():
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and named(p) not in RUN_ELSEWHERE], ids=named)
def test_the_code_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names: dict = {"__name__": "documented"}
    for block in blocks(page, "python"):
        exec(block, names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=named)
def test_the_commands_run(page, tmp_path):
    """Every bash block of a page as it stands, one after the other in a folder of its own."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "set -eux\n" + "\n".join(blocks(page, "bash"))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
