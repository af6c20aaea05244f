"""Extensions of vLLM 0.32: weights that files replace, and on CPU the experts of every fed token.

On an accelerator vLLM's own reload and its own capture of experts serve (`--enable-return-routed-experts`). On CPU
neither works: the reload is silently wrong, because the matrices were packed away when the server started, and the
capture needs Triton. There, matrices stay plain, every router reports its choice, and the scheduler puts that into the
answer as vLLM would.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false
import glob
import os
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler


class Extension:
    """Methods that the server's `/collective_rpc` can call in its workers beside vLLM's own."""

    def describe_model(self) -> dict[str, Any]:
        """The sizes that tell models apart, and the dtype that is computed in."""
        config: Any = self.model_config  # pyright: ignore[reportAttributeAccessIssue]
        sizes = {name: getattr(config.hf_config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        return sizes | {"dtype": str(config.dtype).removeprefix("torch."), "max_model_len": config.max_model_len}

    def replace_weights(self, folder: str) -> None:
        """Load the safetensors files of a folder in place of the present weights."""
        runner: Any = self.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        if not current_platform.is_cpu():
            runner.reload_weights(weights_path=folder)
            return
        weights: dict[str, torch.Tensor] = {}
        for name in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
            weights |= load_file(name)
        model = runner.get_model()
        model.load_weights(weights.items())
        for module in model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(module)


class RoutesScheduler(Scheduler):
    """vLLM's scheduler, whose answers carry what the workers on CPU recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector: Any = _Routes()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.aux_output_connector.add(model_runner_output.aux_output_connector_output or {})
        return super().update_from_output(scheduler_output, model_runner_output)


class _Routes:
    """The experts of every running request, until an answer takes them; a chunk of a prompt has no answer yet."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}
        self._known: dict[str, int] = {}  # tokens recorded so far: one fed again after a preemption is not new

    def add(self, recorded: dict[str, tuple[int, np.ndarray]]) -> None:
        for name, (start, rows) in recorded.items():
            known = self._known.get(name, 0)
            self._rows.setdefault(name, []).append(rows[max(0, known - start) :])
            self._known[name] = max(known, start + len(rows))

    def take_output(self, request: Any, given: Any) -> np.ndarray | None:
        taken = self._rows.pop(request.request_id, None)
        return np.concatenate(taken) if taken else None

    def request_finished(self, request: Any) -> None:
        if not request.is_finished():  # preempted: what was recorded stays, and is not recorded again
            return
        self._rows.pop(request.request_id, None)
        self._known.pop(request.request_id, None)

    def reset(self) -> None:
        """A pause clears vLLM's own store by this; what was recorded of a running answer stays its own."""

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        return None


def _plain_matrices() -> None:
    """Matrices that are multiplied as they are, so that they can be overwritten."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in (utils, linear, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = dispatch  # pyright: ignore[reportAttributeAccessIssue]


def _record_experts() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # of which the CPU's is a subclass

    execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens

    def execute_and_record(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _listened(self)
        for chosen in layers:
            chosen.clear()
        out = execute(self, scheduler_output, *args, **kwargs)
        counts = scheduler_output.num_scheduled_tokens
        names = [name for name in self.input_batch.req_ids if name in counts]
        self.recorded = _by_request(layers, names, scheduler_output) if counts and any(layers) else {}
        return out

    def sample_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = sample(self, *args, **kwargs)
        if out is not None and self.recorded:
            out.aux_output_connector_output = self.recorded
        return out

    GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = execute_and_record, sample_and_tell


def _listened(runner: Any) -> list[list[torch.Tensor]]:
    """One list for every MoE layer, into which its router puts the experts of the tokens of a forward."""
    if not hasattr(runner, "experts_by_layer"):
        found = (getattr(module, "router", None) for module in runner.get_model().modules())
        routers = {id(router): router for router in found if hasattr(router, "set_capture_fn")}  # several may share one
        runner.experts_by_layer = [[] for _ in routers]
        for router, chosen in zip(routers.values(), runner.experts_by_layer, strict=True):
            router.set_capture_fn(lambda ids, chosen=chosen: chosen.append(ids.detach().to(torch.int32).clone()))
    return runner.experts_by_layer


def _by_request(layers: list[list[torch.Tensor]], names: list[str], step: Any) -> dict[str, tuple[int, np.ndarray]]:
    """{request: (first position, experts [n, layers, k])} of one step, whose rows lie in the order of the batch."""
    experts = np.stack([torch.cat(chosen).numpy() for chosen in layers], axis=1)
    cached = step.scheduled_cached_reqs
    start = {one.req_id: one.num_computed_tokens for one in step.scheduled_new_reqs}
    start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    out, at = {}, 0
    for name in names:
        count = step.num_scheduled_tokens[name]
        out[name] = (start[name], experts[at : at + count])
        at += count
    return out


if current_platform.is_cpu():
    _plain_matrices()
    _record_experts()
