"""vllm_launch.py ARGUMENTS of `vllm`: with this folder's extensions, until the process that started it is gone.

The starter holds the other end of the standard input. When that closes, however the starter ended, the server ends as
by SIGTERM, so that its shared memory goes too, and what is left of its process group a while later.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false
import os
import runpy
import shutil
import signal
import sys
import threading
import time

_OPTIONS = [
    "--skip-tokenizer-init",
    "--tokens-only",
    "--enforce-eager",
    "--no-enable-prefix-caching",  # what is cached belongs to the weights of before
    "--worker-extension-cls=vllm_worker.Extension",
    "--logprobs-mode=processed_logprobs",  # of the distribution that was sampled from
]


_PATIENCE_S = 15


def _end_with_the_starter() -> None:
    while os.read(0, 4096):
        pass
    if weights := os.environ.get("JAXRL_LLM_WEIGHTS"):
        shutil.rmtree(weights, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the new one needs Triton
        # A prompt that is fed in parts draws a token that is dropped, which a seed on CPU cannot take back: the engine
        # would end with "CPU Generator does not use offset".
        own = ["--scheduler-cls=vllm_worker.RoutesScheduler", "--no-enable-chunked-prefill"]
    else:
        own = ["--enable-return-routed-experts"]
    sys.argv = ["vllm", *sys.argv[1:], *_OPTIONS, *own]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
