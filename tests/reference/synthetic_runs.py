"""DIRs of runs that were never run: logs with known numbers, for the tests of reports and sweeps."""

import json

import numpy as np

from jaxrl_llm.report.read import load

ARMS = {"GRPO": (0.30, 0.09, 0.012), "GRPO+R2": (0.42, 0.09, 0.012), "GSPO": (0.55, 0.07, 0.22), "SAPO": (0.38, 0.1, 0)}


def write_rows(folder, rows, log="metrics", **files):
    """A DIR with these rows of a log and, by name, further JSON files."""
    folder.mkdir(parents=True)
    (folder / f"{log}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def study_of(folder, runs, **files):
    """A sweep of finished runs in folders 0, 1, ..., read again; the first arm is the baseline.

    runs: {(arm, condition, seed): rows of metrics}; of branches {("", condition, seed): rows of branches.jsonl}, whose
    rows name the arms.
    """
    planned = []
    for number, ((arm, condition, seed), rows) in enumerate(runs.items()):
        write_rows(folder / str(number), rows, "metrics" if arm else "branches", **{"result": {}} | files)
        for one in [arm] if arm else dict.fromkeys(row["arm"] for row in rows if row["arm"]):
            planned.append({"folder": str(number), "arm": one, "condition": condition, "seed": seed})
    plan = {"question": "?", "baseline": planned[0]["arm"], "runs": planned}
    branching = {} if any(arm for arm, *_ in runs) else {"branching": {"first": 1, "every": 1, "rollouts": 1}}
    (folder / "sweep.json").write_text(json.dumps(plan | branching))
    return load(folder)


def write_run(workdir, *, arm="GRPO", seed=0, steps=30, updates=8, layers=3, finished=True, collapse_at=None, keys=""):
    """One DIR whose reward ends near the arm's level; the seed moves all arms alike.

    `keys` keeps only the metrics whose name starts so: fewer panels are drawn faster.
    """
    level, flips, clipped = ARMS[arm]
    rng = np.random.default_rng([seed, list(ARMS).index(arm)])
    shift = np.random.default_rng(seed).normal(0, 0.08)
    workdir.mkdir(parents=True)
    rows = [{"step": 0, "eval/greedy": 0.2, "eval/pass_at_1": 0.18, "eval/pass_at_k": 0.4}]
    for step in range(1, steps + 1):
        share = step / steps
        reward = np.clip(0.2 + (level - 0.2) * share + shift * share + rng.normal(0, 0.02), 0, 1)
        if collapse_at is not None and step > collapse_at:
            reward *= 0.1
        drift = flips * np.linspace(0, 1, updates)[:, None] * np.linspace(0.5, 1.5, layers)
        row = {
            "step": step,
            "reward/mean": reward,
            "rollout/length_mean": 11 + rng.normal(0, 0.2),
            "rollout/tokens_per_s": 900 + rng.normal(0, 30),
            "clip/low": clipped / 2 * rng.uniform(0.8, 1.2),
            "clip/high": clipped / 2,
            "entropy": 0.8 - 0.4 * share,
            "grad/norm": float(np.exp(rng.normal(0, 0.3))),
            "loss/total": -reward,
            "ratio/token_var": 0.01 * np.exp(rng.normal(0, 0.4)),
            "ratio/sequence_var": 0.002 * np.exp(rng.normal(0, 0.4)),
            "ratio/ess": 0.97,
            "ratio/token_p99": 1.4,
            "routing/flips_old_current": float(drift.mean()),
            "routing/flips_old_current_by_update": drift.tolist(),
            "routing/flips_sampler_old": 0.001 * rng.uniform(),
            "routing/share_of_variance": 0.3 + rng.normal(0, 0.05),
            "routing/load_max_by_layer": (1 + share * np.arange(layers)).tolist(),
            "gradient_weight/positive": 1 - clipped,
            "gradient_weight/negative": 1 - clipped / 2,
        }
        if step % 10 == 0:
            row |= {"eval/greedy": reward + 0.05, "eval/pass_at_1": reward, "eval/pass_at_k": min(reward + 0.3, 1)}
            row |= {"routing/flipped_tokens": 0.6}
            for name, size in (("flipped", 4.0), ("unflipped", 0.5)):
                row |= {f"routing/ratio_{name}_mean": 1 + 0.01 * size, f"routing/ratio_{name}_var": flips * size}
                row |= {f"routing/ratio_{name}_p99": 1 + 0.2 * size, f"routing/ratio_{name}_max": 1 + size * step}
        rows.append(row)
    rows = [{key: value for key, value in row.items() if key == "step" or key.startswith(keys)} for row in rows]
    dump = "".join(json.dumps(row) + "\n" for row in rows)
    (workdir / "metrics.jsonl").write_text(dump)
    samples = [
        {"step": step, "prompt": "3142=", "greedy": "1234" if share else "1243", "reward": share, "split": "test"}
        for step, share in ((0, 0.0), (steps, 1.0))
    ]
    (workdir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    config = {"config": {"objective": {"name": arm.split("+")[0].lower()}, "seed": seed}, "config_hash": f"{arm}{seed}"}
    (workdir / "config.json").write_text(json.dumps(config | {"commit": "0123abc", "cores": 1, "device": "cpu"}))
    if finished:
        (workdir / "result.json").write_text("{}")


def write_sweep(folder, *, seeds=5, conditions=("N = 8",), unfinished=(), absent=(), keys=""):
    """A sweep of all arms; `unfinished` and `absent` name (arm, seed) cells."""
    runs = []
    for condition in conditions:
        for arm in ARMS:
            for seed in range(seeds):
                place = f"{condition.replace(' ', '')}/{arm}/{seed}"
                runs.append({"folder": place, "arm": arm, "condition": condition, "seed": seed})
                if (arm, seed) in absent:
                    continue
                finished = (arm, seed) not in unfinished
                collapse_at = 12 if (arm == "SAPO" and seed % 2) else None
                write_run(
                    folder / place,
                    arm=arm,
                    seed=seed,
                    steps=30 if finished else 12,
                    finished=finished,
                    collapse_at=collapse_at,
                    keys=keys,
                )
    plan = {"question": "Does routing swing the ratio?", "baseline": "GRPO", "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(plan))
