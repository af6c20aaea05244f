"""From a command line to a ConfigDict. In: `--config NAME[:variant]` and `--config.block.field=value`. Out: the
config, or one line that names field, value and remedy; and a process whose JAX is ready. Knows no field's meaning."""
