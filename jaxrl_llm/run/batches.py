"""Which source a run takes its batches from: rollouts, pairs or given answers, as its objective reads them."""

from typing import Any

from jaxrl_llm.models import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.answers import Answers
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.pair_batches import Pairs
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.sources import Source
from jaxrl_llm.training.step import Learner

__all__ = ["source_of"]


def source_of(s: Settings, learner: Learner, sampler: Model) -> Source:
    """The source of the data that the objective reads, made from the settings; sampler: the model of rollouts."""
    shared: dict[str, Any] = {"task": s.task, "data_dir": s.data_dir, "seed": s.seed, "updates": s.updates}
    if s.objective.reads == "answers":
        return Answers(learner=learner, answers=s.rows, data=s.preference, longest=s.answer_length, **shared)
    if s.objective.reads == "pairs":
        return Pairs(
            learner=learner,
            data=s.preference,
            answer_length=s.answer_length,
            pairs=s.rollout.prompts,
            held_out=s.evaluation.prompts,
            samples=s.log.samples,
            **shared,
        )
    engine = Engine(
        sampler,
        s.rollout.sampling,
        s.rollout.group_size,
        s.answer_length,
        s.task.tokenizer.end_ids,
        slots=s.rollout.slots,
        prompt_buckets=s.rollout.prompt_buckets,
        dtype=s.rollout.dtype,
        router=s.rollout.router,
        record_routing=s.model.num_moe_layers > 0,
        record_router_logits=s.replay.mode == "R3" and s.replay.what == "logits",
        rows_on=learner.model.mesh,
    )
    # One update a rollout, nothing to replay and no values: its own forward is pi_old.
    once = s.updates.updates_per_rollout == 1 and s.replay.mode == "off"
    first_forward = once and not {"values", "router_logprobs"} & s.objective.needs
    return Rollouts(
        engine=engine,
        scorer=Scorer(learner, s.replay, s.rollout.group_size, first_forward),
        prompts=s.rollout.prompts,
        sampling=s.dynamic_sampling,
        rewards=s.rewards,
        samples=s.log.samples,
        read_all=s.rollout.max_prompt_length > 0,
        **shared,
    )
