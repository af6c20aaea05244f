"""Identity of a teacher: that of a DIR's newest checkpoint or of a published one, or what a server calls its model."""

from pathlib import Path
from typing import Any

from jaxrl_llm import models
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.records.recorded import checkpoint_identity
from jaxrl_llm.run.teacher_settings import is_served

_SERVED = ByName({"served_model": "jaxrl_llm.rollout.scoring_server"})


def is_run(path: str) -> bool:
    """True for the DIR of a run, whose config.json has a hash."""
    record = Path(path) / "config.json"
    return record.is_file() and "config_hash" in json_object(record, "bring it back from a copy")


def teacher_identity(path: str) -> Any:
    """[step, digest] of a DIR's newest checkpoint, the fingerprint of a published one, or a server's name for its
    model; of A,B a list of both.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: the server does not answer.
    """
    if "," in path:
        return [teacher_identity(one) for one in path.split(",")]
    if path == "self":
        return path
    if is_served(path):
        return _SERVED["served_model"](path)[0]
    try:
        return list(checkpoint_identity(path)) if is_run(path) else models.fingerprint(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"teacher.path={path}: {error}; give the DIR of a run, or a checkpoint") from error
