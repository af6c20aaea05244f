"""Every table that rests on the committed data, in Markdown: the pages of `results/`.

    python -m experiments.routing_replay.tables                 # all of them
    python -m experiments.routing_replay.tables seeds branch    # of these sweeps
    python -m experiments.routing_replay.tables --write         # into results/*.md, as a test compares them

Only the doses of router noise are not among them: `noise.py` measures those anew.
"""

import argparse
import dataclasses
import functools
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.routing_replay import branches, dose, horizon, kept, pooled, quoted, rates, samplers, scale, whole_runs
from experiments.routing_replay.pooled import Pooled
from experiments.routing_replay.table_parts import Table, markdown, unpacked
from jaxrl_llm.report.read import Study

RESULTS = Path(__file__).with_name("results")


def against_gspo(study: Study) -> Table:
    """The branches' table with GSPO as the baseline."""
    return branches.table(dataclasses.replace(study, baseline="GSPO"), second=16)


@dataclass(frozen=True)
class Entry:
    """A table of a page: what it holds, its columns (none: its first row), the function, and the sweeps it takes."""

    page: str
    caption: str
    columns: Sequence[str]
    make: Callable[..., Table]
    sweeps: Sequence[str]


ONE_ROLLOUT = ("branch", "tight", "precise", "confirm", "negatives", "negatives_masked")
BRANCHED = ["rate", "arm", "states", "tokens clipped", "difference", "detectable"]
ENDS = ["arm", "greedy, start -> end", "sampled, end", "reward, last 5", "clipped", "experts changed", "collapsed"]
SHARES = ["sweep", "setting", "GRPO, by variance", "median", "GRPO+R2, by variance", "median"]
DOSES = ["setting", "states", "GRPO, before -> after", "experts changed", "Var(log r)", "share", "part", "beyond 0.2"]
NUMBERS = ["sweep", "what", "number"]
HELD_OUT = "Differences are to GRPO in held-out sampled accuracy, with 95 % paired-t intervals over seeds"
STABLE = ["highest stable rate", "at an edge", "factor to GRPO", "if a loss counts 0.05 at most"]
TAILS = ["beyond 0.2", "beyond ln 2"]
KEPT = ["kept, A > 0 / A < 0", "KL to old"]


def _shares(name: str, setting: Callable[[str], str]) -> Entry:
    caption = (
        "The share of Var(log r) that the changed selection of experts explains, weighted by the variance of each "
        "measurement (on a rollout's last minibatch), with a bootstrap over seeds; the median of single shares; every "
        "arm scored without replay."
    )
    return Entry(name, caption, SHARES, partial(whole_runs.shares, name=name, setting=setting), [name])


def _numbers(name: str, make: Callable[[Study], Table]) -> Entry:
    return Entry(name, "Numbers that stand in no other table.", NUMBERS, make, [name])


def _pooled(caption: str, labels: Sequence[str], sweeps: Sequence[str], make: Callable[..., Sequence[Pooled]]) -> Entry:
    columns = [*labels, *pooled.HEADER]
    return Entry("pooled", caption, columns, lambda *studies: pooled.table(make(*studies)), sweeps)


def _left(name: str, caption: str) -> Entry:
    return Entry(name, caption, ["noise", "k3, GRPO", "k3, GRPO+R3", "left"], samplers.residual, [name])


def _headed(name: str, caption: str, make: Callable[[Study], Table]) -> Entry:
    return Entry(name, caption, (), make, [name])


def _by_cut(name: str, caption: str) -> Entry:
    columns = ["model, rate", "arm", "trajectories", *KEPT, "difference", "detectable"]
    return Entry(name, f"{caption} Intervals over trajectories, not corrected.", columns, kept.table, [name])


def _apart(name: str) -> Entry:
    columns = ["condition", "arm", "n", "dense minus mixture", "detectable", "corrected p"]
    caption = (
        "The dense model's difference to GRPO minus the mixture's; p is corrected (Holm) for all rows of all seeds."
    )
    return Entry(name, caption, columns, kept.apart, [name])


def _contrasts(name: str) -> Entry:
    columns = ["condition", "arms", "n", "difference", "detectable", "corrected p"]
    caption = "The arms that the hypotheses compare; p is corrected (Holm) for all rows."
    return Entry(name, caption, columns, kept.contrasts, [name])


