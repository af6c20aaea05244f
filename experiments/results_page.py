"""docs/results.md: every run worth quoting, out of the committed data.

    python -m experiments.results_page             # prints the page
    python -m experiments.results_page --write     # into docs/results.md, as a test compares it

A number that no archive holds is "not kept".
"""

import argparse
import json
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.performance.turns import ROOT
from experiments.real_model.compare import medians
from experiments.routing_replay.table_parts import SAMPLED, Table, markdown, start_of, unpacked
from experiments.routing_replay.table_rows import filled, row_of, rows_under
from experiments.speedrun import race
from jaxrl_llm.report.comparisons import Outcome
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import paired_difference

PAGE = ROOT / "docs" / "results.md"
DATA = ROOT / "experiments"
PAIRS = Outcome("held-out pairs, end", "held-out pairs", lambda run: run.value("eval/pair_accuracy"))
HEAD = ["sweep", "method", "seeds", "start", "end", "seconds"]

INTRODUCTION = """
# Results

**In short.** SmolLM2 (135 M) learns sums on one CPU core in minutes, from {sums; GRPO; start} to {sums; GRPO; ends at}
by GRPO, {sums; GSPO; ends at} by GSPO and {sums; DAPO; ends at} by DAPO. On sorting, a tiny mixture of experts (MoE) at
tuned rates and N = 32 ends at {tuned; GRPO; ends at} with GRPO, {tuned; GSPO; ends at} with GSPO, {tuned; SAPO; ends
at} with SAPO, and {tuned; DAPO; ends at} with DAPO, which draws more answers. At too high a rate GRPO falls from {high;
GRPO; start} to {high; GRPO; ends at}, GSPO to {high; GSPO; ends at} and SAPO to {high; SAPO; ends at}. On countdown
DAPO ends at {long; DAPO; ends at} and GRPO at {long; GRPO; ends at}; GRPO with slightly more answers than DAPO ends at
{long; GRPO, 96 prompts; ends at}. A learnt reward gives less than the rule: PPO with the model ends at {pairs; PPO,
model; ends at}, GRPO with the rule at {pairs; GRPO, rule; ends at}. A rollout takes TRL {trl; TRL / jaxrl_llm, seed 1;
rollout} to {trl; TRL / jaxrl_llm, seed 2; rollout} times our CPU time. Three or five seeds give estimates only; no run
used an accelerator.

`python -m experiments.results_page --write` writes this page from the data in the repository, and a test recomputes it;
do not edit it. Start and end are held-out sampled accuracy: the mean over seeds, for the end with its 95 % t interval.
A run that diverged counts 0. These intervals say how far seeds lie apart; the experiments' own pages compare methods by
paired differences. Seconds are the median over seeds of a run's rollouts and updates: wall time of one CPU core that
had other work too, without start, evaluations and checkpoints. N is the number of updates per rollout. A model is
layers x width. A + behind a commit marks a tree with uncommitted changes. The commands resume (run those on preferences
in the order of their page), and `tar -xf ARCHIVE -C FOLDER` unpacks the runs that `jaxrl-llm report` shows.
"""

# The tables that the introduction quotes: how the paragraph above each begins, and what the first cell is.
QUOTED = {
    "sums": ("- `full`: 16 rollouts", "`full`"),
    "tuned": ("- `full`: 30 rollouts", "`full`, N = 32"),
    "high": ("- `full`: 30 rollouts", "`seeds`"),
    "long": ("- `horizon`", "`horizon`"),
    "pairs": ("- `methods`", "`methods`"),
}

ROUTING = """
## Effects of one rollout

Trajectories of ten states each, from which every method takes one rollout, are in
[pooled](../experiments/routing_replay/results/pooled.md): R2, GSPO, SAPO, SAT and tight clips against GRPO, by learning
rate. [The study of routing replay](../experiments/routing_replay/README.md) says what they show.
[The study of gates](../experiments/gates/README.md) has one rollout's drift, flips and routing's share by form of gate,
and what wrong experts cost GRPO with four of the forms, a lag and bfloat16 with two.
"""

