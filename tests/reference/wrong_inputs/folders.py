"""DIRs: what a run resumes from, what others read of it, and reports of one and of many."""

import json
import shutil

from tests.reference.wrong_inputs import TINY, changed, cut, json_with, json_without, kinds, link, rows_of

AGAIN = f"train --config=grpo:smoke --workdir=run {TINY} --config.checkpoint.every=1 --config.checkpoint.keep=2"
MORE = f"{AGAIN} --config.steps=3"
CONFIG, METRICS, SAMPLES = "run/config.json", "run/metrics.jsonl", "run/samples.jsonl"
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
            ("another model", "--config.model.hidden_size=48", "model.hidden_size"),
            ("fewer steps than it has", "--config.steps=1", "", {}, RUNS),
            (
                "config.json lost, another learning rate",
                "--config.optimizer.learning_rate=1e-4",
                "lost its config.json",
                {CONFIG: None},
            ),
            (
                "config.json cut, another learning rate",
                "--config.optimizer.learning_rate=1e-4",
                "config.json",
                {CONFIG: cut},
            ),
            ("checkpoints lost", "", "no checkpoint", {"run/checkpoints": None}),
            (
                "checkpoints a file",
                "",
                "checkpoints",
                {
                    "run/checkpoints": None,
                    "run/checkpoints ": "",
                    "run/config.json": lambda path: (path.parent / "checkpoints").write_text(""),
                },
            ),
            (
                "a lock that is a folder",
                "--config.steps=3",
                "lock",
                {"run/.lock": lambda path: (path.unlink(missing_ok=True), path.mkdir())},
            ),
            ("metrics.jsonl a folder", "--config.steps=3", "metrics.jsonl", {METRICS: None, f"{METRICS}/x": ""}),
        ],
    ),
    *kinds(
        "DIRs: resumed",
        MORE,
        [
            ("one step more", "", "", {}, RUNS),
            ("config.json lost", "", "", {CONFIG: None}, RUNS),
            ("config.json cut", "", "", {CONFIG: cut}, RUNS),
            ("config.json a list", "", "", {CONFIG: "[]"}, RUNS),
            ("a garbage row of metrics", "", "metrics.jsonl, line", {METRICS: appended("{\n")}, WARNS),
            ("a row of metrics that is a list", "", "metrics.jsonl, line", {METRICS: appended("[]\n")}, WARNS),
            ("a row of metrics without a step", "", "metrics.jsonl, line", {METRICS: appended('{"a": 1}\n')}, WARNS),
            ("a step in words", "", "metrics.jsonl, line", {METRICS: appended('{"step": "x"}\n')}, WARNS),
            (
                "a row of metrics twice",
                "",
                "metrics.jsonl, line",
                {METRICS: changed(lambda x: x + x.splitlines(True)[-1])},
                WARNS,
            ),
            ("a row of metrics that is no UTF-8", "", "metrics.jsonl, line", {METRICS: appended(b"\xff\xfe\n")}, WARNS),
            ("a row of metrics of zeros", "", "metrics.jsonl, line", {METRICS: appended(bytes(4096) + b"\n")}, WARNS),
            ("metrics empty", "", "has lost the rows", {METRICS: ""}, WARNS),
            ("metrics lost", "", "has lost the rows", {METRICS: None}, WARNS),
            ("a step of metrics lost", "", "has lost the rows of steps 1", {METRICS: lost(1)}, WARNS),
            ("a row of samples cut", "", "", {SAMPLES: appended('{"step": 1, "pro')}, RUNS),
            ("samples that are no text", "", "samples.jsonl, line", {SAMPLES: appended(b"\x80\x81\n")}, WARNS),
            ("samples lost", "", "", {SAMPLES: None}, RUNS),
            (
                "event files damaged",
                "",
                "",
                {"run": lambda path: [file.write_bytes(b"x" * 30) for file in path.glob("events*")]},
                RUNS,
            ),
            ("the newest checkpoint damaged", "", "checkpoints/2 is damaged", damaged(2), WARNS),
            ("all checkpoints damaged", "", "run/checkpoints/1", damaged(1, 2), FAILS),
            (
                "a checkpoint emptied",
                "",
                "checkpoints/2",
                {"run/checkpoints": lambda path: (shutil.rmtree(path / "2"), (path / "2").mkdir())},
                WARNS,
            ),
            ("a folder beside the checkpoints", "", "", {"run/checkpoints/notes": lambda path: path.mkdir()}, RUNS),
            ("a file beside the checkpoints", "", "", {"run/checkpoints/notes.txt": "x"}, RUNS),
            ("a checkpoint from half a write", "", "", {"run/checkpoints/3.orbax-checkpoint-tmp/x": ""}, RUNS),
            ("result.json garbage", "", "run/result.json", {"run/result.json": "{"}),
        ],
    ),
    *kinds(
        "DIRs: opened",
        "generate --workdir=run --prompt='1=' --max-tokens=1 --greedy",
        [
            ("a DIR as it should be", "", "", {}, RUNS),
            ("config.json lost", "", "config.json", {CONFIG: None}),
            ("config.json cut", "", "config.json", {CONFIG: cut}),
            ("config.json empty", "", "config.json", {CONFIG: ""}),
            ("config.json a list", "", "config.json", {CONFIG: "[]"}),
            ("config.json nested too deeply", "", "config.json", {CONFIG: '{"a": ' * 10**5}),
            ("no config in it", "", "config.json", {CONFIG: json_without("config")}),
            ("a config that is a number", "", "config.json", {CONFIG: json_with(config=3)}),
            ("a config without blocks", "", "config.json", {CONFIG: json_with(config={})}),
            ("no hash in it", "", "config.json", {CONFIG: json_without("config_hash")}),
            ("no source in it", "", "", {CONFIG: json_without("source")}, RUNS),
            ("a source that is a number", "", "", {CONFIG: json_with(source=3)}, RUNS),
            ("a field of another type", "", "hidden_size", {CONFIG: within("config.model", hidden_size="x")}),
            ("a field out of range", "", "hidden_size", {CONFIG: within("config.model", hidden_size=-1)}),
            ("a field that is not there", "", "model.hidden", {CONFIG: within("config.model", hidden=1)}),
            ("another model than the checkpoint's", "", "checkpoint", {CONFIG: within("config.model", hidden_size=48)}),
            ("a task that is not there", "", "'nothing'", {CONFIG: within("config.task", name="nothing")}),
            ("a task that is a list", "", "task", {CONFIG: within("config.task", name=["sort"])}),
            ("an objective that is not there", "", "'nothing'", {CONFIG: within("config.objective", name="nothing")}),
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
            (
                "a source that is other code, and not needed",
                "",
                "",
                {
                    CONFIG: changed(
                        lambda text: json.dumps(
                            json.loads(text) | {"source": {"file": "run/evil.py", "variant": "", "recipe": ""}}
                        ).encode()
                    ),
                    "run/evil.py": "raise SystemExit('it ran')\n",
                },
                RUNS,
            ),
            ("no checkpoints", "", "no checkpoint", {"run/checkpoints": None}),
            (
                "checkpoints empty",
                "",
                "no checkpoint",
                {"run/checkpoints": lambda path: (shutil.rmtree(path), path.mkdir())},
            ),
            ("the newest checkpoint damaged", "", "checkpoints/2 is damaged", damaged(2), WARNS),
            ("all checkpoints damaged", "", "run/checkpoints/1", damaged(1, 2)),
            ("the one asked for damaged", "--step=2", "run/checkpoints/2", damaged(2)),
            ("metrics lost", "", "", {METRICS: None}, RUNS),
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
                    ("a row that is a list", "B/metrics.jsonl", {OF_B + "metrics.jsonl": appended("[]\n")}),
                    ("a row without a step", "B/metrics.jsonl", row(step=...)),
                    ("a step in words", "B/metrics.jsonl", row(step="x")),
                    ("words for a number", "B/metrics.jsonl", row(**{"eval/greedy": "x"})),
                    ("a list for a number", "", row(**{"reward/mean": [1, 2]})),
                    ("null for a number", "", row(**{"reward/mean": None})),
                    ("a number of 400 digits", "", row(**{"reward/mean": 10**400})),
                    ("a key that is not known", "", row(**{"other/key": 1})),
                    ("rows that are no UTF-8", "B/metrics.jsonl", {OF_B + "metrics.jsonl": appended(b"\xff\n")}),
                    ("rows in gzip", "B", {OF_B + "metrics.jsonl": b"\x1f\x8b" + bytes(40)}),
                    ("a lost step", "B", {OF_B + "metrics.jsonl": lost(1)}),
                    ("no rows", "B", {OF_B + "metrics.jsonl": ""}),
                    ("no metrics.jsonl", "B", {OF_B + "metrics.jsonl": None}),
                    ("config.json cut", "B/config.json", {OF_B + "config.json": cut}),
                    ("config.json a list", "B/config.json", {OF_B + "config.json": "[]"}),
                    ("config.json lost", "B", {OF_B + "config.json": None}),
                    ("a config that is a number", "B/config.json", {OF_B + "config.json": json_with(config=3)}),
                    (
                        "a sample's reward in words",
                        "B/samples.jsonl",
                        {
                            OF_B + "samples.jsonl": appended(
                                '{"step": 1, "prompt": "1", "answer": "2", "reward": "x"}\n'
                            )
                        },
                    ),
                    ("a garbage sample", "B/samples.jsonl", {OF_B + "samples.jsonl": appended("{\n")}),
                    (
                        "a sample with HTML",
                        "",
                        {
                            OF_B + "samples.jsonl": appended(
                                '{"step": 1, "prompt": "<script>", "greedy": "</td>", "reward": 0.0, "split": "test"}\n'
                            )
                        },
                    ),
                    ("result.json garbage", "", {OF_B + "result.json": "{"}),
                    ("sweep.json cut", "sweep.json", {"study/sweep.json": cut}),
                    ("sweep.json a list", "sweep.json", {"study/sweep.json": "[]"}),
                    ("sweep.json without runs", "sweep.json", {"study/sweep.json": json_without("runs")}),
                    ("runs that are numbers", "sweep.json", {"study/sweep.json": json_with(runs=[1, 2])}),
                    ("a run without a folder", "sweep.json", {"study/sweep.json": json_with(runs=[{"arm": "A"}])}),
                    (
                        "a run of a folder that is not there",
                        "C",
                        {
                            "study/sweep.json": json_with(
                                runs=[{"folder": folder, "arm": folder, "condition": "", "seed": 0} for folder in "AC"]
                            )
                        },
                    ),
                    ("a baseline that is no arm", "sweep.json", {"study/sweep.json": json_with(baseline="C")}),
                    ("failed.json a list", "failed.json", {OF_B + "failed.json": "[]"}),
                    ("failed.json without its line", "failed.json", {OF_B + "failed.json": '{"exit_code": 1}'}),
                ]
            ),
            ("all of a sweep lost", "", "", {"study/A": None, "study/B": None}, RUNS),
            ("the page a folder", "", "report.md", {"study/report.md/x": ""}),
            ("figures a file", "", "figures", {"study/figures": ""}),
            ("a full disk", "", "study cannot be written", {"study/report.md": link("/dev/full")}),
        ],
    ),
    *kinds(
        "reports",
        "compare run study",
        [
            ("a DIR that is a run and one of a sweep", "", "", {}, RUNS),
            ("a garbage row of one", "", "run/metrics.jsonl", {METRICS: appended("{\n")}, RUNS),
            ("config.json of one cut", "", "run/config.json", {CONFIG: cut}, RUNS),
            ("config.json of one lost", "", "", {CONFIG: None}, RUNS),
            ("samples of one lost", "", "", {SAMPLES: None}, RUNS),
            ("the sweep.json of one cut", "", "sweep.json", {"study/sweep.json": cut}, RUNS),
        ],
    ),
    *kinds(
        "reports",
        "report run",
        [
            ("a run of one row", "", "", {METRICS: changed(lambda text: text.splitlines(True)[0])}, RUNS),
            ("its config.json lost", "", "", {CONFIG: None}, RUNS),
            ("rows out of order", "", "", {METRICS: changed(lambda text: b"".join(text.splitlines(True)[::-1]))}, RUNS),
            ("the end of a row cut", "", "", {METRICS: changed(lambda text: text[:-20])}, RUNS),
        ],
    ),
]
