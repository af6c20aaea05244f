"""The DIR of a reward model, written by hand: parameters drawn with numpy, as a run on pairs would leave them."""

from pathlib import Path

import optax

from jaxrl_llm.models.transformer import Model
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain, write_json
from jaxrl_llm.run.settings import model_settings
from jaxrl_llm.training.state import make_state
from tests.reference import tiny_training as tiny


def write(workdir, config, *, seed=3, step=7, **changes):
    """The DIR of a reward model for the task of `config`; returns its parameters. `changes` are of its own config."""
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.update_from_flattened_dict({"objective.name": "reward_model"} | changes)
    model = Model(model_settings(own)[0])
    params = tiny.draw_params(model, value_head=True, seed=seed)
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_json(
        Path(workdir) / "config.json", {"format": FORMAT, "config": plain(own.to_dict()), "config_hash": "by hand"}
    )
    checkpoints = Checkpoints(workdir)
    checkpoints.save(step, make_state(model, params, optax.adam(1.0)).saved(), {"config_hash": "by hand"})
    checkpoints.close()
    return params
