"""Recipes of a user's own: what a registered one can do, and which are refused."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives import registry as known
from jaxrl_llm.objectives.aggregation import Aggregation, TokenMean
from jaxrl_llm.objectives.ratios import NoRatio, TokenRatio


@dataclasses.dataclass(frozen=True)
class Scaled(TokenRatio):
    """A ratio with one hyper-parameter of every type that a config holds."""

    scale: float = objectives.hyperparameter(1.0, "factor of log r")
    power: int | None = None
    label: str = "x"
    even: bool = False
    pair: tuple[float, float] = (1.0, 2.0)

    def __call__(self, batch):
        return self.scale * super().__call__(batch)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(known, "_RECIPES", dict(known._RECIPES))


def with_ratio(ratio, of="grpo"):
    return objectives.recipe(of)._replace(ratio=ratio)


def test_a_registered_recipe_is_one_like_the_others():
    objectives.register("scaled", with_ratio(Scaled()))
    assert objectives.names()[-1] == "scaled"
    assert objectives.hyperparameters("scaled")["scale"] == 1.0
    assert objectives.make("scaled", scale=2, pair=[3.0, 4.0], kl_coef=0.1).ratio == Scaled(2.0, pair=(3.0, 4.0))
    with pytest.raises(ValueError, match=r"scaled has no hyper-parameter 'scal' \(did you mean 'scale'\?\)"):
        objectives.make("scaled", scal=1.0)
    with pytest.raises(ValueError, match="grpo has no hyper-parameter 'scale'; it belongs to scaled"):
        objectives.make("grpo", scale=1.0)


def test_its_fields_are_those_of_a_config():
    objectives.register("scaled", with_ratio(Scaled()))
    kinds = {key: objectives.fields()[key][:3] for key in ("scale", "power", "label", "even", "pair")}
    assert kinds == {
        "scale": (float, None, "factor of log r"),
        "power": (int, None, ""),
        "label": (str, None, ""),
        "even": (bool, None, ""),
        "pair": (tuple, None, ""),
    }


def test_a_name_that_is_not_loaded_yet_is_taken():
    with pytest.raises(ValueError, match="objective 'kl_cov' is already registered with other parts"):
        objectives.register("kl_cov", objectives.recipe("grpo"))
    assert objectives.register("kl_cov", objectives.recipe("kl_cov")) == objectives.recipe("kl_cov")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scale", "1", "scale='1' must be a number, for example 1e-3"),
        ("scale", True, "scale=True must be a number"),
        ("power", 1.5, "power=1.5 must be a whole number, for example 4"),
        ("power", True, "power=True must be a whole number"),
        ("even", 1, "even=1 must be True or False"),
        ("label", None, "label=None must be a word or a path"),
        ("pair", 1.0, "pair=1.0 must be a tuple of numbers"),
    ],
)
def test_a_value_of_another_type_is_refused(field, value, message):
    objectives.register("scaled", with_ratio(Scaled()))
    with pytest.raises(ValueError, match=message):
        objectives.make("scaled", **{field: value})


def test_an_aggregation_of_ones_own_stays_unless_another_is_named():
    @dataclasses.dataclass(frozen=True)
    class Longest(Aggregation):
        def weights(self, batch):
            return jnp.ones_like(batch.logprobs) / batch.mask.shape[1]

    objectives.register("longest", objectives.recipe("grpo")._replace(aggregation=Longest()))
    assert objectives.hyperparameters("longest")["aggregation"] is None
    assert objectives.make("longest").aggregation == Longest()
    assert objectives.make("longest", aggregation="token_mean").aggregation == TokenMean()


def test_the_same_definition_may_come_twice():
    objectives.register("scaled", with_ratio(Scaled()))
    copy = dataclasses.make_dataclass("Scaled", [], bases=(Scaled,), frozen=True)  # as of a file that is loaded again
    copy.__module__, copy.__qualname__ = Scaled.__module__, Scaled.__qualname__
    objectives.register("scaled", with_ratio(copy()))
    with pytest.raises(ValueError, match="'scaled' is already registered with other parts; give yours another name"):
        objectives.register("scaled", with_ratio(Scaled(2.0)))
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        objectives.register("grpo", with_ratio(Scaled()))


@dataclasses.dataclass(frozen=True)
class Twice(TokenRatio):
    clip_low: float = 0.1


@dataclasses.dataclass(frozen=True)
class OtherType(TokenRatio):
    cap: int = 1


@dataclasses.dataclass(frozen=True)
class Unheld(TokenRatio):
    table: dict = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("My-GRPO", with_ratio(Scaled()), "'My-GRPO' must be lower case letters, digits and underscores"),
        ("mine", with_ratio(Twice()), "'clip_low' is declared twice; rename that of Clip"),
        ("mine", with_ratio(OtherType()), "'cap' of 'mine' is of type int, of other recipes float; give yours another"),
        (
            "mine",
            with_ratio(Unheld()),
            "Unheld.table has type <class 'dict'>, which no config holds; declare it as bool",
        ),
        ("mine", with_ratio(NoRatio()), "Clip with NoRatio"),
        ("mine", objectives.recipe("ppo")._replace(value=None), "Gae needs a value function"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_registered(name, recipe, message):
    with pytest.raises(ValueError, match=message):
        objectives.register(name, recipe)
    assert name not in objectives.names()
