"""python -m tests.reference.asking_process SERVER FILE [--coordinator ... --processes N --process I]

One process of those that ask a server the questions of tests.reference.vllm_answers: it takes the weights of a model
that is cut over the devices of all, and saves the trajectory as each of them has it (FILE.I.npz), or what went wrong
(FILE.I.txt).
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.models import Model
from jaxrl_llm.training.in_flight import as_arrays
from tests.reference.vllm_answers import LENGTHS, MODEL, PROMPTS, UIDS, engine


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("server", "file", "--coordinator", "--processes", "--process"):
        parser.add_argument(name)
    given = parser.parse_args()
    jax.distributed.initialize(given.coordinator, int(given.processes), int(given.process))
    mesh = sharding.make_mesh((1, -1, 1, 1))
    model = Model(dataclasses.replace(MODEL.config), mesh)
    params = model.init_sharded(jax.random.key(0))
    out = f"{given.file}.{given.process}"
    own = engine(given.server, model=model, rows_on=mesh)
    try:
        held, moved = own.take_weights(params, 0)
        t = own.generate(held, PROMPTS, LENGTHS, UIDS, jax.random.key(0))
    except ValueError as error:
        Path(f"{out}.txt").write_text(str(error))
    else:
        np.savez(f"{out}.npz", handshake=moved["rollout/handshake"], **processes.fetch(as_arrays(t)))
    processes.wait_for_all("asking_process")


if __name__ == "__main__":
    main()
