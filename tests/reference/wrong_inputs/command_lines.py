"""What is typed wrongly to commands that read a DIR or a checkpoint: arguments, steps and places.

What `train`, `sweep` and `branch` refuse before they start anything is in tests/test_mistakes.py, and what `generate`
refuses in tests/test_commands.py, both among the quick tests.
"""

from tests.reference.wrong_inputs import TRAIN, kinds

TABLE = [
    *kinds(
        "command line",
        "",
        [
            ("k above the samples", "evaluate --workdir=run --k=8 --samples=2", "--k=8"),
            ("a step that is not there", "evaluate --workdir=run --step=99", "step 99"),
            ("a sweep as DIR", "evaluate --workdir=study", "study holds no run"),
            ("top-p above 1", "generate --workdir=run --prompt=1= --top-p=2", "top_p=2"),
            ("export over a checkpoint", "export --workdir=run --to=checkpoint", "holds a checkpoint already"),
            ("export of a step that is not there", "export --workdir=run --to=new --step=7", "step 7"),
            ("check of a field mistyped", "check --config=grpo --config.sed=1", "config has no field 'sed'"),
            ("upcycle of what is not there", "upcycle --from=nothing --to=new", "nothing"),
            ("upcycle of a mixture", "upcycle --from=mixture --to=new", "num_experts"),
            ("plan without chips", "plan --config=grpo", "--topology"),
            ("plan of chips that are not there", "plan --config=grpo:smoke --topology=v9x:2x2", "v9x:2x2"),
            ("audit of what is not there", "audit nothing", "nothing is no file"),
            ("audit of no capture", "audit own.py", "own.py is no whole safetensors file"),
            ("report of what is not there", "report nothing", "nothing"),
            ("report of an empty folder", "report empty", "empty holds no run", {"empty": lambda path: path.mkdir()}),
            ("compare of one", "compare run", "DIR=run is the only one"),
            ("a dict that is not closed", f"""{TRAIN} --config.task.options='{{"digits": 3'""", "options"),
            ("NaN for a number", f"{TRAIN} --config.optimizer.learning_rate=nan", "learning_rate"),
            ("answers of 0.1 billion tokens", f"{TRAIN} --config.rollout.max_new_tokens=100000000", "the run needs"),
        ],
    ),
]
