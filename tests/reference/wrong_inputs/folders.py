"""DIRs: what a run resumes from, what others read of it, and reports of one and of many."""

import json

from tests.reference.wrong_inputs import TINY, changed, cut, kinds, rows_of

AGAIN = f"train --config=grpo:smoke --workdir=run {TINY} --config.checkpoint.every=1 --config.checkpoint.keep=2"
MORE = f"{AGAIN} --config.steps=3"
CONFIG, METRICS = "run/config.json", "run/metrics.jsonl"
RUNS, WARNS, FAILS = {"expects": "runs"}, {"expects": "warning"}, {"code": 1}


def appended(text):
    return changed(lambda content: content + (text if isinstance(text, bytes) else text.encode()))


def damaged(*steps):
    """The arrays of these checkpoints overwritten with zeros."""

    def change(path):
        for step in steps:
            for file in (path / str(step)).rglob("*"):
                if file.is_file() and "metadata" not in file.name.lower() and file.suffix != ".json":
                    file.write_bytes(bytes(file.stat().st_size))

    return {"run/checkpoints": change}


def within(path, **values):
    """config.json with a value in a block: within("config.task", name=3)."""

    def edit(text):
        whole = inside = json.loads(text)
        for name in path.split("."):
            inside = inside[name]
        inside |= values
        return json.dumps(whole).encode()

    return changed(edit)


def lost(step):
    """The rows without those of a step."""
    return changed(
        lambda content: b"".join(line for line in content.splitlines(keepends=True) if json.loads(line)["step"] != step)
    )


def row(**values):
    """metrics.jsonl of one of a sweep's runs, whose last row has these values."""

    def edit(content):
        *others, last = content.splitlines(keepends=True)
        return (
            b"".join(others)
            + rows_of({k: v for k, v in {**json.loads(last), **values}.items() if v is not ...}).encode()
        )

    return {"study/B/metrics.jsonl": changed(edit)}


OF_B = "study/B/"
TABLE = [
    *kinds(
        "DIRs: resumed",
        AGAIN,
        [
            ("a run that is complete", "--config.steps=2", "", {}, RUNS),
            ("another learning rate", "--config.optimizer.learning_rate=1e-4", "optimizer.learning_rate"),
            ("another task", "--config.task.name=countdown", "task.name"),
        ],
    ),
    *kinds(
        "DIRs: resumed",
        MORE,
        [
            ("one step more", "", "", {}, RUNS),
            ("config.json lost", "", "", {CONFIG: None}, RUNS),
            ("a garbage row of metrics", "", "metrics.jsonl, line", {METRICS: appended("{\n")}, WARNS),
            ("metrics lost", "", "has lost the rows", {METRICS: None}, WARNS),
            ("the newest checkpoint damaged", "", "checkpoints/2 is damaged", damaged(2), WARNS),
            ("all checkpoints damaged", "", "run/checkpoints/1", damaged(1, 2), FAILS),
            ("a checkpoint from half a write", "", "", {"run/checkpoints/3.orbax-checkpoint-tmp/x": ""}, RUNS),
        ],
    ),
    *kinds(
        "DIRs: opened",
        "generate --workdir=run --prompt='1=' --max-tokens=1 --greedy",
        [
            ("a DIR as it should be", "", "", {}, RUNS),
            ("config.json lost", "", "config.json", {CONFIG: None}),
            ("config.json cut", "", "config.json", {CONFIG: cut}),
            (
                "code that it names",
                "",
                "x.py",
                {
                    CONFIG: within(
                        "config.task", name="jsonl", options={"path": "rows.jsonl", "verifier": "x.py:score"}
                    ),
                    "x.py": "raise SystemExit('it ran')\n",
                    "rows.jsonl": lambda path: None,
                },
            ),
            ("no checkpoints", "", "no checkpoint", {"run/checkpoints": None}),
            ("the newest checkpoint damaged", "", "checkpoints/2 is damaged", damaged(2), WARNS),
        ],
    ),
    *kinds(
        "reports",
        "report study",
        [
            ("a sweep as it should be", "", "", {}, RUNS),
            *(
                (what, "", says, files, RUNS)
                for what, says, files in [
                    ("a garbage row", "B/metrics.jsonl", {OF_B + "metrics.jsonl": appended("{\n")}),
                    ("no metrics.jsonl", "B", {OF_B + "metrics.jsonl": None}),
                    ("config.json lost", "B", {OF_B + "config.json": None}),
                    ("sweep.json cut", "sweep.json", {"study/sweep.json": cut}),
                ]
            ),
        ],
    ),
    *kinds(
        "reports",
        "compare run study",
        [
            ("a DIR that is a run and one of a sweep", "", "", {}, RUNS),
        ],
    ),
    *kinds(
        "reports",
        "report run",
        [
            ("a run of one row", "", "", {METRICS: changed(lambda text: text.splitlines(True)[0])}, RUNS),
        ],
    ),
]
