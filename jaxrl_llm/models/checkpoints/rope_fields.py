"""RoPE and windows in config.json <-> ModelConfig: for all layers or by kind of layer, in the old and new spelling."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.layer_kinds import FULL, SLIDING
from jaxrl_llm.models.attention.rope_scaling import FIELDS
from jaxrl_llm.models.checkpoints.family_fields import required
from jaxrl_llm.models.checkpoints.family_table import Family

Fields = Mapping[str, Any]
_ABSENT = {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0, "truncate": True}  # of YaRN


def ropes_of(family: Family, published: Fields) -> tuple[Fields, Fields | None]:
    """RoPE's fields, of layers that slide apart where they have their own.

    Raises:
      ValueError: two spellings contradict each other, or fields by kind of layer where the family has one RoPE or the
        other way round.
    """
    old, new = (published.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    if new and (FULL in new or SLIDING in new) != family.by_kind:
        kinds = "by kind of layer" if family.by_kind else "those of one RoPE for all layers"
        raise ValueError(f"config.json: rope_parameters of {published['model_type']} must be {kinds}; correct it")
    merged = {**old, **new.get(FULL, new)}
    if family.by_kind and (merged.get("truncate") is False or ("type" in merged and "rope_type" not in merged)):
        raise ValueError(
            f"config.json: {merged} has a RoPE that transformers reads otherwise; give rope_type, no truncate"
        )
    named = {"rope_type": (kind_of(old), kind_of(new.get(FULL, new)))} if old and new else {}
    named |= {name: (value, merged[name]) for name, value in old.items() if name not in ("rope_type", "type")}
    named["original_max_position_embeddings"] = merged.get(_TRAINED), published.get(_TRAINED)
    for name, (one, other) in named.items():
        if one != other and (name != _TRAINED or None not in (one, other)):
            raise ValueError(f"config.json has {name}={one!r} in one place and {other!r} in another; leave one of them")
    theta = published.get("rope_local_base_freq") if family.local else None
    return merged, new.get(SLIDING, None if theta is None else {"rope_theta": theta})


_TRAINED = "original_max_position_embeddings"


def kind_of(rope: Fields) -> str | None:
    """The scaling that a rope names, in the new or the old spelling; None: none.

    Raises:
      ValueError: the two differ.
    """
    kinds = {rope.get(name) for name in ("rope_type", "type")} - {None}
    if len(kinds) > 1:
        raise ValueError(f"config.json: rope_type={rope['rope_type']!r} and type={rope['type']!r} differ; leave one")
    return next(iter(kinds - {"default"}), None)


def read_rope(family: Family, published: Fields, head_dim: int) -> dict[str, Any]:
    """Fields of a ModelConfig; a scaling is one of `rope_scaling.FIELDS`."""
    rope, sliding = ropes_of(family, published)
    if family.scaled:
        required(rope, "rope_type", "type")
    fields: dict[str, Any] = {"rope_theta": float(required({**published, **rope}, "rope_theta"))}
    if sliding is None and family.sliding_theta is not None:
        sliding = {"rope_theta": family.sliding_theta or fields["rope_theta"]}
    if kind := kind_of(rope):
        absent: dict[str, Any] = {"max_position_embeddings": published.get("max_position_embeddings")}
        if kind == "yarn":
            absent = _ABSENT | {"attention_factor": _attention_factor(rope)}
        given = {**absent, **{name: value for name, value in rope.items() if value is not None}}
        fields |= {"rope_type": kind, "rope_scaling": tuple(float(required(given, name)) for name in FIELDS[kind])}
    if sliding is not None:
        theta = float(required(sliding, "rope_theta"))
        alike = theta == fields["rope_theta"] and "rope_scaling" not in fields
        fields["sliding_rope_theta"] = 0.0 if alike else theta
    if family.rotary is not None:
        fields["partial_rotary_factor"] = rotary_of(family.rotary, published, rope)
    if family.head_dim == "parts" and kind_of(rope) and rope.get("mscale_all_dim"):
        fields["attention_multiplier"] = head_dim**-0.5 * _magnitude(rope, "mscale_all_dim") ** 2
    return fields


def _attention_factor(rope: Fields) -> float:
    """YaRN's factor of cos and sin where two scales give it (DeepSeek); 0: by the factor alone."""
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return 0.0
    return _magnitude(rope, "mscale") / _magnitude(rope, "mscale_all_dim")


def _magnitude(rope: Fields, name: str) -> float:
    return 0.1 * rope[name] * math.log(max(rope["factor"], 1)) + 1


def _written_magnitudes(rope: dict[str, Any], config: ModelConfig) -> dict[str, float]:
    """The two scales of YaRN that `attention_multiplier` and the factor of cos and sin come from."""
    step, of_all = 0.1 * math.log(rope["factor"]), math.sqrt(config.attention_multiplier * config.head_dim**0.5)
    factor = rope.pop("attention_factor")
    scales = {"mscale_all_dim": of_all} | ({"mscale": factor * of_all} if factor else {})
    return {name: round((scale - 1) / step, 6) for name, scale in scales.items()}


def rotary_of(default: float, published: Fields, rope: Fields) -> float:
    """The share of a head that is rotated."""
    name = "partial_rotary_factor"
    return float(next((one[name] for one in (rope, published) if one.get(name) is not None), default))


def written_rope(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    plain = rope | {"rope_theta": config.sliding_rope_theta or config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": config.rope_type, **dict(zip(FIELDS[config.rope_type], config.rope_scaling, strict=True))}
        if original := rope.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = int(original)
        if config.rope_type == "yarn":
            rope |= {"truncate": bool(rope["truncate"])}
            if config.kv_lora_rank and config.attention_multiplier:
                rope |= _written_magnitudes(rope, config)
            elif not rope["attention_factor"]:
                del rope["attention_factor"]
    rotary = {} if family.rotary is None else {"partial_rotary_factor": config.partial_rotary_factor}
    rope |= rotary
    longest = rope.pop("max_position_embeddings", None)
    return {
        **({"max_position_embeddings": int(longest)} if longest else {}),
        "rope_theta": config.rope_theta,
        "rope_parameters": {FULL: rope, SLIDING: plain} if family.by_kind else rope,
        "rope_scaling": rope if config.rope_scaling and not family.by_kind else None,
        **rotary,
    }


def read_windows(family: Family, published: Fields) -> dict[str, Any]:
    """Fields of a ModelConfig of a family whose windows are computed; without `layer_types` every `full_every`-th layer
    is full, for 0 none."""
    if family.full_every is None:
        return {}
    window = published.get("sliding_window", family.window)
    every = (published.get("sliding_window_pattern") if family.local else None) or family.full_every
    types = [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(published["num_hidden_layers"])]
    types = published.get("layer_types") or types if every else types
    known = len(types) == published["num_hidden_layers"] and {*types} <= {FULL, SLIDING}
    if known and not (window and SLIDING in types):
        return {}
    return {"sliding_window": window or 0, "layer_types": () if {*types} == {SLIDING} else tuple(types)}


def written_windows(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json."""
    if family.full_every is None:
        return {}
    types = config.layer_types or (SLIDING if config.sliding_window else FULL,) * config.num_hidden_layers
    by_layer = {"layer_types": list(types)} if family.full_every else {}
    return {"sliding_window": config.sliding_window or None, **by_layer}
