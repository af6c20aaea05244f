"""python -m jaxrl_llm.main --config configs/gspo.py[:variant] --workdir DIR [--config.block.field=value ...]"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl_llm import provenance
from jaxrl_llm.opening import closing, finished
from jaxrl_llm.run_log import RunLog
from jaxrl_llm.settings import config_hash, validate
from jaxrl_llm.trainer import train

__all__ = ["main"]

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/, with :variant.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's DIR; the same command on the same DIR resumes.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; fields are set as --config.block.field=value")
    logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO
    try:
        workdir = str(_WORKDIR.value)
        settings, identity = validate(_CONFIG.value), config_hash(_CONFIG.value)
        provenance.start_jax()
        provenance.check_dir(workdir, identity)
        if reached := finished(workdir):
            print(f"{reached}\n{closing(workdir)}")
            return 0
        with RunLog(workdir, settings.steps, write=provenance.is_first_host(), wandb=settings.log.wandb) as log:
            log.write_config(provenance.describe(_CONFIG.value.to_dict(), identity))
            log.result(train(settings, log, identity))
            log.screen.end(closing(workdir))
    except KeyboardInterrupt as error:
        print(f"\n{error or 'stopped'}; the same command resumes from the newest checkpoint in {_WORKDIR.value}")
        return 130
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> list[str]:
    """Read the flags; a field that the config lacks is one line instead of ml_collections' traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:
        inner = error.args[0]  # a KeyError, whose own text is escaped
        text = inner.args[0] if isinstance(inner, Exception) else inner
        print(f"error: --config has no field {text}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
