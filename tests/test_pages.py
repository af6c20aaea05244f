"""Commands and code of the pages, read from them: a command is parsed by its own parser, code and bash blocks run.

test_page_runs.py runs every command in its smallest form.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm.__main__
from jaxrl_llm.config import command_line, loading
from tests.reference import page_commands
from tests.reference.page_commands import PAGES, ROOT, blocks, commands, named, noted

# Their tests run each block of the page and look at what it made.
RUN_ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/environments.md": "tasks/test_environments.py",
    "docs/models.md": "models/test_models_doc.py",
    "docs/objectives.md": "objectives/test_documented.py",
    "docs/preferences.md": "test_preferences_doc.py",
    "docs/python.md": "test_python_page.py",
    "docs/tasks.md": "tasks/test_tasks_doc.py",
    "docs/your_model.md": "test_your_model_page.py",
}


COMMANDS = {
    f"{page} {number} {' '.join(command)}": command
    for number, (page, *command) in enumerate(sorted(commands()))  # commands with `&` are noted in any order
    if command[0] not in ("make", "pip", "tar") and not command[0].endswith("/pip")
}


def module_and_arguments(program, *arguments):
    """What `python -m` is given, ("", []) where it is no module of the project."""
    if program.endswith("jaxrl-llm"):
        return jaxrl_llm.__main__.COMMANDS[arguments[0]][0].removesuffix(".__main__"), [*arguments[1:]]
    module = arguments[1] if arguments[0] == "-m" else arguments[0].removesuffix(".py").replace("/", ".")
    ours = module.startswith(("jaxrl_llm", "experiments", "tests"))
    return (module, [*arguments[1 + (arguments[0] == "-m") :]]) if ours else ("", [])


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
    assert len(COMMANDS) > 80
    assert {"docs/quick_start.md", "docs/several_processes.md"} <= {line.split()[0] for line in COMMANDS}


def test_a_program_that_nobody_knows_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(page_commands, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```\nfor i in 1 2; do python -m jaxrl_llm.report runs/$i & done; wait\n```\nas `make docs` does\n")
    run = ("page.md", "python", "-m", "jaxrl_llm.report")
    assert sorted(noted([page])) == [("page.md", "make", "docs"), (*run, "runs/1"), (*run, "runs/2")]
    for wrong, said in (("jaxrl report runs", "jaxrl: command not found"), ("make 'docs", "unexpected EOF")):
        page.write_text(f"```\n{wrong}\n```\n")
        with pytest.raises(AssertionError, match=said):
            noted([page])


def test_a_wrong_command_is_seen(monkeypatch):
    assert parsed(monkeypatch, "jaxrl_llm.main", ["--config=grpo", "--wokdir=runs/a"]) == 2
    assert parsed(monkeypatch, "jaxrl_llm.report", []) == 2


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_taken(line, monkeypatch, capsys):
    module, arguments = module_and_arguments(*COMMANDS[line])
    if not module:
        return
    assert parsed(monkeypatch, module, arguments) == 0, capsys.readouterr().err
    fields, rest = command_line.fields_and_rest(arguments)
    if module == "jaxrl_llm.main":
        config = " ".join(rest).partition("--config")[2][1:].partition(" ")[0]
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
