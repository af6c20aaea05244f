"""What a learnt reward is worth: its score and the verifier's reward against the distance from the start."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report.curves import aligned, mean, smooth
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.style import INK, label_ends, line, panels

__all__ = ["no_learnt_reward", "reward_against_kl"]

_KL = "kl/ref_answer"
_REWARDS = {"reward/reward_model": "score of the reward model", "reward/mean": "reward of the verifier"}


def no_learnt_reward(study: Study, condition: str) -> list[str]:
    """Why there is nothing to draw; empty where runs learn from a reward model and measure how far they went."""
    missing = [key for key in (*_REWARDS, _KL) if not study.has(key, condition)]
    return [f"learnt reward against KL ({', '.join(missing)} not logged)"] if missing else []


def reward_against_kl(study: Study, condition: str) -> Figure:
    """Both rewards of every rollout against sqrt(KL), the axis of Gao et al. 2022 (arXiv 2210.10760): means over seeds
    of one rollout number, smoothed as learning curves are, and every seed in a thin line."""
    figure, axes = panels(list(_REWARDS.values()), columns=2, height=3.4)
    for ax, key in zip(axes, _REWARDS, strict=True):
        ends = []
        for arm in study.arms:
            runs = [run for run in study.select(arm, condition) if run.series(key)[1].size and run.series(_KL)[1].size]
            if not runs:
                continue
            look: dict[str, Any] = line(study.arms, arm) | {"marker": ""}
            distance, rewards = np.sqrt(np.maximum(aligned(runs, _KL)[1], 0)), aligned(runs, key)[1]
            for x, y in zip(distance, rewards, strict=True):
                ax.plot(smooth(x), smooth(y), color=look["color"], alpha=0.35, linewidth=0.8)
            x, y = smooth(mean(distance)), smooth(mean(rewards))
            ax.plot(x, y, **look)
            ends.append((float(x[-1]), float(y[-1]), arm, look["color"]))
        ax.set_xlabel("sqrt of the KL to the start (nats an answer)", fontsize=8.5, color=INK)
        if len(study.arms) > 1:
            label_ends(ax, ends)
    return figure
