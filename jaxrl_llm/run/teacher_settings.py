"""Checks of the settings of teachers: several, served ones, one on its own mesh, and the policy as its own."""

from collections.abc import Iterator

from jaxrl_llm.run.blocks import Settings, TeacherConfig, host_of, unserved


def is_served(path: str) -> bool:
    """True for the address of a server, not a path of this machine."""
    return path.startswith(("http://", "https://"))


def shares(config: TeacherConfig) -> tuple[float, ...]:
    """The weights of the teachers, whose sum is 1."""
    weights = config.weights or (1.0,) * len(config.paths)
    return tuple(weight / sum(weights) for weight in weights)


def named(config: TeacherConfig) -> tuple[str, list[str]]:
    """The field of `by`, and its values."""
    field, _, values = config.by.partition("=")
    return field, values.split(",")


def faults_of_teachers(s: Settings) -> Iterator[str]:
    """Settings of the teachers that contradict each other."""
    config, exact = s.teacher, "teacher_divergence" in s.objective.needs
    several = len(config.paths)
    if config.weights and (len(config.weights) != several or min(config.weights) < 0 or not sum(config.weights)):
        yield f"teacher.weights={config.weights} must be {several} weights of at least 0, one for each teacher"
    if config.by and (config.weights or len(named(config)[1]) != several):
        yield (
            f"teacher.by={config.by} must be FIELD=VALUE,VALUE with a value for each of {several} teachers, and "
            "without teacher.weights"
        )
    whole = {"rollout.top_k": (s.rollout.top_k, 0), "rollout.top_p": (s.rollout.top_p, 1.0),
             "rollout.min_p": (s.rollout.min_p, 0.0)}  # fmt: skip
    served = {f"teacher.path={path}": True for path in filter(is_served, config.paths)}
    for name in served:
        host_of("teacher.path", name.removeprefix("teacher.path="))
        plain = whole | {"rollout.temperature": (s.rollout.temperature, 1.0)}
        yield from unserved(plain, f"{name} scores under the whole vocabulary at temperature 1")
    of_prompts = {"teacher.by": config.by, "teacher.path=self": config.is_self}
    for name in (name for name, used in (of_prompts | served).items() if used):
        if exact:
            yield f"{name} scores sampled tokens; set objective.advantage=teacher and objective.teacher_coef=0"
    if config.mesh_shape and exact:
        yield (
            f"teacher.mesh_shape={config.mesh_shape}: the exact form reads the teacher inside the update, on the "
            "policy's mesh; set it to (), or objective.advantage=teacher and objective.teacher_coef=0"
        )
    for name in (name for name, used in of_prompts.items() if used):
        if s.dynamic_sampling.max_draws > 1 or s.objective.reads != "rollouts":
            yield f"{name} reads the prompts of one draw; set dynamic_sampling.max_draws to 1 and train on rollouts"
    if config.is_self:
        now = whole | {"rollout.lag": (s.rollout.lag, 0)}
        yield from unserved(now, "teacher.path=self scores under the whole vocabulary and by the policy of the step")
        if s.task.environment is not None:
            yield f"teacher.path=self puts its hint before one prompt, and task.name={s.task.name!r} has several turns"
