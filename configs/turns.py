"""Episodes of several turns: guess a number by hearing higher or lower, compute sums in words with a calculator, or
call Python.

Command:  python -m jaxrl_llm.main --config configs/turns.py:guess --workdir runs/guess
          python -m jaxrl_llm.main --config configs/turns.py:calculator --workdir runs/calculator
          variants TASK_RECIPE: guess_grpo (= guess), guess_gspo, guess_ppo, likewise calculator and python; _smoke: a
          short one
Minutes:  about 10 on two CPU cores, half of them the warm start
Expect:   eval/reward rises clearly above that of the warm start; 1 is the best possible in both
"""

import importlib

from ml_collections import ConfigDict

_TASKS, _RECIPES = ("guess", "calculator", "python"), ("grpo", "gspo", "ppo")
_BOUNDS = {"python": {"turns": 3, "answer_length": 96, "observation_length": 64}}  # of sums; a file needs others


def get_config(variant: str = "") -> ConfigDict:
    words = variant.split("_") if variant else []
    task, recipe, size = (
        words.pop(0) if words and words[0] in known else known[0] for known in (_TASKS, _RECIPES, ("", "smoke"))
    )
    if words:
        raise ValueError(
            f"unknown variant {variant!r}; give {', '.join(_TASKS)}, then {', '.join(_RECIPES)}, then smoke"
        )
    config = importlib.import_module(f"configs.{recipe}").get_config(size)
    config.task.name = task
    sizes = {"train_size": 512, "test_size": 64} if size else {"train_size": 16384, "test_size": 512}
    config.task.options = _BOUNDS.get(task, {}) | sizes
    if not size:
        config.warm_start.steps, config.warm_start.batch_size = 1000, 128
        config.steps, config.optimizer.learning_rate = 150, 5e-4
        if (task, recipe) == ("calculator", "ppo"):
            config.optimizer.learning_rate = 2e-4  # at 5e-4 three of five seeds fell (experiments/turns)
        config.evaluation.every, config.evaluation.prompts = 20, 256
    return config
