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
            ("an empty file", "", "own.py defines no get_config", {"own.py": ""}),
            ("a bracket that is not closed", "", "own.py, line 1", {"own.py": "x = (1\n"}),
            ("bytes that are no UTF-8", "", "own.py", {"own.py": b"NAME = 'caf\xe9'\n" + CONFIG.encode()}),
            ("bytes of 0", "", "own.py", {"own.py": b"\0" * 10}),
            ("an import that is not there", "", "own.py, line 1", {"own.py": "import nothing_of_the_kind\n"}),
            ("an error at import", "", "own.py, line 1", {"own.py": "1 / 0\n"}),
            ("an exit at import", "", "own.py", {"own.py": "raise SystemExit('bye')\n"}),
            ("get_config is no function", "", "own.py", {"own.py": "get_config = 1\n"}),
            ("get_config raises", "", "own.py, line 7", config("config['nothing']")),
            ("get_config returns nothing", "", "own.py", {"own.py": "def get_config():\n    pass\n"}),
            ("get_config returns a dict", "", "own.py", {"own.py": "def get_config():\n    return {}\n"}),
            ("get_config calls itself", "", "own.py", {"own.py": "def get_config():\n    return get_config()\n"}),
            (
                "an empty config",
                "",
                "config has no field 'steps'",
                {"own.py": "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict()\n"},
            ),
            ("a field that is not there", "", "'optimizer.lr'", config("config.optimizer.lr = 1.0")),
            ("a field more", "", "optimizer.lr", config("with config.unlocked(): config.optimizer.lr = 1.0")),
            ("a block more", "", "extra", config("with config.unlocked(): config.extra = {'a': 1}")),
            ("a field less", "", "eps", config("with config.unlocked(): del config.optimizer.eps")),
            ("a block less", "", "optimizer", config("with config.unlocked(): del config.optimizer")),
            ("a block that is a number", "", "optimizer", config("with config.unlocked(): config.optimizer = 3")),
            ("a field of another type", "", "own.py, line 7", config("config.steps = 'x'")),
            ("a field of another type, unlocked", "", "steps", config("with config.ignore_type(): config.steps = 'x'")),
            ("a function for a field", "", "steps", config("with config.ignore_type(): config.steps = print")),
            ("a function for an option", "", "digits", config("config.task.options = {'digits': print}")),
            ("a set for an option", "", "digits", config("config.task.options = {'digits': {1}}")),
            (
                "an objective registered twice",
                "",
                "grpo",
                config("from jaxrl_llm import objectives; objectives.register('grpo', objectives.recipe('gspo'))"),
            ),
            ("a sweep as config", "", "sweep.py defines no get_config", {}, {"line": "sweep.py"}),
        ][:-1],
    ),
    *kinds(
        "configs of one's own",
        f"train {OWN}",
        [
            ("a sweep as config", "--config=sweep.py", "sweep.py defines no get_config"),
            (
                "get_config takes no variant",
                "--config=own.py:x",
                "own.py",
                {"own.py": CONFIG.replace('variant=""', "")},
            ),
            ("a config beside a module named json", "--config=own.py", "", {"json.py": "1 / 0\n"}, {"expects": "runs"}),
        ],
    ),
    *kinds(
        "sweeps",
        "sweep --sweep=sweep.py --workdir=new --launcher=none",
        [
            ("an empty file", "", "sweep.py defines no get_sweep", {"sweep.py": ""}),
            ("a bracket that is not closed", "", "sweep.py, line 1", {"sweep.py": "def get_sweep(:\n"}),
            ("a config as sweep", "--sweep=own.py", "own.py defines no get_sweep"),
            ("get_sweep returns a list", "", "sweep.py", {"sweep.py": f"def get_sweep():\n    return {ONE}\n"}),
            ("get_sweep returns nothing", "", "sweep.py", {"sweep.py": "def get_sweep():\n    pass\n"}),
            ("get_sweep raises", "", "sweep.py, line 2", {"sweep.py": "def get_sweep():\n    return {}['arm']\n"}),
            (
                "a variant that it does not take",
                "--sweep=sweep.py:x",
                "sweep.py",
                {"sweep.py": "def get_sweep():\n    return 1\n"},
            ),
            ("no runs", "", "sweep.py", sweep("[]", **GRPO)),
            ("runs that are no list", "", "sweep.py", sweep("3", **GRPO)),
            ("a run that is no dict", "", "sweep.py", sweep("['A']", **GRPO)),
            ("a run without an arm", "", "'arm'", sweep("[{'seed': 0}]", **GRPO)),
            ("a run without a seed", "", "'seed'", sweep("[{'arm': 'A'}]", **GRPO)),
            ("a baseline that is no arm", "", "baseline='C'", sweep(PAIR, "C", **GRPO)),
            ("one run twice", "", "share the labels", sweep("[{'arm': 'A', 'seed': 0}] * 2", **GRPO)),
            (
                "arms that share a folder",
                "",
                "share the labels",
                sweep("[{'arm': 'A b', 'seed': 0}, {'arm': 'A_b', 'seed': 0}]", "A b", **GRPO),
            ),
            ("an arm that leaves the DIR", "", "..", sweep("[{'arm': '..', 'seed': 0}]", "..", **GRPO)),
            (
                "a field that is not there",
                "",
                "optimizer.lr",
                sweep("[{'arm': 'A', 'seed': 0, 'optimizer.lr': 1}]", **GRPO),
            ),
            ("a field of another type", "", "steps", sweep("[{'arm': 'A', 'seed': 0, 'steps': 'x'}]", **GRPO)),
            (
                "fields that contradict",
                "",
                "minibatches",
                sweep("[{'arm': 'A', 'seed': 0, 'updates.minibatches': 3}]", **GRPO),
            ),
            ("a seed in words", "", "seed", sweep("[{'arm': 'A', 'seed': 'x'}]", **GRPO)),
            ("a config that is not there", "", "nothing.py", sweep(ONE, config="'nothing.py'")),
            ("a config of another variant", "", "'small'", sweep(ONE, config="'grpo:small'")),
            ("a config that raises", "", "own.py", sweep(ONE, config="'own.py'") | config("config['x']")),
            ("no checkpoint stays", "", "checkpoint.keep=0", sweep(ONE, keep_checkpoints=0, **GRPO)),
            ("minutes in words", "", "minutes", sweep(ONE, minutes="'x'", **GRPO)),
            ("minutes below 0", "", "minutes", sweep(ONE, minutes=-1, **GRPO)),
            ("minutes that are no number", "", "minutes", sweep(ONE, minutes="float('nan')", **GRPO)),
            ("parts that set one field", "", "'seed'", sweep("product(each('seed', [0]), each('seed', [1]))", **GRPO)),
            (
                "zipped parts of two lengths",
                "",
                "lengths",
                sweep("zipped(each('seed', [0]), each('arm', ['A', 'B']))", **GRPO),
            ),
            ("branches from 0 on, every 0", "", "every", sweep(PAIR, branching="Branching(every=0)", **GRPO)),
            (
                "branches evaluated after their end",
                "",
                "branching.evaluate",
                sweep(PAIR, branching="Branching(evaluate=(3,))", **GRPO),
            ),
            (
                "branches of arms with two models",
                "",
                "model",
                sweep(
                    "[{'arm': 'A', 'seed': 0}, {'arm': 'B', 'seed': 0, 'model.hidden_size': 48}]",
                    branching="Branching()",
                    **GRPO,
                ),
            ),
            ("a plan of another sweep in the DIR", "--workdir=study", "", {}, {"expects": "runs"}),
            ("a DIR of one run", "--workdir=run", "run"),
            ("a plan that is no JSON", "--workdir=study", "", {"study/sweep.json": "{"}, {"expects": "runs"}),
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
                ("no JSON", "arms", "branches=arms"),
                ("a list", [], "branches=[]"),
                ("a number", 3, "branches=3"),
                ("no arms", {"first": 1, "every": 1, "rollouts": 1}, "arms"),
                ("arms in a list", {"arms": ["A"]}, "arms"),
                ("an arm that is a number", {"arms": {"A": 1}}, "A"),
                ("first below 0", {"first": -1, "arms": {"A": {}}}, "first=-1"),
                ("every 0", {"every": 0, "arms": {"A": {}}}, "every=0"),
                ("no rollouts", {"rollouts": 0, "arms": {"A": {}}}, "rollouts=0"),
                ("rollouts in words", {"rollouts": "x", "arms": {"A": {}}}, "rollouts"),
                ("a key more", {"firts": 1, "arms": {"A": {}}}, "firts"),
                ("a field that is not there", {"arms": {"A": {"optimizer.lr": "1"}}}, "optimizer.lr"),
                ("an arm with another model", {"arms": {"A": {"model.hidden_size": "48"}}}, "model.hidden_size"),
                ("an arm of given answers", {"arms": {"A": {"objective.name": "sft", "rollout.group_size": "1"}}}, "A"),
            ]
        ],
    ),
    *kinds(
        "tasks of one's own",
        f"train --config=shout.py --config.task.data_dir=data {OWN}",
        [
            ("the task as it should be", "", "", {}, {"expects": "runs"}),
            ("the factory raises", "", "shout", task("    def sample", "    1 / 0\n\n    def sample")),
            ("the factory returns text", "", "shout", task("return tasks.Task", "return str")),
            ("an option without a default", "", "letters", task("letters: int = 3", "letters: int")),
            (
                "an option named as a field",
                "",
                "train_size",
                task("letters: int = 3", "letters: int = 3, train_size=1"),
            ),
            ("the name of a task that is there", "", "sort", task("def shout(", "def sort(")),
            ("a name with capitals", "", "Shout", task('name="shout"', 'name="Shout"')),
            ("an option of another type", "--config.task.options.letters=x", "letters"),
            ("sample raises", "", "shout.py, line", task(SAMPLE, "return {}['x']")),
            ("sample returns text", "", "'shout' drew", task(SAMPLE, "return word")),
            ("sample returns numbers", "", "'shout' drew", task(SAMPLE, "return 1, 2")),
            ("sample returns nothing", "", "'shout' drew", task(SAMPLE, "return None")),
            ("sample returns four", "", "'shout' drew", task(SAMPLE, "return 'a=', 'a', {}, 4")),
            ("sample never ends for want of prompts", "", "shout", task(SAMPLE, "return 'a=', 'a'")),
            ("an answer longer than its bound", "", "'shout' drew", task(SAMPLE, 'return f"{word}=", word * 9')),
            ("an empty prompt", "", "task 'shout'", task(SAMPLE, 'return "", "a"')),
            ("a character that the tokenizer lacks", "", "'!'", task(SAMPLE, 'return f"{word}!", word')),
            ("a right answer that is wrong", "", "verify scores", task("answer == gold", "answer != gold")),
            ("verify raises", "", "shout.py, line", task("return float(answer == gold)", "return row['x']")),
            ("verify returns text", "", "shout", task("return float(answer == gold)", "return 'good'")),
            ("verify returns NaN", "", "shout", task("return float(answer == gold)", "return float('nan')")),
            ("verify returns nothing", "", "shout", task("return float(answer == gold)", "pass")),
            (
                "verify takes two",
                "",
                "shout",
                task("def verify(prompt, answer, gold, row)", "def verify(prompt, gold)"),
            ),
            (
                "an isolated verify that cannot be sent",
                "",
                "isolated",
                task("verify=verify", "verify=verify, isolated=True"),
                {"code": 1},
            ),
            ("no tokenizer", "", "tokenizer", task('tasks.CharTokenizer("abcdefgh=")', "None")),
            ("a vocabulary with a character twice", "", "vocabulary", task('"abcdefgh="', '"aabcdefgh="')),
            ("prompts of no tokens", "", "prompt_length=0", task("prompt_length=letters + 1", "prompt_length=0")),
            ("sample and source", "", "sample or source", task("sample=sample", "sample=None")),
            ("a solved that is no number", "", "solved", task("verify=verify", "verify=verify, solved=float('nan')")),
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
                ("a number", 3, "verifier"),
                ("a file without a function", "reward.py", "reward.py"),
                ("an empty function", "reward.py:", "reward.py:"),
                ("a file that is not there", "nothing.py:score", "nothing.py"),
                ("a module that is not there", "nothing.of:score", "nothing.of"),
                ("a function that is not there", "reward.py:scor", "no function 'scor'"),
                ("a number for a function", "reward.py:score", "score", {"reward.py": "score = 3\n"}),
                ("a bracket that is not closed", "reward.py:score", "reward.py", {"reward.py": "x = (\n"}),
                ("an error at import", "reward.py:score", "reward.py", {"reward.py": "1 / 0\n"}),
                ("an exit at import", "reward.py:score", "reward.py", {"reward.py": "raise SystemExit(3)\n"}),
                ("an import that is not there", "reward.py:score", "reward.py", {"reward.py": "import not_there\n"}),
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
                ("returns text", "return 'good'"),
                ("returns NaN", "return float('nan')"),
                ("returns nothing", "pass"),
                ("never returns", "while True: pass"),
                ("ends its process", "import os; os._exit(3)"),
                ("exits", "raise SystemExit"),
                ("takes all memory", "return len(bytearray(10**13))"),
            ]
        ],
    ),
]
