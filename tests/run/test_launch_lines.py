"""The launch lines of the documents, read from them: each compiles for 8, 32, 64 and 256 devices or is refused."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import Parser, add_place, add_processes, fields_and_rest
from jaxrl_llm.ground import sharding
from jaxrl_llm.run.agreement import check_rows
from jaxrl_llm.run.settings import validate
from tests.ground.test_sharding import chips

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs" / "launch").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEVICES = (8, 32, 64, 256)
# The same rows and meshes, and of the sizes what is quick to compile.
SMALL = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 64,
    "model.head_dim": 8,
    "model.intermediate_size": 64,
    "model.moe_intermediate_size": 16,
    "model.vocab_size": 512,
    "task.options.prompt_length": 8,
    "task.options.answer_length": 4,
}


def documented():
    """{line: (config, fields, the devices that the text around it states or 0)} of every page."""
    found = {}
    for page in [*PAGES, *FILES]:
        text = page.read_text()
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) if page in PAGES else [text]:
            for number, command in enumerate(block.split("jaxrl_llm.main")[1:]):
                fields = settings_of(command)
                if "mesh.shape" in fields:
                    (config,) = re.findall(r"--config[ =]([\w:./]+)", command)
                    found[f"{page.stem} {config} {' '.join(fields)} {len(found)}.{number}"] = (
                        config,
                        fields,
                        stated(block),
                    )
            for line in block.splitlines():
                if line.startswith("--config.mesh.shape"):  # to be added to a command
                    found[f"{page.stem} {line}"] = "qwen3_0_6b_gsm8k_grpo", settings_of(line), 0
    found["the config of 30B as it is"] = "qwen3_30b_a3b_gsm8k_gspo", {}, 32
    return found


def settings_of(command):
    pairs = re.findall(r"--config\.([\w.]+)=('[^']*'|\"[^\"]*\"|[^\s\"]+)", command)
    return {name: value.strip("'\"") for name, value in pairs if not re.match(r"task\.|model\.pretrained", name)}


def stated(block):
    """How many devices the launcher in the block starts; 0: it does not say."""
    for pattern in (
        r"# devices: (\d+)",
        r"mpirun -n (\d+)",
        r"--processes=(\d+)",
    ):
        if counts := re.findall(pattern, block):
            return math.prod(map(int, counts[0] if isinstance(counts[0], tuple) else counts))
    return 0


LINES = documented()


def settings(config, fields):
    return validate(loading.load(loading.find(config), list(fields.items())))


def refusal(line, devices):
    """What a run of the line says on so many devices, "" if it takes them."""
    config, fields, _ = LINES[line]
    try:
        check_rows(settings(config, fields), devices)
    except ValueError as error:
        return str(error)
    return ""


def test_every_launcher_is_read():
    """Two launchers of the page and five files, two lines that are added to one, and a mesh in a config."""
    assert len(LINES) >= 10
    assert sorted(counts for _, _, counts in LINES.values() if counts) == [2, 16, 16, 32, 32, 32, 32, 32, 64]


def asked(path):
    """The devices that a launch file asks its scheduler for."""
    text = path.read_text()
    if path.suffix != ".yaml":
        slurm = re.findall(r"^#SBATCH --(?:nodes|ntasks-per-node)=(\d+)$", text, re.MULTILINE)
        cores = re.findall(r"accelerator-type=v5p-(\d+)", text)  # two of a chip
        return math.prod(map(int, slurm)) if slurm else int(cores[0]) // 2
    *_, job = yaml.safe_load_all(text)
    slices = 1
    if job["kind"] == "JobSet":
        (replicated,) = job["spec"]["replicatedJobs"]
        slices, job = replicated["replicas"], replicated["template"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (chips,) = container["resources"]["limits"].values()
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 300
    topology = job["spec"]["template"]["spec"].get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology")
    assert topology is None or math.prod(map(int, topology.split("x"))) == chips * job["spec"]["parallelism"]
    return slices * job["spec"]["parallelism"] * chips


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_launch_file_is_whole(path, monkeypatch):
    """It asks for the devices that it says, `train` takes its command, and checkpoints and data have their place."""
    text = path.read_text()
    assert asked(path) == stated(text)
    if path.suffix != ".yaml":
        subprocess.run(["bash", "-n", path], check=True)
    (command,) = re.findall(r"jaxrl_llm\.main((?:[^\n]|\\\n|\n +--)*)", text)
    fields, rest = fields_and_rest(shlex.split(command.replace("\\", "").rstrip('"\n ')))
    parser = Parser(prog="train")
    for name in ("--config", "--workdir"):
        parser.add_argument(name, required=True)
    add_place(parser)
    add_processes(parser)
    parser.parse_args(["--process=0" if word.startswith("--process=") else word for word in rest])
    assert any(word.startswith("--checkpoints") for word in rest)
    assert {"task.data_dir", "model.pretrained", "mesh.shape"} <= {name for name, _ in fields}


def test_slices_are_cut_as_their_file_says():
    """The mesh of two slices of 4 x 4, on stand-ins of their chips: data alone goes from one to the other."""
    (fields,) = (fields for _, fields, _ in LINES.values() if "mesh.dcn_shape" in fields)
    mesh = settings("qwen3_0_6b_gsm8k_grpo", fields).mesh
    devices = chips("TPU v5 lite", (4, 4, 1), (2, 2, 1), slices=2)
    grid = sharding.make_mesh(mesh.shape, devices, mesh.dcn_shape).devices
    assert grid.shape == (2, 16, 1, 1, 1)
    assert [{device.slice_index for device in one.flat} for one in grid] == [{0}, {1}]


@pytest.mark.parametrize("line", LINES)
def test_a_documented_line_runs_on_the_devices_that_it_states(line):
    """On others it may be refused, in a line that names a field to set."""
    *_, count = LINES[line]
    assert not refusal(line, count or 8)
    for said in filter(None, (refusal(line, devices) for devices in DEVICES)):
        assert re.search(r"mesh.shape=\(.*; (set|change|lower) (mesh|rollout|updates)\.\w+|needs (32|64) devices", said)
        assert "\n" not in said


def test_more_devices_take_more_rows():
    """What the refusals of the 0.6B model's line lead to."""
    fields = {"mesh.shape": "(1,-1,1,1)", "rollout.slots": "256"}
    for devices, prompts, rows in ((64, 64, 64), (128, 64, 128), (256, 128, 256)):
        changed = fields | {"rollout.prompts": str(prompts), "updates.micro_batch_rows": str(rows)}
        check_rows(settings("qwen3_0_6b_gsm8k_grpo", changed), devices)


