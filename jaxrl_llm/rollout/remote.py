"""The rollout engine on vLLM servers: token ids go there and back, weights go through files that both sides see.

Before the first answer and after every new policy a handshake compares what trainer and server compute. An answer
carries the version of the weights that sampled each token, so none of a stale or restarted server is ever taken.
"""

import dataclasses
import functools
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxrl_llm.ground.array_typing import Array, Integer, Key, Params
from jaxrl_llm.models import Model, Routing, blank_record, load_params, save_pretrained
from jaxrl_llm.rollout import handshake
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.placement import spread_rows
from jaxrl_llm.rollout.sampling import Sampling, answer_keys
from jaxrl_llm.rollout.server import Answer, Fault, Server
from jaxrl_llm.rollout.serving import Serving, addresses
from jaxrl_llm.rollout.spread import ask_all
from jaxrl_llm.rollout.trajectory import Trajectory

_MEMORY = Path("/dev/shm")
_TRANSFER_S = 600.0  # for new weights
_BACK_S = 300.0  # until a server that this run did not start is back


class Held(NamedTuple):
    """The weights of one policy, as the servers have them, in a folder."""

    version: int
    folder: Path


class _Question(NamedTuple):
    prompt: list[int]
    sampling: dict[str, Any]


@dataclasses.dataclass(eq=False)
class RemoteEngine:
    """How answers are sampled elsewhere; `take_weights` connects, and starts the servers that the run starts itself."""

    model: Model  # the trainer's, which the handshake scores with
    sampling: Sampling
    group_size: int
    prompt_length: int  # most tokens
    max_new_tokens: int
    end_ids: tuple[int, ...]
    servers: tuple[str, ...]  # addresses; () with `launch`: one on a free port
    launch: str = ""  # environment with vLLM in which the servers are started on this machine; "": they run already
    weights_dir: str = ""  # that servers on other machines see too; "": of this machine, in memory
    deadline_s: float = 300.0  # for an answer
    dtype: str = "float32"
    at_once: int = 64  # answers that the servers together are asked for
    needs_routes: bool = False
    rows_on: jax.sharding.Mesh | None = None
    remote: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if jax.process_count() > 1:
            raise ValueError("rollout.engine=vllm: a run of several processes samples by itself; set it to jax")

    @functools.cached_property
    def _servers(self) -> list[Server]:
        return [Server(one) for one in (addresses(self.servers) if self.launch else self.servers)]

    @functools.cached_property
    def _serving(self) -> Serving | None:
        if not self.launch:
            return None
        most = self.prompt_length + self.max_new_tokens
        each = -(-self.at_once // len(self._servers))
        return Serving(self.launch, self.folder, dtype=self.dtype, max_length=most, at_once=each)

    @functools.cached_property
    def folder(self) -> Path:
        """Of the weights; it goes with the engine."""
        where = self.weights_dir or (_MEMORY if _MEMORY.is_dir() else None)
        folder = Path(tempfile.mkdtemp(prefix="jaxrl-llm-", dir=where))
        folder.chmod(0o755)  # servers may be another user's
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @functools.cached_property
    def _name(self) -> str:
        """Of this process in the labels of weights, so that another run's are not taken for its own."""
        return secrets.token_hex(4)

    @functools.cached_property
    def _locks(self) -> dict[str, threading.Lock]:
        return {server.address: threading.Lock() for server in self._servers}

    def close(self) -> None:
        """End the servers that this engine started."""
        if self._serving is not None:
            self._serving.close()

    def take_weights(self, params: Params, version: int) -> tuple[Any, dict[str, float]]:
        """Write the weights, have every server replace its own by them, and compare what it computes then.

        Raises:
          ValueError: no server can be reached, or one computes something else than the trainer.
        """
        start = time.monotonic()
        held = self._latest = Held(version, self._written(params, version))
        size = float(sum(path.stat().st_size for path in held.folder.glob("*.safetensors")))
        lost, gaps = list[str](), list[float]()

        def bring(server: Server) -> None:
            try:
                gaps.append(self._bring(server, params, patience=0.0))
            except Fault as fault:
                lost.append(str(fault))

        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(bring, self._servers))
        if not gaps:
            raise ValueError(f"rollout.servers: {'; '.join(sorted(lost))}")
        for fault in lost:
            logging.warning("%s; the other servers go on without it", fault)
        for old in self.folder.glob("policy-*"):
            if old != held.folder:
                shutil.rmtree(old, ignore_errors=True)
        seconds = time.monotonic() - start
        return held, {
            "time/parameters_moved_s": seconds,
            "rollout/parameters_moved_bytes": size,
            "rollout/handshake": max(gaps),
        }

    def release(self, prepared: Held, params: Params) -> None:
        """The weights stay where they are until newer ones come: a server that restarts takes them again."""

    def generate(
        self,
        prepared: Held,
        prompts: Integer[Array | np.ndarray, "p tp"],
        lengths: Integer[Array | np.ndarray, "p"],
        uids: Integer[Array | np.ndarray, "p"],
        key: Key,
        limits: Integer[Array | np.ndarray, "b"] | None = None,
    ) -> Trajectory:
        """As `Engine.generate`, waiting for the answers. The seed of an answer comes from (key, uid, sample index).

        Raises:
          ValueError: no server is left, or an answer failed too often.
        """
        tokens, lengths = np.asarray(prompts), np.asarray(lengths)
        most = np.full(len(tokens) * self.group_size, self.max_new_tokens) if limits is None else np.asarray(limits)
        seeds = np.asarray(_seeds(key, jnp.asarray(uids), self.group_size))
        rows = np.repeat(np.arange(len(tokens)), self.group_size)
        questions = [
            _Question(tokens[row, : lengths[row]].tolist(), self._sampled(int(seed), int(limit)))
            for row, seed, limit in zip(rows, seeds, most, strict=True)
        ]

        def ask(server: Server, question: _Question) -> Answer:
            answer = server.ask(*question, self.deadline_s)
            self._check_versions(server, answer, prepared.version)
            return answer

        def recover(server: Server) -> None:
            if server.label() != self._label(self._latest.version):  # else it lost an answer and nothing more
                self._bring(server, None, patience=_BACK_S)

        answers = ask_all(questions, self._servers, self.at_once, ask, recover)
        return self._assembled(tokens[rows], lengths[rows], answers)

    def _sampled(self, seed: int, most: int) -> dict[str, Any]:
        return {
            "temperature": self.sampling.temperature,
            "max_tokens": most,
            "seed": seed,
            "stop_token_ids": list(self.end_ids),
        }

    def _label(self, version: int) -> str:
        return f"{self._name}-{version}"

    def _check_versions(self, server: Server, answer: Answer, least: int) -> None:
        """Raises `Fault` unless all tokens are of this run's weights of policy `least` or a later one."""
        for label in set(answer.versions):
            name, _, number = label.rpartition("-")
            if name != self._name or int(number) < least:
                raise Fault(
                    f"{server.address} answered with weights {label!r}, not {self._label(least)!r}: it was restarted, "
                    "or another run replaced them"
                )

    def _written(self, params: Params, version: int) -> Path:
        """The folder with the weights of a policy; it appears only when it is complete."""
        folder, partial = self.folder / f"policy-{version}", self.folder / "partial"
        for old in (folder, partial):
            shutil.rmtree(old, ignore_errors=True)
        save_pretrained(params, self.model.config, partial)
        partial.rename(folder)
        return folder

    def _bring(self, server: Server, params: Params | None, patience: float) -> float:
        """Have a server take the newest weights, and compare; returns the gap that `handshake.check` found.

        Args:
          params: what was written; None: an update may have overwritten it since, and they are read again.
          patience: seconds until a server that this run did not start must be up.
        """
        config = self.model.config
        with self._locks[server.address]:
            held = self._latest
            params = load_params(held.folder, self.model) if params is None else params
            if self._serving is not None:
                self._serving.start(server, held.folder)
            end = time.monotonic() + patience
            while not server.healthy() and time.monotonic() < end:
                time.sleep(1)
            self._check_model(server)
            server.take_weights(str(held.folder), self._label(held.version), _TRANSFER_S)
            prompts = handshake.fixed_prompts(config.vocab_size, self.prompt_length)
            wanted = self._sampled(0, min(handshake.ANSWER, self.max_new_tokens))
            wanted |= {"stop_token_ids": [], "prompt_logprobs": 0}  # whole answers, none cut by an end
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda prompt: server.ask(prompt, wanted, _TRANSFER_S), prompts.tolist()))
        for one in answers:
            self._check_versions(server, one, held.version)
        if self.needs_routes and any(one.experts is None for one in answers):
            raise ValueError(
                f"replay.mode=R3 needs the experts of the sampler, and {server.address} does not return them; start it "
                "as docs/engines.md says, or set replay.mode=off"
            )
        return handshake.check(
            server.address,
            self.model,
            params,
            prompts,
            answers,
            temperature=self.sampling.temperature,
            dtype="bfloat16" if "bfloat16" in (self.dtype, config.dtype, config.param_dtype) else "float32",
        )

    def _check_model(self, server: Server) -> None:
        """Raises ValueError if a server holds a model of other sizes: a token that it does not have would end it."""
        said, config = server.model(_TRANSFER_S), self.model.config
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if said.get(name) != getattr(config, name):
                raise ValueError(
                    f"{server.address} serves a model of {name}={said.get(name)}, and the run's has "
                    f"{getattr(config, name)}; serve the run's model (docs/engines.md)"
                )
        if said.get("dtype") != self.dtype:
            raise ValueError(
                f"{server.address} computes in {said.get('dtype')} and rollout.dtype is {self.dtype}; make them equal"
            )
        most = self.prompt_length + self.max_new_tokens
        if said.get("max_model_len", 0) < most:
            raise ValueError(
                f"{server.address} holds at most {said.get('max_model_len')} tokens and an answer of this run with its "
                f"prompt takes {most}; start it with --max-model-len {most}"
            )

    def _assembled(self, prompts: np.ndarray, lengths: np.ndarray, answers: Sequence[Answer]) -> Trajectory:
        """Prompt and answer side by side, as the rows of `Engine.generate`."""
        b, width = len(prompts), prompts.shape[1] + self.max_new_tokens
        tokens, versions = np.zeros((b, width), np.int32), np.zeros((b, width), np.int32)
        logprobs, mask = np.zeros((b, width), np.float32), np.zeros((b, width), bool)
        segment_ids, experts = np.zeros((b, width), np.int32), None
        if all(one.experts is not None for one in answers) and self.model.config.num_moe_layers:
            experts = np.array(blank_record(self.model.config, b, width).experts)
        for row, (prompt, start, answer) in enumerate(zip(prompts, lengths, answers, strict=True)):
            end = start + len(answer.tokens)
            tokens[row, :start], tokens[row, start:end] = prompt[:start], answer.tokens
            logprobs[row, start:end], mask[row, start:end], segment_ids[row, :end] = answer.logprobs, True, 1
            versions[row, start:end] = [int(label.rpartition("-")[2]) for label in answer.versions]
            if experts is not None and answer.experts is not None:
                experts[:, row, : end - 1] = answer.experts.swapaxes(0, 1)
        truncated = np.array([one.tokens[-1] not in self.end_ids for one in answers])
        out = Trajectory(
            tokens=jnp.asarray(tokens),
            segment_ids=jnp.asarray(segment_ids),
            loss_mask=jnp.asarray(mask),
            sampler_logprobs=jnp.asarray(logprobs),
            truncated=jnp.asarray(truncated),
            routing=None if experts is None else Routing(jnp.asarray(experts)),
            versions=jnp.asarray(versions),
        )
        return spread_rows(self.rows_on, out)


RolloutEngine = Engine | RemoteEngine  # samples on the trainer's devices, or on servers


@functools.partial(jax.jit, static_argnums=2)
def _seeds(key: Key, uids: Array, group_size: int) -> Array:
    return jax.vmap(lambda one: jax.random.bits(one, dtype=jnp.uint32))(answer_keys(key, uids, group_size))
