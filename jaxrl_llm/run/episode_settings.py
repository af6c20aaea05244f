"""Settings that a task with an environment does not serve."""

from collections.abc import Iterator

from jaxrl_llm.run.blocks import Settings, unserved


def faults_of_episodes(s: Settings) -> Iterator[str]:
    """An environment judges alone."""
    served = {
        "task.think_end_token": (s.task.think_end_token, ""),
        "rewards.functions": (s.rewards.functions, ()),
        "rewards.reward_model": (s.rewards.reward_model, ""),
    }
    yield from unserved(served, f"task.name={s.task.name!r} has an environment, which serves no other yet")
    if s.objective.reads == "pairs":
        yield f"objective.name={s.objective_name!r} reads pairs, and {s.task.name!r} has episodes; take an online one"
    least = s.task.prompt_length + s.answer_length
    if 0 < s.task.episode_length < least:
        yield (
            f"rollout.max_episode_length={s.task.episode_length} is less than a prompt and an answer; set it to at "
            f"least {least}"
        )
