"""Files of the user's own: configs, sweeps, branches, tasks and verifiers."""

import json

from tests.reference.wrong_inputs import TINY, kinds
from tests.reference.wrong_inputs.data import options
from tests.reference.wrong_inputs.valid import CONFIG, TASK

OWN = f"--workdir=new {TINY}"


def config(line):
    """The config file with a line before it is returned."""
    return {"own.py": CONFIG.replace("    return", f"    {line}\n    return")}


def sweep(runs, baseline="A", **more):
    """A sweep's file."""
    named = "".join(f", {name}={value}" for name, value in more.items())
    header = "from jaxrl_llm.sweep import Branching, Sweep, chain, each, product, zipped\n\n\n"
    return {"sweep.py": f"{header}def get_sweep(variant=''):\n    return Sweep('?', {runs}, {baseline!r}{named})\n"}


def task(old, new):
    """The file of the task with one text in it replaced."""
    assert old in TASK
    return {"shout.py": TASK.replace(old, new)}


ONE = "[{'arm': 'A', 'seed': 0}]"
PAIR = "[{'arm': 'A', 'seed': 0}, {'arm': 'B', 'seed': 0, 'optimizer.learning_rate': 1e-3}]"
GRPO = {"config": "'grpo:smoke'"}
SAMPLE = 'return f"{word}=", word[::-1]'

TABLE = [
    *kinds(
        "configs of one's own",
        f"train --config=own.py {OWN}",
        [
            ("an import that is not there", "", "own.py, line 1", {"own.py": "import nothing_of_the_kind\n"}),
            ("an error at import", "", "own.py, line 1", {"own.py": "1 / 0\n"}),
            ("get_config returns nothing", "", "own.py", {"own.py": "def get_config():\n    pass\n"}),
            (
                "an objective registered twice",
                "",
                "grpo",
                config("from jaxrl_llm import objectives; objectives.register('grpo', objectives.recipe('gspo'))"),
            ),
        ],
    ),
    *kinds(
        "sweeps",
        "sweep --sweep=sweep.py --workdir=new --launcher=none",
        [
            ("no runs", "", "sweep.py", sweep("[]", **GRPO)),
            ("a run without an arm", "", "'arm'", sweep("[{'seed': 0}]", **GRPO)),
            ("a baseline that is no arm", "", "baseline='C'", sweep(PAIR, "C", **GRPO)),
            ("one run twice", "", "share the labels", sweep("[{'arm': 'A', 'seed': 0}] * 2", **GRPO)),
            ("a plan of another sweep in the DIR", "--workdir=study", "", {}, {"expects": "runs"}),
            (
                "runs of another config in the DIR",
                "--workdir=new",
                "new/A/0",
                {"new/A/0/config.json": '{"config": {}, "config_hash": "x"}', "new/A/0/metrics.jsonl": '{"step": 0}\n'},
            ),
        ],
    ),
    *kinds(
        "branches",
        "branch --config=grpo:smoke --workdir=new",
        [
            (what, f"--branches='{branches if isinstance(branches, str) else json.dumps(branches)}'", says)
            for what, branches, says in [
                ("no arms", {"first": 1, "every": 1, "rollouts": 1}, "arms"),
                ("a field that is not there", {"arms": {"A": {"optimizer.lr": "1"}}}, "optimizer.lr"),
            ]
        ],
    ),
    *kinds(
        "tasks of one's own",
        f"train --config=shout.py --config.task.data_dir=data {OWN}",
        [
            ("the task as it should be", "", "", {}, {"expects": "runs"}),
            ("the factory raises", "", "shout", task("    def sample", "    1 / 0\n\n    def sample")),
            ("sample raises", "", "shout.py, line", task(SAMPLE, "return {}['x']")),
            ("an answer longer than its bound", "", "'shout' drew", task(SAMPLE, 'return f"{word}=", word * 9')),
            ("a right answer that is wrong", "", "verify scores", task("answer == gold", "answer != gold")),
            ("verify raises", "", "shout.py, line", task("return float(answer == gold)", "return row['x']")),
            ("verify returns text", "", "shout", task("return float(answer == gold)", "return 'good'")),
            ("a task that is not registered", "", "unknown task 'shout'", task("@tasks.register\n", "")),
        ],
    ),
    *kinds(
        "verifiers",
        f"train --config=pretrained:smoke {OWN} --config.task.name=jsonl --config.warm_start.steps=0",
        [
            (
                what,
                options(path="rows.jsonl", verifier=verifier),
                says,
                *more,
            )
            for what, verifier, says, *more in [
                ("a function as it should be", "reward.py:score", "", {}, {"expects": "runs"}),
                ("a name that is not there", "exactly", "'exactly' is unknown"),
                ("a file that is not there", "nothing.py:score", "nothing.py"),
                ("a function that is not there", "reward.py:scor", "no function 'scor'"),
            ]
        ],
    ),
    *kinds(
        "verifiers",
        f"train --config=pretrained:smoke {OWN} --config.task.name=jsonl --config.task.verify_truncated=True "
        f"{options(path='rows.jsonl', verifier='reward.py:score', time_limit=1.0)}",
        [
            (what, "", "warning verifier_fails", {"reward.py": f"def score(*_):\n    {body}\n"}, {"expects": "warning"})
            for what, body in [
                ("raises on every answer", "1 / 0"),
                ("returns NaN", "return float('nan')"),
                ("never returns", "while True: pass"),
            ]
        ],
    ),
]
