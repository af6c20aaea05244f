"""The arms of `horizon` after as many rollouts, and after as many groups drawn."""

import pytest

from experiments.routing_replay.horizon import compared, ends
from experiments.routing_replay.pooled import table
from tests.reference.synthetic_runs import study_of


def test_as_many_rollouts_and_as_many_groups(tmp_path):
    """GRPO draws 2 groups a rollout and DAPO 4: after half of its rollouts DAPO has drawn as many as GRPO at its end.

    Four rollouts, evaluated after each second one: GRPO 0.1, 0.2, 0.3 and DAPO 0.1, 0.5, 0.7. As many rollouts: 0.7 -
    0.3; as many groups (8): 0.5 - 0.3. The second seed of both is 0.1 higher, which the pairs do not see.
    """
    courses = {"GRPO": (2, (0.1, 0.2, 0.3)), "DAPO": (4, (0.1, 0.5, 0.7))}
    runs = {}
    for arm, (groups, accuracies) in courses.items():
        for seed in (0, 1):
            drawn = {"rollout/groups_generated": groups, "rollout/groups_kept": 2}
            rows = [{"step": step} | (drawn if step else {}) for step in range(5)]
            for i, x in enumerate(accuracies):
                rows[2 * i]["eval/pass_at_1"] = x + 0.1 * seed
            runs[arm, "", seed] = rows
    study = study_of(tmp_path, runs)
    assert ends(study) == [["GRPO", "2", "2", "2", "0.150 -> 0.350"], ["DAPO", "2", "4", "2", "0.150 -> 0.750"]]
    rollouts, groups = table(compared(study))
    assert rollouts[:4] == ["DAPO", "GRPO", "rollouts", "0.350, 0.750"]
    assert groups[:4] == ["DAPO", "GRPO", "groups", "0.350, 0.550"]
    assert [row[5].split()[0] for row in (rollouts, groups)] == ["+0.400", "+0.200"]


@pytest.mark.parametrize("seed", [4, 5])
def test_the_batches(tmp_path, seed):
    """A run of seed 4 belongs to the first batch, one of seed 5 to the second."""
    drawn, last = {"step": 1, "rollout/groups_generated": 2}, {"GRPO": 0.25, "GSPO": 0.5}
    runs = {(arm, "", seed): [drawn | {"eval/pass_at_1": accuracy}] for arm, accuracy in last.items()}
    (one,) = compared(study_of(tmp_path, runs))
    assert {name: batch.mean for name, batch in one.batches.items()} == {
        "seeds below 5" if seed == 4 else "seeds from 5": 0.25
    }
