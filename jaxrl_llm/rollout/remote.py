"""The rollout engine on vLLM servers: token ids go there and back, weights go through files or over HTTP.

Before the first answer and after every new policy a handshake compares what trainer and server compute. An answer
carries the version of the weights that sampled each token, so none of a stale or restarted server is ever taken.

Several processes ask the same servers, each for its share of the answers; the first one hands over the weights.
"""

import dataclasses
import functools
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxrl_llm import models
from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Array, Key, Params, shapes_for_arrays
from jaxrl_llm.models import Model, Routing, routing_dtype
from jaxrl_llm.rollout import handshake
from jaxrl_llm.rollout.answer_fields import Answer, Question, RouteFormat
from jaxrl_llm.rollout.bounded_http import Fault
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.rollout.sampling import Sampling, answer_keys
from jaxrl_llm.rollout.server import Server
from jaxrl_llm.rollout.serving import TOKEN, Serving, addresses
from jaxrl_llm.rollout.spread import ask_all

_MEMORY = Path("/dev/shm")
_TRANSFER_S = 600.0  # for new weights
_BACK_S = 300.0  # until a server that this run did not start is back


class Held(NamedTuple):
    """The weights of one policy, as the servers have them."""

    version: int
    folder: Path  # with their files, in the process that hands them over
    routes: RouteFormat | None  # the record that answers must have; None: a dense model


class Asked(NamedTuple):
    """The answers of this process's share of a rollout, or why there are none."""

    rows: int  # of all processes
    arrays: dict[str, np.ndarray]
    failed: str = ""


