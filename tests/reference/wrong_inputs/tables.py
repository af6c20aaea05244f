"""All kinds."""

from tests.reference.wrong_inputs import checkpoints, command_lines, data, folders, machine, own_files

TABLES = [kind for module in (command_lines, own_files, data, checkpoints, folders, machine) for kind in module.TABLE]