SPEED = """
## The same run in TRL

Sums with SmolLM2-135M-Instruct, step by step in turns on one core: CPU seconds (medians of the steps after the first,
of all seeds; the machine had other work, so the ratios count, each of one seed) and peak memory.
[The comparison](../experiments/real_model/README.md#the-same-run-in-trl) says where the time goes, and what is left of
it with the same padded rows and at real lengths (1.2 to 1.5 times on an Intel Xeon, 2.5 to 2.9 on an AMD EPYC);
`python -m experiments.real_model.compare`, data `trl_*.json` beside it, commits not kept. TRL and Tunix on other
workloads are in [performance](../experiments/performance/README.md); the files of those runs were not kept.
"""

SPEEDRUN = """
## Speedrun

The tiny mixture from its warm start to 0.90 on sorting, in CPU seconds of one core relative to the baseline in the same
race: [rules and how to enter](../experiments/speedrun/README.md).
"""


@dataclass(frozen=True)
class Sweep:
    """Committed runs: where they lie, how they are run again, and what of them is quoted."""

    experiment: str
    archive: str
    folder: str  # in the archive
    variant: str  # of the experiment's sweep.py
    setting: str  # of all its runs, beside their condition
    conditions: Sequence[str] = ()  # those quoted; none: all
    score: Outcome = SAMPLED

    def study(self, folder: Path) -> Study:
        return unpacked(DATA / self.experiment / "results" / f"{self.archive}.tar.xz", self.folder, folder)


def _preferences(folder: str, setting: str, score: Outcome = SAMPLED, variant: str = "") -> Sweep:
    return Sweep("preferences", "preferences", folder, variant or folder, setting, score=score)


TASKS: dict[str, Sequence[Sweep]] = {
    "Sums of two numbers, a published model": [
        Sweep("real_model", "real_model", "real_model", "full", "16 rollouts of 64 answers, N = 2, 5e-6"),
    ],
    "Sorting ten digits": [
        Sweep("routing_replay", "full", "full", "full", "30 rollouts, tuned learning rates", ("N = 8", "N = 32")),
        Sweep("routing_replay", "seeds", "seeds", "seeds", "30 rollouts, N = 32, 4e-4: too high a rate"),
    ],
    "Countdown with three numbers": [
        Sweep("routing_replay", "horizon", "horizon", "horizon", "300 rollouts, N = 8, 3e-4"),
        Sweep("ablations", "ablations", "dapo_parts", "dapo_parts", "60 rollouts, N = 8, 3e-4, answers cut at 9"),
        Sweep("ablations", "ablations", "kl", "kl", "60 rollouts, N = 8, 3e-4, a KL of coefficient 0.1"),
    ],
    "Sorting six digits, with pairs and reward models": [
        _preferences("methods", "80 rollouts of 256 answers, N = 4, 3e-4; DPO 60 steps of 64 pairs, 1e-5"),
        _preferences("dpo", "60 steps of 64 pairs, 1e-5"),
        _preferences("over", "120 rollouts, PPO with the poor reward model", variant="overoptimisation"),
    ],
    "Reward models: share of held-out pairs that they order right": [
        _preferences("models", "those of the table above: 600 steps of 64 pairs, 6 of 32", PAIRS),
        _preferences("noise", "150 steps of 64 pairs", PAIRS),
    ],
}


def section(task: str, folder: Path) -> str:
    """A task: where its runs come from, and their table. The data are unpacked in `folder`."""
    studies = [(sweep, sweep.study(folder)) for sweep in TASKS[task]]
    table = [row for one in studies for row in _rows(*one)]
    return "\n".join([f"\n## {task}\n", *(_source(*one) for one in studies), "", _table(HEAD, table)])


def _rows(sweep: Sweep, study: Study) -> Table:
    """A row a condition and method of what is quoted."""
    found = []
    for condition in sweep.conditions or study.conditions:
        for arm in study.arms:
            runs = [run for run in study.select(arm, condition) if run.ended]
            start = f"{np.mean([start_of(run) for run in runs]):.3f}" if sweep.score is SAMPLED else ""
            label = ", ".join(filter(None, (f"`{sweep.variant}`", condition)))
            found.append([label, arm, str(len(runs)), start, _end(runs, sweep.score), seconds(runs)])
    return found


