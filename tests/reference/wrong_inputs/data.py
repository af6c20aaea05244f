"""Data through the real command, one kind of each form: what a reader refuses is in the tests of tests/tasks."""

import gzip
import json

from tests.reference.wrong_inputs import TINY, changed, kinds, rows_of
from tests.reference.wrong_inputs.valid import PAIRS, ROWS

OWN = f"train --config=pretrained:smoke --workdir=new {TINY} --config.task.name=jsonl"
PAIRED = f"train --config=dpo:smoke --workdir=new {TINY.replace('group_size=4', 'group_size=2')}"
PAIRED = f"{PAIRED} --config.preference.file=pairs.jsonl"
TEXT = rows_of(*ROWS)


def options(**values):
    return f"--config.task.options='{json.dumps({'answer_length': 4, **values})}'"


GSM8K = f"{OWN.replace('jsonl', 'gsm8k')} {options(folder='gsm8k', prompt_length=96)}"
NO_MARK = changed(lambda content: content.replace(b"####", b""))
RUNS = {"expects": "runs"}
TABLE = [
    *kinds(
        "data",
        f"{OWN} {options(path='rows.jsonl')}",
        [
            ("rows as they should be", "", "", {}, RUNS),
            ("a garbage line", "", "rows.jsonl:41", {"rows.jsonl": TEXT + "{\n"}),
            ("gzip", "", "gzip", {"rows.jsonl": gzip.compress(TEXT.encode())}),
            ("a byte-order mark", "", "", {"rows.jsonl": b"\xef\xbb\xbf" + TEXT.encode()}, RUNS),
            ("prompts longer than the bound", options(path="rows.jsonl", prompt_length=1), "prompt"),
        ],
    ),
    *kinds("data", OWN, [("a table", options(path="rows.parquet"), "", {}, RUNS)]),
    *kinds(
        "data", GSM8K, [("no ####", "", "test.jsonl:1", {"gsm8k/test.jsonl": changed(lambda x: x.replace(b"#", b""))})]
    ),
    *kinds(
        "data",
        PAIRED,
        [
            ("pairs as they should be", "", "", {}, RUNS),
            ("two equal answers", "", "line 1", {"pairs.jsonl": rows_of({**PAIRS[0], "rejected": "1"}, *PAIRS[1:])}),
        ],
    ),
]
