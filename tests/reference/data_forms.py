"""The same rows in every form that data come in, one file or folder each."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet


def json_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(file, rows):
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)


def stream(file, rows):
    """Arrow as `datasets` saves it."""
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def arrow_file(file, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


FILES = {"rows.jsonl": json_lines, "rows.parquet": parquet, "rows.arrow": stream, "file.arrow": arrow_file}


def written(folder, files):
    """The folder with these files, {path: rows}, each in the form that its suffix says; other content is text."""
    for name, content in files.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            file.write_text(content)
        else:
            {".jsonl": json_lines, ".parquet": parquet, ".arrow": stream}[file.suffix](file, content)
    return str(folder)
