"""The site: its curves are the recipes' gradients, the gallery has every recipe, and every page has a place."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from docs.site import gallery
from jaxrl_llm import objectives
from tests.reference.gradient_formulas import GRADIENTS

ROOT = Path(__file__).parents[1]
RATIOS = [0.5, 0.9, 1.1, 1.5, 2.5]


# One recipe of every kind of ratio and surrogate; the range of `sat` depends on the other tokens.
@pytest.mark.parametrize("name", ["reinforce", "grpo", "gspo", "sapo", "cispo", "gmpo", "vespo", "rspo", "dppo"])
def test_a_curve_is_the_closed_form(name):
    """The weight of a token in an answer of its own, in the batch that the closed form takes."""
    for advantage in (1.0, -1.0):
        drawn = gallery.weights(gallery.make(name), jnp.asarray(RATIOS), advantage)
        for ratio, weight in zip(RATIOS, drawn, strict=True):
            new, old = math.log(ratio * gallery.OLD), math.log(gallery.OLD)
            answer = {"new": [new], "frozen": [new], "old": [old], "gamma": [1.0], "advantage": [advantage]}
            np.testing.assert_allclose(weight * advantage, GRADIENTS[name]([answer])[0][0], rtol=1e-5, atol=1e-6)


def test_every_recipe_has_its_source_and_its_checks(monkeypatch):
    monkeypatch.setattr(gallery, "figure", lambda name, objective: "")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", gallery.page(), re.DOTALL | re.MULTILINE))
    assert sorted(sections) == sorted(objectives.names())
    for text in sections.values():
        assert re.match(r"\s+(\[arXiv|Williams 1992|Mitchell 2023|The likelihood)", text)
        assert "```text\nmaximise  mean" in text
        assert "\nChecked: " in text
    assert "TRL" in sections["grpo"]
    assert "TRL" not in sections["rspo"]


def test_a_figure_names_what_it_shows():
    svg = gallery.figure("dpo", gallery.make("dpo"))
    assert 'role="img" aria-label="dpo: push of a pair' in svg
    assert "currentColor" in svg
    assert "#010203" not in svg


def test_every_page_has_a_place():
    listed = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1].replace("site/gallery.md", "")
    nav = re.findall(r"([\w/]+)\.md", listed)
    assert {path.stem for path in ROOT.glob("docs/*.md")} <= set(nav)
    assert [name for name in nav if not any((ROOT / folder / f"{name}.md").exists() for folder in ("", "docs"))] == []
