"""Disks and permissions, the environment, several processes, and what is refused before JAX is imported."""

import fcntl

from tests.reference.wrong_inputs import TRAIN, kinds, link, mode
from tests.reference.wrong_inputs.folders import MORE

RUNS, WARNS, FAILS = {"expects": "runs"}, {"expects": "warning"}, {"code": 1}
NO_JAX = {"jax.py": "raise SystemError('JAX was imported')\n", "numpy.py": "raise SystemError('NumPy was imported')\n"}


def occupied(path):
    """A lock that another process, this one, holds."""
    handle = open(path, "a")
    fcntl.flock(handle, fcntl.LOCK_EX)
    _HELD.append(handle)


_HELD = []


def environment(**variables):
    return {"environment": variables}


def full(size):
    return {"most_bytes": size}


TABLE = [
    *kinds(
        "disks and permissions",
        MORE,
        [
            ("the disk full, at rows", "", "run", {}, FAILS | full(3000)),
            ("the disk full, at config.json", "", "config.json", {"run/config.json": None}, FAILS | full(1000)),
            ("the disk full, at a checkpoint", "", "run/checkpoints", {}, FAILS | full(20_000)),
            ("the DIR read-only", "", "run", {"run": mode(0o500)}, FAILS),
            ("checkpoints read-only", "", "checkpoints", {"run/checkpoints": mode(0o500)}, FAILS),
            ("checkpoints not readable", "", "checkpoints", {"run/checkpoints": mode(0)}),
            ("config.json not readable", "", "", {"run/config.json": mode(0)}, RUNS),
            ("metrics read-only", "", "metrics.jsonl", {"run/metrics.jsonl": mode(0o400)}),
            ("metrics not readable", "", "metrics.jsonl", {"run/metrics.jsonl": mode(0)}),
            ("the DIR written by another process", "", "run", {"run/.lock": occupied}),
        ],
    ),
    *kinds(
        "disks and permissions",
        TRAIN,
        [
            (
                "the folder of the DIR read-only",
                "--workdir=closed/new",
                "closed/new",
                {"closed/x": "", "closed": mode(0o500)},
            ),
            (
                "a cache folder read-only",
                "",
                "data_dir",
                {"closed/x": "", "closed": mode(0o500)},
                environment(XDG_CACHE_HOME="closed"),
            ),
            ("a config not readable", "--config=own.py", "own.py", {"own.py": mode(0)}),
            (
                "data not readable",
                "--config=pretrained:smoke --config.task.name=jsonl "
                """--config.task.options='{"path": "rows.jsonl"}'""",
                "rows.jsonl",
                {"rows.jsonl": mode(0)},
            ),
            (
                "data of a folder read-only",
                "--config.task.data_dir=closed",
                "closed",
                {"closed/x": "", "closed": mode(0o500)},
            ),
            (
                "the warm start's folder read-only",
                "--config.warm_start.cache_dir=closed --config.warm_start.steps=1",
                "warm_start.cache_dir",
                {"closed/x": "", "closed": mode(0o500)},
                FAILS,
            ),
            (
                "the warm start's folder a file",
                "--config.warm_start.cache_dir=own.py --config.warm_start.steps=1",
                "warm_start.cache_dir",
                {},
                FAILS,
            ),
        ],
    ),
    *kinds(
        "disks and permissions",
        "",
        [
            (
                "a checkpoint not readable",
                "generate --checkpoint=checkpoint --prompt=1 --max-tokens=1",
                "model.safetensors",
                {"checkpoint/model.safetensors": mode(0)},
            ),
            (
                "its config not readable",
                "generate --checkpoint=checkpoint --prompt=1 --max-tokens=1",
                "config.json",
                {"checkpoint/config.json": mode(0)},
            ),
            (
                "a GGUF file not readable",
                "generate --checkpoint=model.gguf --prompt=1",
                "model.gguf",
                {"model.gguf": mode(0)},
            ),
            (
                "an export into a folder read-only",
                "export --workdir=run --to=closed/new",
                "closed",
                {"closed/x": "", "closed": mode(0o500)},
            ),
            (
                "a DIR read-only, evaluated",
                "evaluate --workdir=run --prompts=2 --samples=1 --k=1",
                "evaluation.jsonl",
                {"run": mode(0o500)},
                WARNS,
            ),
            (
                "a result on a full disk",
                "evaluate --workdir=run --prompts=2 --samples=1 --k=1 --json=/dev/full",
                "/dev/full: ",
                {},
                FAILS,
            ),
            (
                "the log of evaluations on a full disk",
                "evaluate --workdir=run --prompts=2 --samples=1 --k=1",
                "evaluation.jsonl",
                {"run/evaluation.jsonl": link("/dev/full")},
                FAILS,
            ),
            ("a report of a DIR read-only", "report run", "run", {"run": mode(0o500)}),
            (
                "a report of rows not readable",
                "report study",
                "B/metrics.jsonl",
                {"study/B/metrics.jsonl": mode(0)},
                RUNS,
            ),
            ("a report of a folder not readable", "report study", "B", {"study/B": mode(0)}, RUNS),
            (
                "a report whose figures are read-only",
                "report run",
                "figures",
                {"run/figures/x": "", "run/figures": mode(0o500)},
            ),
            (
                "a comparison on a full disk",
                "compare run study --out=out",
                "out",
                {"out/comparison.md": link("/dev/full")},
            ),
            (
                "a sweep not readable",
                "sweep --sweep=sweep.py --workdir=new --launcher=none",
                "sweep.py",
                {"sweep.py": mode(0)},
            ),
            (
                "a sweep into a folder read-only",
                "sweep --sweep=sweep.py --workdir=closed/new --launcher=none",
                "closed",
                {"closed/x": "", "closed": mode(0o500)},
            ),
            (
                "a plan on a full disk",
                "sweep --sweep=sweep.py --workdir=new --launcher=none",
                "sweep.json",
                {},
                full(100),
            ),
        ],
    ),
    *kinds(
        "environment",
        TRAIN,
        [
            ("no home", "", "", {}, RUNS | environment(HOME="")),
            ("a cache folder below a file", "", "data_dir", {"own.py": ""}, environment(XDG_CACHE_HOME="own.py/x")),
            (
                "compiled programs below a file",
                "",
                "own.py/x",
                {"own.py": ""},
                WARNS | environment(JAX_COMPILATION_CACHE_DIR="own.py/x"),
            ),
            ("a platform that is not there", "", "JAX_PLATFORMS=nonsense", {}, environment(JAX_PLATFORMS="nonsense")),
            ("a GPU that is not there", "", "JAX_PLATFORMS=cuda", {}, environment(JAX_PLATFORMS="cuda")),
            (
                "Weights & Biases without a login",
                "--config.log.wandb=x",
                "log.wandb",
                {},
                environment(WANDB_API_KEY="", WANDB_MODE="online", HOME="nowhere"),
            ),
            ("output that is no UTF-8", "", "", {}, RUNS | environment(PYTHONIOENCODING="ascii", LC_ALL="C")),
            ("a DIR whose name is no UTF-8", "--workdir=new\udcff", "--workdir=new"),
            ("a terminal one column wide", "", "", {}, RUNS | environment(COLUMNS="1")),
            ("a terminal of no columns", "", "", {}, RUNS | environment(COLUMNS="x")),
        ],
        alone=True,
    ),
    *kinds(
        "environment",
        "report study",
        [
            ("a report on a terminal one column wide", "", "", {}, RUNS | environment(COLUMNS="1")),
            ("a report in ASCII", "", "", {}, RUNS | environment(PYTHONIOENCODING="ascii", LC_ALL="C")),
        ],
    ),
    *kinds(
        "several processes",
        f"{TRAIN} --config.processes.start_timeout_s=4",
        [
            ("a number of processes alone", "--processes=2", "--coordinator HOST:PORT"),
            ("a number of this one alone", "--process=0", "--coordinator HOST:PORT"),
            ("a coordinator alone", "--coordinator=localhost:1", "--processes COUNT"),
            ("a number in words", "--processes=two", "--processes"),
            ("one beyond the last", "--coordinator=localhost:1 --processes=2 --process=2", "process"),
            ("one below 0", "--coordinator=localhost:1 --processes=2 --process=-1", "process"),
            ("no processes", "--coordinator=localhost:1 --processes=0 --process=0", "process"),
            ("a coordinator without a port", "--coordinator=localhost --processes=2 --process=1", "localhost"),
            ("a port in words", "--coordinator=localhost:port --processes=2 --process=1", "localhost:port"),
            ("a port of six digits", "--coordinator=localhost:999999 --processes=2 --process=1", "localhost:999999"),
            *(  # 1, so that a scheduler starts it again
                (what, f"--coordinator={place} --processes=2 --process={own}", says, {}, {"code": 1})
                for what, place, own, says in [
                    ("a host that is not there", "no.invalid:1234", 1, "no.invalid:1234"),
                    ("others that never start", "localhost:46123", 0, "joined"),
                    ("a first that never starts", "localhost:46124", 1, "joined"),
                ]
            ),
            ("a number in the environment in words", "", "JAX_NUM_PROCESSES", {}, environment(JAX_NUM_PROCESSES="two")),
            ("half of the environment", "", "--coordinator", {}, environment(JAX_PROCESS_ID="0")),
        ],
    ),
    *kinds(
        "several devices",
        TRAIN,
        [
            (
                "rows that they do not divide",
                "--config.mesh.shape='(1,-1,1,1)'",
                "micro_batch_rows",
                {},
                environment(XLA_FLAGS="--xla_force_host_platform_device_count=32"),
            ),
            (
                "a size that does not divide them",
                "--config.mesh.shape='(3,-1,1,1)'",
                "mesh.shape",
                {},
                environment(XLA_FLAGS="--xla_force_host_platform_device_count=4"),
            ),
            (
                "slots that they do not divide",
                "--config.mesh.shape='(1,4,1,1)' --config.rollout.slots=6",
                "slots",
                {},
                environment(XLA_FLAGS="--xla_force_host_platform_device_count=4"),
            ),
            (
                "a rollout's mesh of some of them",
                "--config.mesh.shape='(1,4,1,1)' --config.rollout.mesh_shape='(2,1,1,1)'",
                "rollout.mesh_shape",
                {},
                environment(XLA_FLAGS="--xla_force_host_platform_device_count=4"),
            ),
        ],
    ),
    *kinds(
        "before JAX is imported",
        "",
        [
            ("a config that is not there", "train --config=grop --workdir=new", "--config=grop", NO_JAX),
            ("no DIR", "train --config=grpo", "--workdir", NO_JAX),
            ("a field mistyped", "train --config=grpo --workdir=new --config.optimizer.lr=1", "optimizer.lr", NO_JAX),
            ("a command mistyped", "all trian", "'trian'", NO_JAX),
            ("k in words", "evaluate --workdir=run --k=all", "--k=all", NO_JAX),
            ("neither DIR nor checkpoint", "generate --prompt=1", "--workdir --checkpoint", NO_JAX),
            ("export to nowhere", "export --workdir=run", "--to", NO_JAX),
            ("check of a config that is not there", "check --config=nothing", "--config=nothing", NO_JAX),
            ("upcycle of nothing", "upcycle --to=new", "--from", NO_JAX),
            ("plan without chips", "plan --config=grpo", "--topology", NO_JAX),
            ("report of nothing", "report", "dir", NO_JAX),
            ("compare of one", "compare run", "DIR=run is the only one", NO_JAX),
            ("a sweep that is not there", "sweep --sweep=nothing.py --workdir=new", "--sweep=nothing.py", NO_JAX),
        ],
        alone=True,
    ),
]
