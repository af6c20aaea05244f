"""The commonest mistakes on the command line: what is typed, the one line that comes back, and the exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import __main__, evaluation, main, upcycle
from jaxrl_llm.config import start_up
from jaxrl_llm.ground.machine import folder_of_its_own
from jaxrl_llm.run import trainer
from jaxrl_llm.sweep import __main__ as sweep
from jaxrl_llm.sweep import branching
from tests.reference.slowly import first_quick

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "all": __main__,
    "train": main,
    "evaluate": evaluation,
    "sweep": sweep,
    "branch": branching,
    "upcycle": upcycle,
}

# The user's own files, by name.
FILES = {
    "broken.py": "def get_config(variant=''):\n    return (1\n",
    "empty.py": "x = 1\n",
    "raises.py": "from configs import base\n\ndef get_config(variant=''):\n    return base.get_config()['nothing']\n",
    "typo.py": "from configs import base\n\n\ndef get_config():\n    c = base.get_config('smoke')\n"
    "    with c.unlocked():\n        c.optimizer.lr = 1.0\n    return c\n",
    "broken_sweep.py": "def get_sweep(:\n",
    "bad_sweep.py": "from jaxrl_llm.sweep import Sweep\n\ndef get_sweep():\n"
    "    return Sweep('?', [{'arm': 'A', 'seed': 0, 'optimizer.lr': 1}], 'A', config='grpo:smoke')\n",
    "good_sweep.py": "from jaxrl_llm.sweep import Sweep\n\ndef get_sweep():\n"
    "    return Sweep('?', [{'arm': 'A', 'seed': 0}], 'A', config='grpo:smoke')\n",
    "list_sweep.py": "def get_sweep():\n    return [{'arm': 'A', 'seed': 0}]\n",
    "slow_sweep.py": "from jaxrl_llm.sweep import Sweep\n\ndef get_sweep():\n"
    "    return Sweep('?', [{'arm': 'A', 'seed': 0}], 'A', minutes=-1)\n",
    "null.py": "x = 1\0",
    "leaves.py": "raise SystemExit('bye')\n",
    "raising_sweep.py": "def get_sweep():\n    return {}['arm']\n",
    "outside_sweep.py": "from jaxrl_llm.sweep import Sweep\n\ndef get_sweep():\n"
    "    return Sweep('?', [{'arm': '..', 'seed': 0}], '..')\n",
    "half/config.json": '{"config": {"seed"',
    "other/config.json": "[]",
    "bare/config.json": '{"config": {}, "config_hash": "x"}',
}

# What is typed after `jaxrl-llm`: (the line says so, exit code). A row of `train` starts with a right config and DIR.
TABLE = {
    # commands and arguments
    "all trian": "argument COMMAND: invalid choice: 'trian' (choose from 'train', 'check', ",
    "all train --workdir=new": "the following arguments are required: --config; see --help",
    "all train --config=grpo:smoke": "the following arguments are required: --workdir; see --help",
    # names
    "train --config.optimiser.learning_rate=1": "config has no block 'optimiser'; did you mean 'optimizer'?",
    "train --config.optimizer.lr=1": "config has no field 'optimizer.lr'; did you mean 'optimizer.learning_rate'?",
    "train --config.optimizer.learning_rat=1": "did you mean 'optimizer.learning_rate'?",
    "train --config.rollout.minibatches=1": "no field 'rollout.minibatches'; did you mean 'updates.minibatches'?",
    "train --config.learning_rate=1": "did you mean 'critic.learning_rate' or 'optimizer.learning_rate' or ",
    "train --config.rollout.num_generations=8": "did you mean 'rollout.group_size'?",
    "train --config.objectiv=gspo": "config has no field 'objectiv'; did you mean 'objective'?",
    "train --config.objective=gspo": "--config.objective is a block; set one of its fields: ",
    "train --config.objective.name=grop": "'grop' is unknown (did you mean 'grpo'?)",
    "train --config.objective.tau_pos=1": "grpo has no hyper-parameter 'tau_pos'; it belongs to sapo",
    "train --config.task.name=sorting": "unknown task 'sorting' (did you mean 'sort'?)",
    "train --config.task.options.digit=3": "task 'sort' has no option 'digit' (did you mean 'digits'?)",
    "train --workdri=x": "unknown argument --workdri=x; did you mean --workdir?; see --help",
    "train steps=3": "unknown argument steps=3; fields are set as --config.block.field=value",
    "train --config.steps": "--config.steps has no value; set it as --config.steps=value",
    # files
    "train --config=grop": "--config=grop is neither a file nor one of the package's configs (base, ",
    "train --config=rsop:smoke": "--config=rsop:smoke is neither a file nor one of the package's configs (base, ",
    "train --config=vespoo": " (did you mean 'vespo'?); give one of these names, or the path of a file that",
    "train --config=rspo:nonsense": "unknown variant 'nonsense'; this config has 'smoke' or none",
    "train --config=configs/nothing.py": "--config=configs/nothing.py is neither a file nor",
    "train --config=grpo:nonsense": "unknown variant 'nonsense'; this config has 'smoke' or none",
    "train --config=broken.py": "broken.py, line 2: '(' was never closed; correct the file",
    "train --config=empty.py": "empty.py defines no get_config(variant) -> ConfigDict",
    "train --config=raises.py": "raises.py, line 4: KeyError: ",
    "train --config=typo.py": "config has no field 'optimizer.lr'; did you mean 'optimizer.learning_rate'?",
    "train --config=null.py": "null.py: source code string cannot contain null bytes; correct the file",
    "train --config=leaves.py": "leaves.py, line 1: SystemExit: bye",
    # values
    f"train --config.seed={'9' * 400}": "9 is out of range; give seed between 0 and ",
    "train --config.updates.minibatches=1e3": "--config.updates.minibatches=1e3 must be a whole number, for example 4",
    "train --config.optimizer.learning_rate=fast": "must be a number, for example 1e-3",
    "train --config.rewards.overlong_filter=maybe": "must be True or False",
    "train --config.mesh.shape=4": "--config.mesh.shape=4 must be a tuple, for example (1, 2)",
    "train --config.rollout.temperature=0": "rollout.temperature=0 makes all answers of a group equal, so "
    "there is nothing to compare; set rollout.temperature=1.0",
    "train --config.rollout.temperature=-1": "rollout.temperature=-1.0 must be at least 0",
    "train --config.rollout.top_p=1.5": "rollout.top_p=1.5 is out of range; give rollout.top_p above 0 and at most 1",
    "train --config.rollout.top_p=0.9": "rollout.top_p=0.9 needs a bound on the tokens that it keeps, which training",
    "train --config.rollout.group_size=1": "rollout.group_size=1 leaves grpo nothing to compare an answer with; set",
    "train --config.updates.minibatches=3": "updates.minibatches=3 must divide rollout.prompts x rollout.group_size",
    "train --config.mesh.shape=(64,1,1,1) --config.rollout.prompts=64": "needs 64 devices",
    "train --config.optimizer.learning_rate=1e9": "optimizer.learning_rate=1e+09: an update of AdamW moves every ",
    "train --config.task.system=Hi": "set task.chat=True, or clear it by --config.task.system=",
    "train --config.task.chat_options={'a':1}": "set task.chat=True, or clear it by --config.task.chat_options={}",
    "train --config.mesh.shape=(1,-1,1,1) --config.updates.micro_batch_rows=2": "set updates.micro_batch_rows=4, or",
    "train --config.rollout.max_prompt_length=2": "raise prompt_length (in a run: rollout.max_prompt_length;",
    "train --coordinator=host0 --processes=2 --process=1": "coordinator=host0 must be HOST:PORT of process 0, for",
    "train --coordinator=host0:port --processes=2 --process=1": "coordinator=host0:port must be HOST:PORT",
    # DIRs
    "train --workdir=new\udcff": "is not UTF-8; give the folder another name",
    "train --workdir=half": "half/config.json is not valid JSON (",
    "train --workdir=other": "other/config.json holds no JSON object",
    "train --workdir=broken.py/run": "cannot be written",
    "train --workdir=broken.py": "workdir=broken.py cannot be written",
    "train --workdir=loop": "workdir=loop cannot be written",
    "train --workdir=": "--workdir= is no folder of its own; name one, for example --workdir=runs/first",
    "train --workdir= --restart": "--workdir= is no folder of its own",
    "evaluate --workdir=nothing": "nothing holds no run (no config.json); give --workdir of a run",
    "evaluate --workdir=half": "half/config.json is not valid JSON (",
    "evaluate --workdir=bare": "bare/config.json lacks what a run records in it; bring it back from a copy",
    "evaluate": "one of the arguments --workdir --checkpoint is required; see --help",
    "evaluate --workdir=half --k=all": "--k=all must be whole numbers separated by commas, for example 1,4,16",
    # sweeps
    "sweep --sweep=nothing.py --workdir=s": "--sweep=nothing.py does not exist; name a file that defines get_sweep",
    "sweep --sweep=broken_sweep.py --workdir=s": "broken_sweep.py, line 1: ",
    "sweep --sweep=empty.py --workdir=s": "--sweep=empty.py defines no get_sweep(variant) -> Sweep",
    "sweep --sweep=half/metrics.jsonl --workdir=s": "metrics.jsonl is no Python file; name one, with the ending .py",
    "sweep --sweep=raising_sweep.py --workdir=s": "raising_sweep.py, line 2: KeyError: 'arm'",
    "sweep --sweep=outside_sweep.py --workdir=s": "the label '..' of a run is no name of a folder",
    "sweep --sweep=good_sweep.py --workdir=half --launcher=none": "workdir=half is the DIR of one run",
    "sweep --sweep=list_sweep.py --workdir=s": "get_sweep of list_sweep.py returned [{'arm': 'A', 'seed': 0}]; return",
    "sweep --sweep=slow_sweep.py --workdir=s": "slow_sweep.py, line 4: minutes=-1 is out of range; give",
    "sweep --sweep=good_sweep.py --workdir=broken.py/s --launcher=none": "broken.py/s",
    "sweep --sweep=good_sweep.py --workdir=s --launcher=kubernetes": "argument --launcher: invalid choice: ",
    "sweep --sweep=good_sweep.py --workdir=s --launcher=local --cores=1000000": "cores=1000000 is not between 1 and ",
    "sweep --sweep=good_sweep.py --workdir= --launcher=none": "--workdir= is no folder of its own",
    "sweep --sweep=good_sweep.py --workdir=s --launcher=none --cores=0": "--cores=0 must be at least 1; leave it out",
    "sweep --sweep=good_sweep.py --workdir=s --launcher=none --cores_per_run=0": "--cores_per_run=0 must be at least",
    "sweep --sweep=bad_sweep.py --workdir=s": "the configuration of A, seed 0 is refused: config has no field",
    "branch --config=grpo:smoke --workdir=b --branches=arms": "branches=arms must be JSON with first, every",
    'branch --config=grpo:smoke --workdir=b --branches={"arms":["A"]}': "]} must be JSON with first, every",
    'branch --config=grpo:smoke --workdir=b --branches={"arms":{"A":1}}': "} must be JSON with first, every",
    "upcycle --from=half --to=u --seed=-1": "--seed=-1 must be at least 0",
    'branch --config=grpo:smoke --workdir= --branches={"arms":{}}': "--workdir= is no folder of its own",
    'branch --config=grpo:smoke --workdir=broken.py/run --branches={"arms":{}}': "workdir=broken.py/run cannot be",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "loop").symlink_to("loop")
    for name in ("half", "other"):
        (folder / name / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


@pytest.mark.parametrize("typed", TABLE)
def test_a_mistake_is_one_line_and_exit_code_2(typed, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setattr(trainer, "train", None)  # would fail: nothing is started
    command, *arguments = typed.split(" ")
    if command == "train":
        right = ["--config=grpo:smoke", "--workdir=run", f"--config.task.data_dir={folder / 'data'}"]
        arguments = right + arguments  # the last one of two counts
    before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    try:
        code = PROGRAMS[command].main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert TABLE[typed] in printed.err
    after = (path for path in folder.rglob("*") if not {"__pycache__", "data"} & set(path.parts))
    assert sorted(path for path in before if "data" not in path.parts) == sorted(after)


@pytest.mark.parametrize("root", ["", "/", "/tmp/..", "//", "///"])
def test_a_run_has_a_folder_of_its_own(root, folder, monkeypatch):
    """Asked of the function: a command that let `/` pass would write there."""
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=f"^--workdir={root} is no folder of its own"):
        folder_of_its_own(root)
    assert folder_of_its_own(".") == Path()


@pytest.mark.parametrize("platform", first_quick(1, ["nonsense", "cuda"]))
def test_a_platform_that_is_not_there(platform, folder):
    command = [sys.executable, "-m", "jaxrl_llm", "train", "--config=grpo:smoke", "--workdir=new"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": platform, "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: JAX_PLATFORMS={platform} gives no device (")