def _ends(name: str, what: str) -> Entry:
    caption = (
        f"Whole runs of {what}: held-out sampled accuracy, the end's difference to GRPO by seed, not corrected; "
        "the gradient kept; the drift of a rollout (KL to old), mean of the last five, and median of the first ten and "
        "of all; the entropy (nats a token) of the last five; collapses."
    )
    columns = ["condition", "arm", "seeds", *KEPT, "entropy", "start -> end", "difference", "detectable", "collapsed"]
    return Entry(name, caption, columns, kept.ends, [name])


def _batches(second: int) -> list[str]:
    return [f"seeds below {second}", f"seeds from {second}"]


TABLES: Sequence[Entry] = (
    _pooled(
        "One rollout of 32 updates from shared states: differences to GRPO in held-out sampled accuracy, n "
        "trajectories of ten states. Batches are sweeps, or halves where one sweep has the arm. Power: the batch's, "
        "for the pooled difference. Holm's correction is over all rows. The scale is what a rollout of GRPO gains. "
        "The last column: the verdict of the rule until 23 November (one sign, no zero in two batches), if another.",
        ["rate", "a rollout of GRPO gains", "arm"],
        ONE_ROLLOUT,
        pooled.one_rollout,
    ),
    Entry(
        "pooled",
        "The gradient that each arm keeps over a rollout, by the sign of A (1: all, as without a clip).",
        ["rate", "arm", "kept, A > 0", "kept, A < 0", "pooled difference to GRPO"],
        pooled.gradient_kept,
        ONE_ROLLOUT,
    ),
    _pooled(
        "One rollout by what an arm cuts: the dense model, and arms of the mixture against each other (`negatives`, in "
        "two parts, which at 4e-4 were run apart, and halves of `negatives_masked`).",
        ["model, rate", "a rollout of GRPO gains", "arms"],
        ["negatives", "negatives_masked"],
        pooled.negatives,
    ),
    _pooled(
        "Whole runs by what an arm cuts (`negatives_runs`); batches are ten seeds and twenty later ones, or halves.",
        ["model, rate", "a run of GRPO gains", "arms"],
        ["negatives_runs"],
        lambda study: pooled.by_sign(study, lambda last: (kept.LATER if last >= kept.LATER else 505,)),
    ),
    _pooled(
        "Three rollouts (`predict`).",
        ["rate", "three rollouts of GRPO gain", "arm"],
        ["predict"],
        partial(pooled.several_rollouts, second=5),
    ),
    _pooled(
        "Four rollouts with a sampler whose router is so noisy that half of its experts differ (`strong@2`).",
        ["noise", "four rollouts of GRPO gain", "arm"],
        ["strong2"],
        partial(pooled.several_rollouts, second=8),
    ),
    _pooled(
        "Whole runs at 4e-4, N = 32 (`seeds`); batches are commits of five seeds each, in the last row sweeps.",
        ["outcome", "arm"],
        ["seeds", "negatives_runs"],
        pooled.whole_runs,
    ),
    _pooled(
        "Runs of 300 rollouts (`horizon`): two arms after as many rollouts, or after as many groups drawn (the number "
        "that the thriftier one has at its end), with the accuracy of the second and of the first.",
        ["arm", "against", "after as many", "accuracy"],
        ["horizon"],
        horizon.compared,
    ),
    Entry(
        "full",
        "Held-out sampled accuracy at the end, at the tuned learning rate of each arm and N; 0.716 at the start. "
        f"{HELD_OUT}; one batch. 0: equal to the last bit.",
        ["arm", *(cell for n in (1, 8, 16, 32) for cell in (f"N = {n}", "difference"))],
        whole_runs.full,
        ["full"],
    ),
    Entry(
        "full",
        "More updates of one rollout: N = 8, 16 and 32 minus N = 1, paired by seed; one batch, not corrected.",
        ["arm", "N = 8", "N = 16", "N = 32"],
        whole_runs.across,
        ["full"],
    ),
    _shares("full", "{}, fair rate".format),
    _numbers("full", quoted.full),
    Entry("seeds", "Ten seeds at N = 32 and 4e-4; means over seeds.", ENDS, whole_runs.seeds, ["seeds"]),
    _shares("seeds", "N = 32, 4e-4{}".format),
    _numbers("seeds", quoted.seeds),
    Entry(
        "mismatch",
        f"A bfloat16 rollout, N = 32 and 4e-4, five seeds. {HELD_OUT}.",
        [
            "arm",
            "greedy, end",
            "sampled, end",
            "difference to GRPO",
            "difference to GRPO+R2",
            "k3, sampler to trainer",
            "experts changed, sampler to old",
        ],
        whole_runs.mismatch,
        ["mismatch"],
    ),
    _shares("mismatch", "N = 32, 4e-4, bfloat16 rollout{}".format),
    _numbers("mismatch", quoted.mismatch),
    Entry(
        "branch",
        "One rollout from shared states; of GRPO the state before and after it. Intervals over trajectories, not "
        "corrected.",
        [*BRANCHED, *_batches(4)],
        partial(branches.table, second=4),
        ["branch"],
    ),
    Entry(
        "branch",
        "What routing does to the ratio, over whole rollouts after the last of 32 updates, every arm scored without "
        "replay: the share of tokens (of all tokens of the rollouts) whose log-ratio the changed experts alone move by "
        "more than 0.2 and by more than ln 2. How many tokens have such a ratio in all was not measured.",
        ["rate", "arm", "rollouts", "experts changed", "share, by variance", "median", "Var(log r)", *TAILS],
        branches.routing,
        ["branch"],
    ),
    Entry("tight", "One rollout.", [*BRANCHED, *_batches(16)], partial(branches.table, second=16), ["tight"]),
    Entry("tight", "The same, differences to GSPO.", [*BRANCHED, *_batches(16)], against_gspo, ["tight"]),
    Entry("predict", "Three rollouts.", [*BRANCHED, *_batches(5)], partial(branches.table, second=5), ["predict"]),
    _numbers("predict", quoted.predict),
    _headed(
        "control",
        "Four rollouts with a noisy router in the sampler, evaluated with the trainer's router; detectable is the "
        "largest of the row.",
        branches.matrix,
    ),
    _left(
        "control",
        "What R3 leaves of the gap between sampler and trainer: the noise moves gates as well as the choice, and R3 "
        "replays the choice.",
    ),
    _numbers("control", quoted.control),
    _headed("strong", "The same with more noise, eight trajectories.", branches.matrix),
    Entry(
        "strong",
        "Sixteen trajectories of the strongest.",
        ["noise", *BRANCHED[1:], *_batches(8)],
        partial(branches.table, second=8),
        ["strong2"],
    ),
    Entry(
        "strong",
        "The cost of the noise: GRPO with it minus GRPO without, by trajectory on seeds 0 to 4, in the accuracy of the "
        "states after 4 to 12 rollouts and in the gain of four more.",
        ["noise", "states", "gain"],
        samplers.harm,
        ["strong", "control"],
    ),
    _left("strong", "What R3 leaves of the gap between sampler and trainer."),
    _numbers("strong", quoted.strong),
    Entry(
        "choices",
        "Samplers that choose other experts, 60 rollouts, N = 4 at 1e-4: experts and k3 between sampler and trainer "
        "over the run (what a remedy leaves of GRPO's), and accuracy at the end by either router.",
        ["sampler", "arm", "seeds", "experts that differ", "k3", "trainer's router", "sampler's router"],
        samplers.gaps,
        ["choices"],
    ),
    _pooled(
        "Whole runs: GRPO with each sampler minus GRPO with the exact one, by the router that evaluates (`choices`); "
        "the batches are halves of one sweep. The scale is what a run of GRPO with the exact sampler gains.",
        ["a run of GRPO gains", "sampler", "router"],
        ["choices"],
        samplers.cost,
    ),
    _pooled(
        "The same: every remedy minus GRPO with the same sampler.",
        ["sampler", "router", "arm"],
        ["choices"],
        samplers.won_back,
    ),
    Entry(
        "dose",
        "GRPO's rollouts measured without replay, and one rollout of R2 against one of GRPO from 50 shared states "
        "(five trajectories); the last column is that effect minus what GRPO's own rollout gains. Not corrected for "
        "ten settings.",
        [*DOSES, "effect of R2", "detectable", "minus the gain"],
        dose.table,
        ["dose"],
    ),
    Entry(
        "dose",
        "Depth and sparsity: GRPO's rollouts in each setting over those of 4 layers with 16 experts, top-4, at the "
        "same rate (1e-4), as factors paired by seed with 95 % t intervals of the logarithm; five seeds, one batch. "
        "The corrected p (Holm, over these settings) is of the share.",
        ["setting", *dose.MEASURES, "corrected p"],
        dose.scaling,
        ["dose"],
    ),
    Entry(
        "curves",
        "Held-out sampled accuracy at the end of 30 rollouts, six learning rates, five seeds; the highest rate at "
        "which an arm ends no lower than it started, and its factor to GRPO's.",
        ["N", "arm", *("6e-06", "2e-05", "6e-05", "0.0002", "0.0006", "0.002"), *STABLE],
        rates.table,
        ["curves"],
    ),
    Entry(
        "curves",
        "The ends at the best of the six rates of each arm, chosen on the same seeds.",
        ["N", "arm", "rate", "end", "difference to GRPO"],
        rates.at_best,
        ["curves"],
    ),
    Entry(
        "curves",
        "The highest stable rate at N = 32 over that at N = 8.",
        ["arm", "factor", "if a loss counts 0.05 at most"],
        rates.by_updates,
        ["curves"],
    ),
    _numbers("curves", quoted.curves),
    Entry(
        "horizon",
        "300 rollouts of countdown, ten seeds: groups drawn and trained on in a rollout, held-out sampled accuracy.",
        ["arm", "runs", "groups drawn", "groups trained on", "accuracy, start -> end"],
        horizon.ends,
        ["horizon"],
    ),
    _numbers("horizon", quoted.horizon),
    _by_cut(
        "negatives",
        "One rollout of 32 updates from shared states, by what an arm cuts: the gradient kept for A > 0 and A < 0, the "
        "drift (KL to old) and the difference to GRPO, whose state stands before and after its rollout.",
    ),
    _contrasts("negatives"),
    _apart("negatives"),
    _ends("negatives_runs", "30 rollouts"),
    _apart("negatives_runs"),
    _headed("negatives_runs", "In training reward, by stretches of rollouts: not planned, not corrected.", kept.along),
    _ends("negatives_real", "16 rollouts of SmolLM2-135M-Instruct on sums, a dense model"),
    _contrasts("negatives_real"),
    _headed(
        "negatives_rollouts",
        "Branches of 16 rollouts at 4e-4, ten trajectories: differences in sampled accuracy on the way, not corrected.",
        kept.by_rollouts,
    ),
    _headed(
        "negatives_rollouts",
        "The same with updates stopped at KL 0.05 in each rollout, minus those without the stop, by seed.",
        kept.stopped,
    ),
    _by_cut("negatives_dose", "One rollout at 4e-4 by the dual clip, which bounds the ratio of A < 0 alone."),
    _by_cut("negatives_masked", "One rollout at 4e-4 with OPSM, which masks wrong answers that have drifted."),
    _contrasts("negatives_masked"),
    Entry(
        "negatives_dose",
        "The rank correlation of the doses, from the tightest, with their mean differences.",
        ["model, rate", "doses", "rank correlation"],
        kept.ranked,
        ["negatives_dose"],
    ),
    *(_headed("sizes", caption, make) for caption, make in scale.TABLES.items()),
    Entry("sizes", "SmolLM2 upcycled (30 layers, top-2 of 8), on sums.", (), scale.anchored, ["sizes", "anchor"]),
)
PAGES = tuple(dict.fromkeys(entry.page for entry in TABLES))
ARCHIVES = {"mismatch": "mismatch_what"}  # of a sweep that has none of its own name


@functools.cache
def study(folder: Path, name: str) -> Study:
    """The committed data of a sweep, unpacked in `folder`."""
    return unpacked(RESULTS / f"{ARCHIVES.get(name, name)}.tar.xz", name, folder)


def page(name: str, folder: Path) -> str:
    """The Markdown of one page; the data are unpacked in `folder`."""
    parts = [f"# `{name}`\n\nWritten by `python -m experiments.routing_replay.tables --write`; do not edit.\n"]
    for entry in TABLES:
        if entry.page == name:
            rows = entry.make(*(study(folder, sweep) for sweep in entry.sweeps))
            head, *rows = [entry.columns, *rows] if entry.columns else rows
            table = markdown([head, ["--"] * len(head), *rows])
            parts.append(f"{textwrap.fill(entry.caption, 120)}\n\n{table}")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*", choices=[[], *PAGES])
    parser.add_argument("--write", action="store_true", help="into results/*.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.pages or PAGES:
            text = page(name, Path(folder))
            if given.write:
                (RESULTS / f"{name}.md").write_text(text)
            else:
                print(text)


if __name__ == "__main__":
    main()
