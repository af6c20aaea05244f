"""vllm_launch.py ARGUMENTS of `vllm`: with this folder's extensions, until the process that started it is gone.

The starter holds the other end of the standard input. When that closes, however the starter ended, the server ends as
by SIGTERM, so that its shared memory goes too, and what is left of its process group a while later.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false
import argparse
import atexit
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time

_OPTIONS = [
    "--skip-tokenizer-init",
    "--tokens-only",
    "--enforce-eager",
    "--worker-extension-cls=vllm_worker.Extension",
    "--middleware=vllm_guard.Guard",
    "--logprobs-mode=processed_logprobs",  # of the distribution that was sampled from
]


_PATIENCE_S = 15


def _end_with_the_starter() -> None:
    while os.read(0, 4096):
        pass
    for folder in ("JAXRL_LLM_WEIGHTS", "JAXRL_LLM_RECEIVED"):
        if weights := os.environ.get(folder):
            shutil.rmtree(weights, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


def _check_host(arguments: list[str]) -> None:
    """End the program where other machines could replace the weights without a token."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="")
    host = parser.parse_known_args(arguments)[0].host
    if host not in ("127.0.0.1", "::1", "localhost") and not os.environ.get("JAXRL_LLM_TOKEN"):
        sys.exit(
            f"error: --host={host} lets other machines replace the weights; set JAXRL_LLM_TOKEN to a secret, here and "
            "where the run is started, or give --host=127.0.0.1"
        )


def _own_folder() -> None:
    """A folder for weights that come over HTTP, which goes with the server."""
    folder = tempfile.mkdtemp(prefix="jaxrl-llm-received-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.environ["JAXRL_LLM_RECEIVED"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def main() -> None:
    _check_host(sys.argv)
    _own_folder()
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the new one needs Triton
        # A prompt that is fed in parts draws a token that is dropped, which a seed on CPU cannot take back: the engine
        # would end with "CPU Generator does not use offset".
        own = ["--scheduler-cls=vllm_worker.RoutesScheduler", "--no-enable-chunked-prefill"]
    else:
        own = ["--enable-return-routed-experts"]
    if "--enable-prefix-caching" not in sys.argv:
        own += ["--no-enable-prefix-caching"]
    sys.argv = ["vllm", *sys.argv[1:], *_OPTIONS, *own]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
