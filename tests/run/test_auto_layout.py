"""What updates.layout=auto stands for: by what the config allows, and by what each layout multiplies."""

import pytest

from jaxrl_llm.ground import machine
from jaxrl_llm.run import assembly, auto_layout
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run

DENSE = {"model.num_experts": 0}
GROUPS = DENSE | {"updates.shuffle": "groups"}
MICRO = {"updates.minibatches": 2, "updates.micro_batch_rows": 16}
SLOW = pytest.mark.slow
LONG = {"rollout.max_new_tokens": 400}


def built(folder, **changes):
    return assembly.build(validate(tiny_run.make_config(folder, **changes)))


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        pytest.param({}, "padded", id="experts", marks=SLOW),
        pytest.param(MICRO, "packed", id="experts, micro-batches"),
        pytest.param(MICRO | {"updates.length_buckets": 2}, "padded", id="rows cut to buckets"),
        pytest.param(
            MICRO | {"updates.micro_batch_rows": 64}, "padded", id="the minibatch at once", marks=pytest.mark.slow
        ),
        pytest.param(GROUPS, "shared", id="dense, whole groups"),
        pytest.param(DENSE, "padded", id="dense, groups parted", marks=SLOW),
        pytest.param(DENSE | {"updates.minibatches": 1}, "shared", id="dense, one minibatch", marks=SLOW),
        pytest.param(GROUPS | MICRO, "shared", id="dense, micro-batches of groups", marks=SLOW),
        pytest.param(GROUPS | MICRO | {"updates.micro_batch_rows": 4}, "packed", id="dense, micro-batches of less"),
        pytest.param(
            GROUPS | {"mesh.shape": (1, 1, 1, 1, 2)}, "padded", id="rows over devices", marks=pytest.mark.slow
        ),
        pytest.param(
            GROUPS | {"critic.kind": "separate", "objective.name": "ppo"},
            "padded",
            id="a critic",
            marks=pytest.mark.slow,
        ),
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


def test_flash_attention_shares_no_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_layout, "choose_attention", lambda *_: "flash")
    assert built(tmp_path, **GROUPS).settings.updates.layout == "padded"


def test_auto_trains_with_the_functions_of_the_layout_that_it_stands_for(tmp_path):
    """One minibatch has all groups, which sharing keeps whole."""
    auto = built(tmp_path, **DENSE, **{"updates.minibatches": 1})
    told = built(tmp_path, **GROUPS, **{"updates.minibatches": 1, "updates.layout": "shared"})
    assert auto.learner == told.learner
    assert auto.settings.updates == told.settings.updates
