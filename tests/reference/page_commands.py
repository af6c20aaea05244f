"""The commands of the pages, as bash understands them: blocks run with programs that only note how they are called.

What is not noted is what bash does itself (loops, variables, `&`), and folders, which are really made.
"""

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md")))
PAGES.remove(ROOT / "CHANGELOG.md")  # it names what was
# A program of a page that is in none of these is "command not found".
NOTED = (
    "python",
    "python3",
    "jaxrl-llm",
    "make",
    "pip",
    "tar",
    ".venv/bin/python",
    ".venv/bin/pip",
    ".venv/bin/jaxrl-llm",
    ".venv-vllm/bin/python",
    "sleep",
)
LAUNCHERS = ("srun", "mpirun", "gcloud")  # also start what they are given
_REAL = ("bash", "sh", "sed", "mkdir", "head", "cat")
_IN_PROSE = re.compile(
    r"(\w+=\S+ )*(python (-m [\w.]+|[\w/]+\.py) .|jaxrl-llm \w+ .|make .|pip install .)"
)  # not the mere name
_NOTE = """#!/bin/bash
printf -v fields '\\x1f%s' "{name}" "$@"
printf '%s\\x1e\\n' "$PAGE$fields" >>"$NOTES"
"""  # in one write: commands with `&` are noted at once
_LAUNCH = """#!/bin/bash
for word; do case $word in --command=*) exec bash -c "${word#--command=}";; esac; done
until [[ $1 =~ ^(python|sh)$ ]]; do shift; done
exec "$@"
"""


def named(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, *languages):
    """The fenced blocks of these languages, "" for those without one."""
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, kind, text in fenced if kind in languages]


def scripts(page):
    """What a reader may copy into a shell: blocks of commands, `args` of a container, commands within a sentence."""
    manifests = "\n".join(blocks(page, "yaml"))
    inside = re.findall(r"- exec (python -m .*?)\n +resources:", manifests, re.DOTALL)
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.replace("\\|", "|").split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    whole = [span for span in spans if _IN_PROSE.match(span) and "..." not in span]
    shown = re.findall(r"^\$ (.*)$", "\n".join(blocks(page, "text")), re.MULTILINE)
    return [*blocks(page, "", "bash", "sh"), *(" ".join(one.split()) for one in inside), *shown, *whole]


@functools.cache
def commands():
    """Return the commands of all pages, which bash reads once a process."""
    return noted(PAGES)


def noted(pages):
    """[(page, program, *arguments)] of every command of the pages, in their order.

    Raises:
        AssertionError: bash refuses a block, or a program is none of those above.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        programs, notes = place / "programs", place / "notes"
        for name in (*NOTED, *LAUNCHERS):
            file = (place if "/" in name else programs) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_LAUNCH if name in LAUNCHERS else _NOTE.format(name=name))
            file.chmod(0o755)
        for name in _REAL:
            (programs / name).symlink_to(str(shutil.which(name)))
        (place / "jaxrl_llm").symlink_to(place)  # "cd jaxrl_llm"
        for name in ("configs", "experiments"):
            (place / name).symlink_to(ROOT / name)
        (place / "DIR").mkdir()
        (place / "DIR" / "commands.txt").write_text("python -m jaxrl_llm.main --config=grpo --workdir=runs/one\n")
        setting = {"PATH": str(programs), "NOTES": str(notes), "SLURM_ARRAY_TASK_ID": "1", "TERM": "dumb"}
        setting |= {"JOB_COMPLETION_INDEX": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
        for page in pages:
            script = "\n".join(["set -eu", *scripts(page)])
            done = subprocess.run(
                ["bash", "-c", script], cwd=place, env=setting | {"PAGE": named(page)}, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{named(page)}: {done.stderr}"
        lines = notes.read_text().split("\x1e\n")[:-1] if notes.exists() else []
        return [tuple(line.split("\x1f")) for line in lines]
