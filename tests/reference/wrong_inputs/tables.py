"""All kinds."""

from tests.reference.wrong_inputs import (
    checkpoints,
    command_lines,
    data,
    fields,
    folders,
    machine,
    own_files,
    tokenizer_files,
)

_OF = (command_lines, fields, own_files, data, checkpoints, tokenizer_files, folders, machine)
TABLES = [kind for module in _OF for kind in module.TABLE]