def test_a_command_of_a_published_model_names_its_checkpoint():
    commands = [
        command
        for page in [*PAGES, *FILES]
        for command in re.split(r"jaxrl_llm\.main", page.read_text())[1:]
        if re.match(r"\s+\\?\s*--config[ =](configs/)?qwen3_(0_6b|30b)\w+(\.py)?\s", command)
    ]
    assert len(commands) == 11
    for command in commands:
        assert "model.pretrained=" in re.split(r"\n```|\n\n", command)[0], command[:200]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [range(33), pytest.param(range(33, 257), marks=pytest.mark.long)], ids=["32", "256"])
def test_the_documented_lines_compile(counts):
    """Rollout and update of every line, for the numbers of devices that it is not refused on."""
    cases = []
    for line, (config, fields, count) in LINES.items():
        for devices in sorted(({*DEVICES, count} - {0}).intersection(counts)):
            case = [config, fields | ({} if config.endswith(":smoke") else SMALL), devices]
            if not refusal(line, devices) and case not in cases and (fields or devices == count):
                cases.append(case)
    program = "from tests.run.test_launch_lines import compiled; compiled()"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={max(DEVICES)}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(cases),
        text=True,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(cases) >= 5


def compiled():
    """In a process with 256 devices: the cases of standard input."""
    import jax

    from jaxrl_llm.plan.table import compile_for, trace_run
    from jaxrl_llm.run.assembly import build

    for config, fields, devices in json.load(sys.stdin):
        fields.pop("mesh.dcn_shape", None)  # these devices are of one slice
        some = jax.devices()[:devices]
        programs = trace_run(build(settings(config, fields), some), some, ("rollout", "update"))
        for program in programs:
            compile_for(program, some)
        print(config, devices, [program.name for program in programs], flush=True)
