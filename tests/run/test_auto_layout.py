"""What updates.layout=auto stands for: by what the config allows, and by what each layout multiplies."""

import pytest

from jaxrl_llm.ground import machine
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import config_hash, validate
from tests.reference import tiny_run

DENSE = {"model.num_experts": 0}
GROUPS = DENSE | {"updates.shuffle": "groups"}
MICRO = {"updates.minibatches": 2, "updates.micro_batch_rows": 16}
LONG = {"rollout.max_new_tokens": 400}


def built(folder, **changes):
    return assembly.build(validate(tiny_run.make_config(folder, **changes)))


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        pytest.param({}, "padded", id="experts"),
        pytest.param(MICRO, "packed", id="experts, micro-batches"),
        pytest.param(MICRO | {"updates.length_buckets": 2}, "padded", id="rows cut to buckets"),
        pytest.param(MICRO | {"updates.micro_batch_rows": 64}, "padded", id="the minibatch at once"),
        pytest.param(GROUPS, "shared", id="dense, whole groups"),
        pytest.param(DENSE, "padded", id="dense, groups parted"),
        pytest.param(DENSE | {"updates.minibatches": 1}, "shared", id="dense, one minibatch"),
        pytest.param(GROUPS | MICRO, "shared", id="dense, micro-batches of groups"),
        pytest.param(GROUPS | MICRO | {"updates.micro_batch_rows": 4}, "packed", id="dense, micro-batches of less"),
        pytest.param(GROUPS | {"model.attention_implementation": "flash"}, "padded", id="flash attention"),
        pytest.param(GROUPS | {"mesh.shape": (1, 1, 1, 1, 2)}, "padded", id="rows over devices"),
        pytest.param(GROUPS | {"critic.kind": "separate", "objective.name": "ppo"}, "padded", id="a critic"),
        pytest.param(GROUPS | {"updates.layout": "padded"}, "padded", id="asked for"),
    ],
)
def test_auto_is_the_allowed_layout_that_multiplies_least(tmp_path, changes, layout):
    assert built(tmp_path, **changes).settings.updates.layout == layout


@pytest.mark.parametrize(("cores", "layout"), [(2, "shared"), (8, "padded")])
def test_answers_much_longer_than_prompts_share_a_row_where_hidden_pairs_cost_nothing(
    tmp_path, monkeypatch, cores, layout
):
    monkeypatch.setattr(machine, "usable_cores", lambda: list(range(cores)))
    assert built(tmp_path, **GROUPS, **LONG).settings.updates.layout == layout


def test_auto_trains_with_the_functions_of_the_layout_that_it_stands_for(tmp_path):
    """One minibatch has all groups, which sharing keeps whole."""
    auto = built(tmp_path, **DENSE, **{"updates.minibatches": 1})
    told = built(tmp_path, **GROUPS, **{"updates.minibatches": 1, "updates.layout": "shared"})
    assert auto.learner == told.learner
    assert auto.settings.updates == told.settings.updates


def test_a_run_of_padded_rows_goes_on_with_auto(tmp_path):
    """The default of earlier versions, with the same gradient: one hash."""
    auto, padded, packed = (
        config_hash(tiny_run.make_config(tmp_path, **{"updates.layout": layout}))
        for layout in ("auto", "padded", "packed")
    )
    assert auto == padded != packed