@dataclasses.dataclass(eq=False)
class RemoteEngine:
    """How answers are sampled elsewhere; `take_weights` connects, and starts the servers that the run starts itself."""

    model: Model  # the trainer's, which the handshake scores with
    sampling: Sampling
    group_size: int
    prompt_length: int  # most tokens of a prompt; over turns of all that is before an answer
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
    weights_by: str = "folder"  # or "http"
    remote: ClassVar[bool] = True
    _labels: dict[str, int] = dataclasses.field(default_factory=dict, init=False)  # of all weights that were sent

    @functools.cached_property
    def _link(self) -> tuple[str, str, list[str]]:
        """This run's name in the labels of weights, the token and the addresses; the same in all processes."""
        own: list[Any] = []
        if jax.process_index() == 0:
            token = os.environ.get(TOKEN) or (secrets.token_hex(16) if self.launch else "")
            own = [secrets.token_hex(4), token, addresses(self.servers) if self.launch else list(self.servers)]
        name, token, where = processes.gather(own)
        return name, token, where

    @functools.cached_property
    def _servers(self) -> list[Server]:
        _, token, where = self._link
        return [Server(one, token) for one in where]

    @functools.cached_property
    def _serving(self) -> Serving | None:
        if not self.launch:
            return None
        most = self.prompt_length + self.max_new_tokens
        each = -(-self.at_once // len(self._servers))
        token = self._link[1]
        return Serving(self.launch, self.folder, token=token, dtype=self.dtype, max_length=most, at_once=each)

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the weights; it goes with the engine."""
        where = self.weights_dir or (_MEMORY if _MEMORY.is_dir() else None)
        folder = Path(tempfile.mkdtemp(prefix="jaxrl-llm-", dir=where))
        folder.chmod(0o755)  # servers may be another user's
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @functools.cached_property
    def _prompts(self) -> np.ndarray:
        return handshake.fixed_prompts(self.model.config.vocab_size, self.prompt_length)

    def close(self) -> None:
        """End the servers that this engine started."""
        if self._serving is not None:
            self._serving.close()

    def take_weights(self, params: Params, version: int = 0) -> tuple[Any, dict[str, float]]:
        """Write the weights, have every server replace its own by them, and compare what it computes then.

        A collective: the first process hands over the weights, and all score the answers of the handshake.

        Raises:
          ValueError: no server can be reached, or one computes something else than the trainer.
        """
        start = time.monotonic()
        _ = self._serving, self._prompts  # made before threads share them
        self._labels[self._label(version)] = version
        held = self._latest = Held(version, self._written(params, version), self._routes())
        processes.wait_for_all("remote.take_weights")  # every process knows the label
        said: list[dict[str, Any]] = []
        if jax.process_index() == 0:
            with ThreadPoolExecutor(len(self._servers)) as pool:
                said = list(pool.map(self._attempt, self._servers))
        said = processes.gather(said)
        if refused := [one["refused"] for one in said if "refused" in one]:
            raise ValueError(refused[0])
        lost = [one["fault"] for one in said if "fault" in one]
        if len(lost) == len(said):
            raise ValueError(f"rollout.servers: {'; '.join(sorted(lost))}")
        for fault in lost:
            logging.warning("%s; the other servers go on without it", fault)
        there = {server.address: one for server, one in zip(self._servers, said, strict=True) if "fault" not in one}
        found = [self._compared(address, params, one) for address, one in there.items()]
        if held.routes is not None:
            record = "ignored" if any(one["experts"] is None for one in there.values()) else "required"
            routes = dataclasses.replace(held.routes, record=record, alike=max(one.alike for one in found))
            held = self._latest = held._replace(routes=routes)
        for old in held.folder.parent.glob("policy-*"):
            if old != held.folder:
                shutil.rmtree(old, ignore_errors=True)
        return held, {
            "time/parameters_moved_s": time.monotonic() - start,
            "rollout/parameters_moved_bytes": float(sum(x.stat().st_size for x in held.folder.glob("*.safetensors"))),
            "rollout/handshake": max(one.gap for one in found),
        }

    def release(self, prepared: Held, params: Params) -> None:
        """The weights stay where they are until newer ones come: a server that restarts takes them again."""

    def generate(self, prepared: Held, prompts: Any, lengths: Any, uids: Any, key: Key, limits: Any = None) -> Rollout:
        """Sample as `Engine.generate`, waiting for answers. The seed of an answer comes from (key, uid, sample index).

        Raises:
          ValueError: no server is left, or an answer failed too often.
        """
        return self.gathered(self.asked(prepared, prompts, lengths, uids, key, limits))

    @shapes_for_arrays()
    def shapes(self, count: int, width: int) -> Rollout:
        """The shapes of a rollout for `count` prompts of at most `width` tokens; with the record that replay asks for,
        though servers may give one to others."""

        def rollout() -> Rollout:
            rows, length = count * self.group_size, width + self.max_new_tokens
            tokens, layers = jnp.zeros((rows, length), jnp.int32), self.model.config.num_moe_layers
            mask, zeros = tokens.astype(bool), tokens.astype(jnp.float32)
            record = self.model.config.gate.blank(layers, rows, length) if self.needs_routes else None
            routes = Routes(sampled=record)
            return Rollout(tokens, tokens, mask, zeros, mask[:, 0], versions=tokens, routes=routes)

        return jax.eval_shape(rollout)

    def asked(self, prepared: Held, prompts: Any, lengths: Any, uids: Any, key: Key, limits: Any = None) -> Asked:
        """The answers of this process's share, in any thread; `gathered` takes them. Arguments as `generate`."""
        tokens, lengths = np.asarray(prompts), np.asarray(lengths)
        b = len(tokens) * self.group_size
        most = np.full(b, self.max_new_tokens) if limits is None else np.asarray(limits)
        seeds = np.asarray(answer_seeds(key, jnp.asarray(uids), self.group_size))
        questions = []
        for i in processes.share(b):
            row = i // self.group_size
            prompt = tokens[row, : lengths[row]].tolist()
            questions.append(self.question(prepared, prompt, int(seeds[i]), int(most[i]), self.end_ids))
        failed, answers = "", list[Answer]()
        try:
            answers = ask_all(questions, *self.asking(prepared))
        except ValueError as error:
            if jax.process_count() == 1:
                raise
            failed = f"process {jax.process_index()}: {error}"
        said = zip(range(len(answers)), questions, answers, strict=False)
        return Asked(b, self.rows(prepared, said, (len(answers), tokens.shape[1] + self.max_new_tokens)), failed)

    def asking(self, prepared: Held) -> tuple[Sequence[Server], int, Any, Any]:
        """Return the arguments of `Asking` behind the questions: servers, how many at once, `ask` and `recover`."""

        def recover(server: Server) -> None:
            if self._labels.get(server.label(), -1) >= prepared.version:
                return  # it lost an answer and nothing more
            if jax.process_count() > 1:
                raise Fault(f"{server.address} lost its weights, and is left out until the next ones")
            said = self._bring(server, patience=_BACK_S)
            self._compared(server.address, models.load_params(self._latest.folder, self.model), said)

        def ask(server: Server, question: Question) -> Answer:
            return server.ask(question, self.deadline_s)

        return self._servers, -(-self.at_once // jax.process_count()), ask, recover

    def gathered(self, asked: Asked) -> Rollout:
        """The rollout of all processes, on the mesh; a collective. Raises as `generate`."""
        for failed in processes.gather([asked.failed]):
            if failed:
                raise ValueError(failed)
        arrays = processes.gather_rows(asked.arrays, asked.rows)
        if "experts" in arrays:
            arrays["experts"] = np.moveaxis(arrays["experts"], 2, 0)
        placed = sharding.put_rows(arrays, self.rows_on)
        experts = placed.pop("experts", None)
        return Rollout(**placed, routes=Routes(sampled=None if experts is None else Routing(experts)))

    def question(
        self, held: Held, prompt: list[int], seed: int, most: int, ends: tuple[int, ...] = (), **also: Any
    ) -> Question:
        """ends: token ids that end the answer; () makes it `most` tokens long. also: of vLLM's sampling."""
        sampling = {
            "temperature": self.sampling.temperature,
            "max_tokens": most,
            "seed": seed,
            "stop_token_ids": list(ends),
            **also,
        }
        return Question(prompt, sampling, self.model.config.vocab_size, self._labels, held.version, held.routes)

    def _routes(self) -> RouteFormat | None:
        """The record that is taken where a server gives one."""
        config = self.model.config
        if not config.num_moe_layers:
            return None
        sizes = config.num_moe_layers, config.num_experts_per_tok, config.num_experts
        return RouteFormat(*sizes, np.dtype(routing_dtype(config.num_experts)), "optional")

    def _label(self, version: int) -> str:
        return f"{self._link[0]}-{version}"

    def _written(self, params: Params, version: int) -> Path:
        """The folder with the weights of a policy; it appears only when it is complete."""
        folder, partial = self.folder / f"policy-{version}", self.folder / "partial"
        for old in (folder, partial):
            shutil.rmtree(old, ignore_errors=True)
        leaves, tree = jax.tree.flatten(params)
        first = jax.process_index() == 0
        if jax.process_count() > 1:  # whole in one process, an array at a time in the others
            leaves = [whole if first else None for whole in map(processes.fetch, leaves)]
        if first:
            models.save_pretrained(jax.tree.unflatten(tree, leaves), self.model.config, partial)
            partial.rename(folder)
        return folder

    def _attempt(self, server: Server) -> dict[str, Any]:
        """Call `_bring` and return its error as a text, which other processes can be told."""
        try:
            return self._bring(server, patience=0.0)
        except Fault as fault:
            return {"fault": str(fault)}
        except ValueError as error:
            return {"refused": str(error)}

    def _bring(self, server: Server, patience: float) -> dict[str, Any]:
        """Have a server take the newest weights and answer the questions of the handshake.

        Args:
          patience: seconds until a server that this run did not start must be up.
        """
        with server.taking:
            held = self._latest
            label, folder = self._label(held.version), str(held.folder)
            if self._serving is not None:
                self._serving.start(server, held.folder)
            server.wait(patience)
            self._check_model(server)
            if self.weights_by == "http":
                folder = server.send_weights(held.folder, label, _TRANSFER_S)
            server.take_weights(folder, label, _TRANSFER_S)
            most, held = min(handshake.ANSWER, self.max_new_tokens), held._replace(routes=self._routes())

            def ask(prompt: list[int]) -> Answer:
                return server.ask(self.question(held, prompt, 0, most, prompt_logprobs=0), _TRANSFER_S)

            with ThreadPoolExecutor(len(self._prompts)) as pool:
                return handshake.columns(list(pool.map(ask, self._prompts.tolist())))

    def _compared(self, address: str, params: Params, said: dict[str, Any]) -> handshake.Agreement:
        """Raises ValueError unless a server's answers of `_bring` are those of the trainer."""
        if self.needs_routes and said["experts"] is None:
            raise ValueError(
                f"replay.mode=R3 needs the experts of the sampler, and {address} does not return them; start it "
                "as docs/engines.md says, or set replay.mode=off"
            )
        config, temperature = self.model.config, self.sampling.temperature
        dtype = "bfloat16" if "bfloat16" in (self.dtype, config.dtype, config.param_dtype) else "float32"
        return handshake.check(address, self.model, params, self._prompts, said, temperature=temperature, dtype=dtype)

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

    def rows(
        self, held: Held, said: Iterable[tuple[int, Question, Answer]], shape: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """Prompt and answer side by side, as the rows of `Engine.generate`, in arrays by the names of a `Rollout`;
        experts [b t l k].

        Args:
          said: row, question and answer; of one row in the order in which they were asked, each with all before it as
            its prompt.
          shape: rows and tokens.
        """
        out: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "versions")}
        out |= {"sampler_logprobs": np.zeros(shape, np.float32), "loss_mask": np.zeros(shape, bool)}
        out["truncated"], fed = np.zeros(shape[0], bool), np.zeros(shape[0], np.int32)
        if held.routes is not None and held.routes.record == "required":
            out["experts"] = np.array(self.model.config.gate.blank(*shape, self.model.config.num_moe_layers).experts)
        for row, question, answer in said:
            start = len(question.prompt)
            end = start + len(answer.tokens)
            out["tokens"][row, :end] = [*question.prompt, *answer.tokens]
            out["segment_ids"][row, :end] = 1
            out["sampler_logprobs"][row, start:end], out["loss_mask"][row, start:end] = answer.logprobs, True
            out["versions"][row, start:end] = answer.versions
            out["truncated"][row] = answer.tokens[-1] not in self.end_ids
            if "experts" in out and answer.experts is not None:  # what was recorded stays
                out["experts"][row, fed[row] : end - 1] = answer.experts[fed[row] :]
            fed[row] = end - 1
        return out


@functools.partial(jax.jit, static_argnums=2)
def answer_seeds(key: Key, uids: Array, group_size: int) -> Array:
    return jax.vmap(lambda one: jax.random.bits(one, dtype=jnp.uint32))(answer_keys(key, uids, group_size))
