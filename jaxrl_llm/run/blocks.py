"""The blocks of a configuration as frozen dataclasses, each field declared once, and `Settings`, the whole run."""

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm import models, objectives, tasks
from jaxrl_llm.ground.declared import Block, declared, declared_by
from jaxrl_llm.models import EXACT, ModelConfig, Router
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.preference import PreferenceConfig
from jaxrl_llm.training.collect import DynamicSampling
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RewardConfig
from jaxrl_llm.training.warm_start import WarmStartConfig


def unserved(fields: Mapping[str, tuple[Any, Any]], why: str) -> Iterator[str]:
    """A fault for each field {name: (value, the only value that is served)} of another value."""
    for field, (value, only) in fields.items():
        if value != only:
            yield f"{field}={value!r}: {why}; set it to {only!r}"


def host_of(field: str, address: str) -> str:
    """The host of http://host:port; raises ValueError for another address."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not address.startswith("http://") or not host or not port.isdigit():
        raise ValueError(f"{field}: {address!r} is no address; give http://host:port")
    return host


@dataclasses.dataclass(frozen=True)
class TaskConfig(Block, prefix="task."):
    """The task, and the text around its prompts."""

    name: str = declared("sort", "see docs/tasks.md")
    options: Mapping[str, Any] = declared({"digits": 10}, "the task's own options, each set as task.options.NAME")
    data_dir: str = declared("", "folder of the data; empty: the user's cache folder")
    tokenizer: str = declared(
        "", "folder of tokenizer.json, GGUF file, hub name; empty: the checkpoint's, or the task's"
    )
    template: str = declared("{prompt}", "text around every prompt, for example worked examples before it")
    chat: bool = declared(False, "wrap that in the tokenizer's chat template")
    system: str = declared("", "system message of the chat; empty: none, or the template's own")
    chat_options: Mapping[str, Any] = declared({}, 'other variables of the chat template: `{"enable_thinking": False}`')
    date: str = declared("", "today for a chat template that names it, YYYY-MM-DD; empty: the day of the first start")
    verify_truncated: bool = declared(False, "verify answers cut off by the length bound; otherwise they get 0")
    keep_turns: bool = declared(False, "keep earlier turns as sampled where the chat template rewrites them")
    think_end_token: str = declared("", "verify only what follows the last of it, such as </think>; without it: 0")

    def check(self) -> None:
        try:
            datetime.date.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            raise ValueError(f"task.date={self.date!r} is no day; give it as YYYY-MM-DD, or leave it empty") from None


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Block, prefix="rollout."):
    """How answers are sampled."""

    prompts: int = declared(32, "prompts per step", least=1)
    group_size: int = declared(8, "G, answers to each prompt; of pairs 2, of supervised training 1", least=1)
    max_prompt_length: int = declared(0, "tokens; 0: the task's own bound", least=0)
    max_new_tokens: int = declared(0, "tokens of an answer, EOS included; 0: the task's own bound", least=0)
    max_turns: int = declared(0, "answers of an episode: docs/environments.md; 0: the task's own bound", least=0)
    max_observation_length: int = declared(0, "tokens between two answers; 0: the task's own bound", least=0)
    max_episode_length: int = declared(0, "tokens of prompt, answers and observations; 0: no bound of its own", least=0)
    temperature: float = declared_by(Sampling, "temperature")
    top_k: int = declared_by(Sampling, "top_k")
    top_p: float = declared_by(Sampling, "top_p")
    min_p: float = declared_by(Sampling, "min_p")
    allow_truncated: bool = declared(False, "train on cut samples as if they were not: biased, as earlier versions did")
    slots: int = declared(0, "answers decoded at once (continuous batching), which bounds memory; 0: all", least=0)
    lag: int = declared(0, "steps from asking for a rollout to training on it: docs/lag.md", least=0)
    prompt_buckets: int = declared(1, "a step's prompts are cut to one of so many widths; each compiles once", least=1)
    dtype: str = declared(
        "float32",
        "of the sampler; bfloat16: a mismatch",
        among={"float32": "", "bfloat16": "", "float8_e4m3": "weights"},
    )
    router_dtype: str = declared_by(Router, "dtype")
    router_noise: float = declared_by(Router, "noise")
    router_bias: float = declared_by(Router, "bias")
    router_gates: str = declared_by(Router, "gates")
    mesh_shape: tuple[int, ...] = declared((), "mesh to sample and evaluate on, of the same devices; (): mesh.shape")
    engine: str = declared(
        "jax", "of training's answers", among={"jax": "the run's devices", "vllm": "servers: docs/engines.md"}
    )
    servers: tuple[str, ...] = declared((), "of vLLM, http://host:port each; (): one that `launch` starts")
    launch: str = declared("", "environment with vLLM that servers are started in on this machine; empty: they run")
    weights_dir: str = declared("", "folder that trainer and servers see; empty: this machine's memory")
    weights_by: str = declared(
        "folder", "how servers get weights", among={"folder": "weights_dir", "http": "sent to them"}
    )
    deadline_s: float = declared(300.0, "seconds for an answer of a server, which is then asked for again", above=0)

    def check(self) -> None:
        self._check_servers()
        _ = self.router  # raises where its fields contradict each other
        if self.temperature == 0:
            raise ValueError(
                "rollout.temperature=0 makes all answers of a group equal, so there is nothing to compare; "
                "set rollout.temperature=1.0"
            )
        if self.records_kept and not self.top_k:
            cut = f"rollout.top_p={self.top_p}" if self.top_p < 1 else f"rollout.min_p={self.min_p}"
            raise ValueError(
                f"{cut} needs a bound on the tokens that it keeps, which training records; set rollout.top_k=64 (which "
                "cuts, too, and costs 4 * 64 bytes a token)"
            )

    def _check_servers(self) -> None:
        if self.engine == "jax":
            own = {"servers": (), "launch": "", "weights_dir": "", "weights_by": "folder"}
            self._leave(own, "rollout.engine=jax asks no servers; set that to vllm")
            return
        if not self.servers and not self.launch:
            raise ValueError(
                'rollout.engine=vllm needs rollout.servers=("http://host:port",), or rollout.launch=FOLDER of an '
                "environment with vLLM to start one (docs/engines.md)"
            )
        for address in self.servers:
            host = host_of("rollout.servers", address)
            if self.launch and host not in ("127.0.0.1", "localhost"):
                raise ValueError(
                    f"rollout.servers: {address!r} is another machine, and rollout.launch starts servers on this one; "
                    "give http://127.0.0.1:port, or start the servers there and leave rollout.launch empty"
                )
        if self.weights_by == "http" and self.weights_dir:
            raise ValueError(
                f"rollout.weights_dir={self.weights_dir!r} is a folder that servers see, and rollout.weights_by=http "
                "sends the weights; leave one out"
            )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError(f"rollout.servers={self.servers} has an address twice; give each once")
        dtype = self.dtype if self.dtype == "bfloat16" else "float32"
        own = {"dtype": dtype, "mesh_shape": (), "prompt_buckets": 1}
        own |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # a server does not say what a cut left
        self._leave(own, "rollout.engine=vllm serves no other")

    def _leave(self, own: Mapping[str, Any], why: str) -> None:
        for fault in unserved({f"rollout.{name}": (getattr(self, name), only) for name, only in own.items()}, why):
            raise ValueError(fault)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def records_kept(self) -> bool:
        """True if the rollout records the tokens that its cuts left, and log-probs are over those."""
        return self.sampling.cuts and not self.allow_truncated

    @property
    def router(self) -> Router:
        return Router(self.router_dtype, self.router_noise, self.router_bias, self.router_gates)


@dataclasses.dataclass(frozen=True)
class TeacherConfig(Block, prefix="teacher."):
    """A frozen teacher to distil from: docs/distillation.md."""

    path: str = declared("", "DIR, checkpoint or http://host:port with the policy's token ids; or A,B; empty: none")
    weights: tuple[float, ...] = declared((), "of several teachers' log-probs; (): all alike")
    by: str = declared("", "FIELD=VALUE,VALUE: field of a prompt's row that says which of several teachers scores it")
    hint: str = declared("{answer} ", "text before the prompt where teacher.path=self: the policy that has the answer")
    beta: float = declared(
        1.0,
        "of D: 0 forward KL(pi_T, pi), 1 reverse KL(pi, pi_T), between: Jensen-Shannon",
        least=0,
        most=1,
    )
    mesh_shape: tuple[int, ...] = declared(
        (), "mesh of devices that mesh.shape leaves, or if none of its; (): mesh.shape"
    )
    top_k: int = declared(0, "tokens of D, the teacher's likeliest, all others as one; 0: every token", least=0)
    add_tail: bool = declared(True, "all others as one; False leaves them out, with top_k and beta=0")

    def check(self) -> None:
        if not self.add_tail and (self.beta or not self.top_k):
            raise ValueError(
                f"teacher.add_tail=False with teacher.top_k={self.top_k} and beta={self.beta:g}: without the others "
                "only the forward KL of a teacher's likeliest has its least value at the teacher; set teacher.beta=0 "
                "and top_k to at least 1, or add_tail=True"
            )

    @property
    def paths(self) -> list[str]:
        return self.path.split(",")

    @property
    def is_self(self) -> bool:
        return self.path == "self"


@dataclasses.dataclass(frozen=True)
class CriticConfig(Block, prefix="critic."):
    """The value function, for PPO."""

    kind: str = declared(
        "none", among={"none": "", "head": "on the policy", "separate": "a model and an optimizer of its own"}
    )
    learning_rate: float = declared(1e-3, "of a separate critic", least=0)
    warmup_steps: int = declared(0, "first rollouts in which the critic learns and the policy stays as it is", least=0)

    def check(self) -> None:
        if self.warmup_steps and self.kind == "none":
            raise ValueError(
                f"critic.warmup_steps={self.warmup_steps} but there is no critic; set it to 0, or critic.kind to head "
                "or separate"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Block, prefix="evaluation."):
    """On held-out prompts with fixed keys."""

    every: int = declared(10, "steps; also before the first and after the last", least=1)
    prompts: int = declared(128, "held-out prompts", least=1)
    samples: int = declared(4, "answers per prompt, for pass@1 and pass@k", least=1)
    temperature: float = declared(1.0, "of these answers, whatever rollouts use; a greedy one is beside them", least=0)
    top_k: int = declared(0, "most tokens to draw them from; 0 keeps every one", least=0)
    top_p: float = declared(1.0, "draw from the fewest tokens with this much probability", above=0, most=1)
    min_p: float = declared(0.0, "drop tokens below this share of the largest probability", least=0, most=1)

    def check(self) -> None:
        if self.temperature == 0:
            raise ValueError(
                "evaluation.temperature=0 makes all answers to a prompt equal, and eval/greedy is of the greedy one "
                "already; give a temperature above 0"
            )

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, greedy_last=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Block, prefix="checkpoint."):
    """Checkpoints, from which a stopped run resumes."""

    every: int = declared(20, "steps, or later while one is written; also at the end or a signal", least=1)
    keep: int = declared(2, "newest checkpoints that stay", least=1)
    local_every: int = declared(0, "steps between others in DIR/local, of which the newest stays; 0: none", least=0)
    best: str = declared("", "metric whose best checkpoint stays too, for example eval/greedy; empty: none")
    best_mode: str = declared("max", "of `best`", among={"max": "higher is better", "min": "lower"})
    early_stopping_patience: int = declared(0, "evaluations without a better `best` that end the run; 0: none", least=0)

    def check(self) -> None:
        if self.early_stopping_patience and not self.best:
            raise ValueError(
                f"checkpoint.early_stopping_patience={self.early_stopping_patience} waits for no metric; set "
                "checkpoint.best, for example to eval/greedy"
            )


@dataclasses.dataclass(frozen=True)
class LogConfig(Block, prefix="log."):
    """Records beside the metrics of every step."""

    samples: int = declared(4, "answers per step written to samples.jsonl", least=0)
    diagnostics_every: int = declared(5, "steps between routing diagnostics with extra forwards; 0: never", least=0)
    wandb: str = declared("", "project of Weights & Biases to log to; empty: none")
    profile: tuple[int, ...] = declared((), "first and last step of a trace of jax.profiler in DIR/profile; (): none")

    def check(self) -> None:
        if self.profile and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]):
            raise ValueError(f"log.profile={self.profile} must be two steps, (first, last), or ()")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Block, prefix="mesh."):
    """How the devices are arranged."""

    shape: tuple[int, ...] = declared(
        (1, 1, 1, 1), "data, fsdp, expert, tensor[, context]; a size of -1 takes the remaining devices"
    )
    dcn_shape: tuple[int, ...] = declared(
        (), "sizes of these axes over slices that a slower network joins; (): all slices along data"
    )


@dataclasses.dataclass(frozen=True)
class ProcessesConfig(Block, prefix="processes."):
    """Several hosts, or one process per GPU: docs/several_processes.md."""

    start_timeout_s: int = declared(300, "until all processes have joined", least=1)
    heartbeat_timeout_s: int = declared(60, "without a sign of life of one process, the others end", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. `task` and `objective` are objects, and `model` has every field set."""

    seed: int = declared(0, "seed of parameters, prompts, sampling and shuffling", least=0, most=2**32 - 1)
    steps: int = declared(60, "rollouts", least=0, most=2**31 - 1)
    task: tasks.Task
    data_dir: str | None
    tokenizer: str = ""  # task.tokenizer
    pretrained: str = declared("", "path or hub name of a checkpoint; no size may differ from it; empty: fresh weights")
    model: ModelConfig
    lora: LoRAConfig
    warm_start: WarmStartConfig
    rollout: RolloutConfig
    dynamic_sampling: DynamicSampling
    rewards: RewardConfig
    preference: PreferenceConfig
    objective: objectives.AnyObjective
    objective_name: str = declared("grpo", "a recipe: see docs/objectives.md")
    replay: ReplayConfig
    updates: UpdateConfig
    optimizer: OptimizerConfig
    critic: CriticConfig
    teacher: TeacherConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    mesh: MeshConfig
    processes: ProcessesConfig

    @property
    def answer_length(self) -> int:
        return self.rollout.max_new_tokens or self.task.answer_length

    @property
    def sampled_length(self) -> int:
        """The most tokens that are sampled for a prompt, over all turns."""
        return self.answer_length * self.task.turns

    @property
    def rows(self) -> int:
        return self.rollout.prompts * self.rollout.group_size

    @property
    def greedy_last(self) -> bool:
        """True if the last answer of each group of a rollout is greedy."""
        return getattr(getattr(self.objective, "advantage", None), "greedy_last", False)

    @property
    def reference_dtype(self) -> str:
        """The type of pi_ref's parameters: the checkpoint's own, where the run starts from it as it is."""
        as_stored = self.pretrained and not self.warm_start.steps
        return models.stored_dtype(self.pretrained) if as_stored else self.model.param_dtype

    @property
    def sampler_precision(self) -> str:
        """How closely the trainer may expect to agree with the sampler: that of a dtype, "made different" of none.

        Adapters are merged in the dtype of the weights: in bfloat16 that is what is sampled from.
        """
        if self.rollout.router != EXACT:
            return "made different"
        merged = self.model.param_dtype if self.lora.rank else "float32"
        return self.rollout.dtype if merged == "float32" else merged
