"""The choice of `updates.layout=auto`: among the layouts that the config allows, the one that multiplies least."""

import contextlib
import dataclasses
from typing import Any

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import choose_attention, skips_blocks
from jaxrl_llm.run.agreement import check_agreement, check_rows
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.layout import UpdateConfig


def allowed(s: Settings, updates: UpdateConfig, mesh: Any) -> bool:
    """Return whether a run of these settings could be trained with other updates on the mesh."""
    with contextlib.suppress(ValueError):
        changed = dataclasses.replace(s, updates=updates)
        check_agreement(changed)
        check_rows(changed, mesh.size)
        return updates.layout != "shared" or choose_attention(s.model, sharding.platform(mesh)) == "plain"
    return False


def laid_out(s: Settings, mesh: Any) -> Settings:
    """The settings with the layout that `auto` stands for; any other stays.

    shared where a group's one prompt saves more than attention over its long row costs; otherwise packed where a
    minibatch has several micro-batches, of which packing leaves some out, and padded where it has one or rows are cut
    to `length_buckets`. The gradient is the same.
    """
    own, minibatch = s.updates, s.rows // s.updates.minibatches
    if own.layout != "auto":
        return s
    found = [dataclasses.replace(own, layout="padded")]
    if 0 < own.micro_batch_rows < minibatch and own.length_buckets == 1:
        found.insert(0, dataclasses.replace(own, layout="packed"))
    # One minibatch has all groups, however it is drawn.
    shuffle = "groups" if own.minibatches == 1 else own.shuffle
    found.append(dataclasses.replace(own, layout="shared", shuffle=shuffle))
    possible = [one for one in found if one.layout == "padded" or allowed(s, one, mesh)]
    return dataclasses.replace(s, updates=min(possible, key=lambda one: _products(s, one.layout, mesh)))


def _products(s: Settings, layout: str, mesh: Any) -> int:
    """Multiplications of the layers over all answers of a step, each as long as it may be; the head's are those of the
    answers in any layout. Those of attention count as they take on a CPU: twice over all pairs of a row's tokens, three
    times over the pairs that answers to a shared prompt see where other blocks are left out."""
    config, group = s.model, s.rollout.group_size
    layers = config.active_parameters - config.vocab_size * config.hidden_size
    answers = group if layout == "shared" else 1
    prompt = s.task.prompt_length
    answer = s.task.row_length(s.answer_length) - prompt
    length = prompt + answers * answer
    pairs = 2 * length**2
    if layout == "shared" and skips_blocks(length, mesh):
        pairs = 3 * (prompt**2 + answers * answer * (2 * prompt + answer)) // 2
    sizes = config.head_dim + (config.v_head_dim or config.head_dim)
    attention = config.num_hidden_layers * config.num_attention_heads * sizes
    return s.rows // answers * (length * layers + pairs * attention)
