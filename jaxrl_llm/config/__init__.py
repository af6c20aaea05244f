"""From a command line to a ConfigDict. In: `--config NAME[:variant]` and `--config.block.field=value`. Out: the config,
or one line that names field, value and remedy, and the exit code (guard.py, around every command). start_up.py readies
the process: JAX's cache, malloc, other hosts. Knows no field's meaning: run/ declares blocks and fields."""
