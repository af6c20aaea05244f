"""The tables of distillation against GRPO: by hand, and the page's own out of its committed curves."""

import json

from experiments.distillation import tables

PAGE = tables.RESULTS.parent / "README.md"


def curves(**ends):
    """Two seeds from 0.1 over 0.2 to these ends."""
    return {
        arm.replace("_", " "): {str(i): [[0, 0.1], [20, 0.2], [40, x]] for i, x in enumerate(own)}
        for arm, own in ends.items()
    }


def test_the_tables_by_hand():
    """GRPO 0.4, 0.5; sampled 0.7, 0.9: differences 0.3 and 0.4, mean 0.35 +- 12.706 sd / sqrt 2 = 0.635."""
    found = curves(GRPO=(0.4, 0.5), sampled=(0.7, 0.9), exact=(0.7, 0.9), one_penalty=(0.7, 0.9))
    rows = tables.arm_table(found)
    assert rows[2] == "| GRPO | 2 | 0.100 | 0.200 |  | 0.450 |  |"
    assert rows[3] == "| sampled | 2 | 0.100 | 0.200 | +0.000 [+0.000, +0.000] | 0.800 | +0.350 [-0.285, +0.985] |"
    assert tables.hypothesis_table(found, tables.PAIRS["compare"])[3].startswith("| D2: exact minus sampled | +0.000")


def test_the_page_has_the_tables_of_its_curves():
    found, page = json.loads((tables.RESULTS / "curves.json").read_text()), PAGE.read_text()
    for name, pairs in tables.PAIRS.items():
        curves = found[name]["curves"]
        for row in [*tables.arm_table(curves)[2:], *tables.hypothesis_table(curves, pairs)[2:]]:
            assert row.replace("|  |", "| |") in page.replace("|  |", "| |")