def _source(sweep: Sweep, study: Study) -> str:
    """The line above the table: setting, model, commits, archive and command of a sweep."""
    quoted = [run for run in study.runs if run.condition in (sweep.conditions or study.conditions)]
    models, commits = (", ".join(dict.fromkeys(map(of, quoted))) for of in (_model, _commit))
    archive = f"[archive](../experiments/{sweep.experiment}/results/{sweep.archive}.tar.xz)"
    command = (
        f"`python -m jaxrl_llm.sweep --sweep experiments/{sweep.experiment}/sweep.py:{sweep.variant} --workdir DIR`"
    )
    text = f"- `{sweep.variant}`: {sweep.setting}; {models}; commits {commits}; {archive};"
    wrapped = textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return f"{wrapped}\n  {command}"


def _model(run: Run) -> str:
    """Describe the model that learns, in words."""
    fields = run.record["config"]["model"]
    if published := fields.get("pretrained"):
        return Path(published).name.split(".")[0]
    experts = (
        f"{fields['num_experts']} experts top-{fields['num_experts_per_tok']}" if fields["num_experts"] else "dense"
    )
    return f"{fields['num_hidden_layers']} x {fields['hidden_size']}, {experts}"


def _commit(run: Run) -> str:
    commit = str(run.record["commit"])
    return commit[:7] + "+" * commit.endswith("+")


def _end(runs: Sequence[Run], score: Outcome) -> str:
    """Mean over seeds with its 95 % t interval."""
    d = paired_difference([score.measure(run) for run in runs], np.zeros(len(runs)), [run.seed for run in runs])
    return f"{d.mean:.3f} [{d.low:.3f}, {d.high:.3f}]"


def seconds(runs: Sequence[Run]) -> str:
    spent = [sum(run.series(f"time/{part}_s")[1].sum() for part in ("rollout", "update")) for run in runs]
    return f"{np.median(spent):.0f}" if all(run.series("time/update_s")[1].size for run in runs) else "not kept"


def in_trl() -> str:
    """CPU seconds of a step of ours and of TRL, and their ratios by seed."""
    runs = [json.loads(path.read_text()) for path in sorted(DATA.glob("real_model/results/trl_*.json"))]
    rows = [[name, *(f"{x:.2f}" for x in _step(runs, key))] for name, key in (("jaxrl_llm", "ours"), ("TRL", "trl"))]
    for run in runs:
        ratios = [theirs / ours for theirs, ours in zip(_step([run], "trl"), _step([run], "ours"), strict=True)]
        rows.append([f"TRL / jaxrl_llm, seed {run['seed']}", *(f"{x:.2f}" for x in ratios)])
    return SPEED + "\n" + _table(["", "rollout", "training step", "peak memory, GB"], rows)


def _step(runs: Sequence[dict], system: str) -> tuple[float, float, float]:
    rollout, _, train, memory = medians(runs, system)
    return rollout, train, memory / 1000


def speedrun() -> str:
    """The races, newest last."""
    parts = [SPEEDRUN]
    for path in sorted(DATA.glob("speedrun/results/*.json")):
        result = json.loads(path.read_text())
        source = f"[{path.stem}](../experiments/speedrun/results/{path.name}), commit {result['commit'][:7]}"
        parts.append(f"\n{source}, seeds {result['seeds'][0]['seed']} to {result['seeds'][-1]['seed']}:\n\n")
        parts.append(race.table(result) + "\n")
    return "".join(parts)


def _table(head: Sequence[str], rows: Table) -> str:
    return markdown([head, ["--"] * len(head), *rows])


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        tasks = [section(task, Path(folder)) for task in TASKS]
    rest = "".join([*tasks, ROUTING, in_trl(), speedrun()])
    return introduction(rest) + rest


def introduction(rest: str) -> str:
    """Write the answer at the top of the page, with its numbers out of the tables of the rest."""

    def cell(name: str, *row: str) -> str:
        *cells, column = row
        caption, *first = QUOTED.get(name, ("Sums with SmolLM2-135M-Instruct, step by step",))
        return row_of(rows_under(rest, caption), *first, *cells)[column]

    return filled(INTRODUCTION.lstrip(), cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/results.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
