"""Disks and permissions, the environment, several processes, and what is refused before JAX is imported."""

import fcntl

from tests.reference.wrong_inputs import TRAIN, kinds, mode
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
            ("the disk full, at a checkpoint", "", "run/checkpoints", {}, FAILS | full(20_000)),
            ("the DIR read-only", "", "run", {"run": mode(0o500)}, FAILS),
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
                "data not readable",
                "--config=pretrained:smoke --config.task.name=jsonl "
                """--config.task.options='{"path": "rows.jsonl"}'""",
                "rows.jsonl",
                {"rows.jsonl": mode(0)},
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
                "an export into a folder read-only",
                "export --workdir=run --to=closed/new",
                "closed",
                {"closed/x": "", "closed": mode(0o500)},
            ),
        ],
    ),
    *kinds(
        "environment",
        TRAIN,
        [
            ("no home", "", "", {}, RUNS | environment(HOME="")),
            (
                "Weights & Biases without a login",
                "--config.log.wandb=x",
                "log.wandb",
                {},
                environment(WANDB_API_KEY="", WANDB_MODE="online", HOME="nowhere"),
            ),
            ("output that is no UTF-8", "", "", {}, RUNS | environment(PYTHONIOENCODING="ascii", LC_ALL="C")),
        ],
        alone=True,
    ),
    *kinds(
        "several processes",
        f"{TRAIN} --config.processes.start_timeout_s=4",
        [
            ("a number of processes alone", "--processes=2", "--coordinator HOST:PORT"),
            ("a coordinator alone", "--coordinator=localhost:1", "--processes COUNT"),
            *(  # 1, so that a scheduler starts it again
                (what, f"--coordinator={place} --processes=2 --process={own}", says, {}, {"code": 1})
                for what, place, own, says in [
                    ("a host that is not there", "no.invalid:1234", 1, "no.invalid:1234"),
                    ("a first that never starts", "localhost:46124", 1, "joined"),
                ]
            ),
        ],
    ),
    *kinds(
        "several devices",
        TRAIN,
        [
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
        ],
    ),
    *kinds(
        "before JAX is imported",
        "",
        [
            ("a config that is not there", "train --config=grop --workdir=new", "--config=grop", NO_JAX),
            ("a field mistyped", "train --config=grpo --workdir=new --config.optimizer.lr=1", "optimizer.lr", NO_JAX),
            ("k in words", "evaluate --workdir=run --k=all", "--k=all", NO_JAX),
            ("neither DIR nor checkpoint", "generate --prompt=1", "--workdir --checkpoint", NO_JAX),
            ("export to nowhere", "export --workdir=run", "--to", NO_JAX),
        ],
        alone=True,
    ),
]
