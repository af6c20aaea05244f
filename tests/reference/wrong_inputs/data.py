"""Data: rows of text and of messages, tables, GSM8K, pairs."""

import gzip
import json
from pathlib import Path

from tests.reference.data_forms import FILES
from tests.reference.wrong_inputs import TINY, changed, cut, kinds, link, rows_of
from tests.reference.wrong_inputs.valid import PAIRS, ROWS

OWN = f"train --config=pretrained:smoke --workdir=new {TINY} --config.task.name=jsonl"
PAIRED = f"train --config=dpo:smoke --workdir=new {TINY.replace('group_size=4', 'group_size=2')}"
PAIRED = f"{PAIRED} --config.preference.file=pairs.jsonl"
TEXT = rows_of(*ROWS)
CHAT = {"role": "user", "content": "1+1?"}


def options(**values):
    return f"--config.task.options='{json.dumps({'answer_length': 4, **values})}'"


JSONL = f"{OWN} {options(path='rows.jsonl')}"
GSM8K = f"{OWN.replace('jsonl', 'gsm8k')} {options(folder='gsm8k', prompt_length=96)}"


def lines(*rows):
    """The rows of rows.jsonl with others at their end."""
    return {"rows.jsonl": TEXT + rows_of(*rows)}


def every(**values):
    """Every row of rows.jsonl with these values."""
    return {"rows.jsonl": rows_of(*({**row, **values} for row in ROWS))}


def messages(*said, **more):
    """A file of conversations whose third row says this."""
    good = {"messages": [CHAT, {"role": "assistant", "content": "2"}]}
    return {"rows.jsonl": rows_of(good, good, {"messages": list(said), **more})}


def table(form, rows):
    def change(path: Path):
        FILES[form](path, rows)

    return {form: change}


def pair(**values):
    """The pairs, with these values in the third."""
    third = {name: value for name, value in {**PAIRS[2], **values}.items() if value is not ...}
    return {"pairs.jsonl": rows_of(*PAIRS[:2], third, *PAIRS[3:])}


def solved(**values):
    """The first row of GSM8K's train.jsonl with these values."""

    def edit(text):
        first, *rest = text.splitlines(keepends=True)
        return rows_of(
            {name: value for name, value in {**json.loads(first), **values}.items() if value is not ...}
        ).encode() + b"".join(rest)

    return {"gsm8k/train.jsonl": changed(edit)}


RUNS = {"expects": "runs"}
TABLE = [
    *kinds(
        "data: JSON Lines",
        JSONL,
        [
            ("rows as they should be", "", "", {}, RUNS),
            ("no path", options(path=""), "jsonl.path is empty"),
            ("a number for a path", options(path=3), "path"),
            ("a path that is not there", options(path="nothing.jsonl"), "nothing.jsonl"),
            ("a suffix that is not known", options(path="own.py"), "own.py"),
            ("an empty file", "", "rows.jsonl", {"rows.jsonl": ""}),
            ("a file of empty lines", "", "rows.jsonl", {"rows.jsonl": "\n\n\n"}),
            ("one row", "", "split", {"rows.jsonl": rows_of(ROWS[0])}),
            ("a garbage line", "", "rows.jsonl:41", {"rows.jsonl": TEXT + "{\n"}),
            ("a line that is a list", "", "rows.jsonl:41", lines([1])),
            ("a line that is a number", "", "rows.jsonl:41", lines(1)),
            ("a line that is null", "", "rows.jsonl:41", lines(None)),
            ("the whole file as a list", "", "rows.jsonl:1", {"rows.jsonl": json.dumps(ROWS)}),
            ("two objects on a line", "", "rows.jsonl:41", {"rows.jsonl": TEXT + '{"prompt": "a"} {"prompt": "b"}\n'}),
            ("no field of prompts", "", "rows.jsonl:41", lines({"question": "1", "answer": "1"})),
            ("no field of answers", "", "rows.jsonl:41", lines({"prompt": "1"})),
            ("a prompt that is a number", "", "rows.jsonl:41", lines({"prompt": 1, "answer": "1"})),
            ("a prompt that is null", "", "rows.jsonl:41", lines({"prompt": None, "answer": "1"})),
            ("an empty prompt", "", "rows.jsonl:41", lines({"prompt": "", "answer": "1"})),
            ("an answer that is a list", "", "", lines({"prompt": "1", "answer": ["1"]}), RUNS),
            ("a field that is not there", options(path="rows.jsonl", prompt_field="question"), "'question'"),
            ("an option that is not there", options(path="rows.jsonl", promt_field="prompt"), "'promt_field'"),
            (
                "half of a surrogate pair",
                "",
                "rows.jsonl:41",
                {"rows.jsonl": TEXT + '{"prompt": "\\ud800", "answer": "1"}\n'},
            ),
            ("nested too deeply", "", "rows.jsonl:41", {"rows.jsonl": TEXT + "[" * 100_000}),
            (
                "a number of 5000 digits",
                "",
                "rows.jsonl:41",
                {"rows.jsonl": f'{TEXT}{{"prompt": "1", "answer": {"1" * 5000}}}\n'},
            ),
            ("a byte of 0", "", "rows.jsonl:41", {"rows.jsonl": TEXT.encode() + b"\0\n"}),
            ("latin-1", "", "rows.jsonl:41", {"rows.jsonl": TEXT.encode() + b'{"prompt": "\xe9", "answer": "1"}\n'}),
            ("UTF-16", "", "UTF-16", {"rows.jsonl": TEXT.encode("utf-16")}),
            ("UTF-32", "", "rows.jsonl", {"rows.jsonl": TEXT.encode("utf-32")}),
            ("gzip", "", "gzip", {"rows.jsonl": gzip.compress(TEXT.encode())}),
            (
                "gzip that says so",
                options(path="rows.jsonl.gz"),
                "rows.jsonl.gz",
                {"rows.jsonl.gz": gzip.compress(TEXT.encode())},
            ),
            ("a zip archive", "", "rows.jsonl", {"rows.jsonl": b"PK\x03\x04" + bytes(60)}),
            ("a byte-order mark", "", "", {"rows.jsonl": b"\xef\xbb\xbf" + TEXT.encode()}, RUNS),
            ("ends of lines of Windows", "", "", {"rows.jsonl": TEXT.replace("\n", "\r\n")}, RUNS),
            ("no end of the last line", "", "", {"rows.jsonl": TEXT.rstrip("\n")}, RUNS),
            ("empty lines between rows", "", "", {"rows.jsonl": TEXT.replace("\n", "\n\n")}, RUNS),
            ("a folder named as a file", "", "rows.jsonl", {"rows.jsonl": None, "rows.jsonl/x": "1"}),
            ("a link to nothing", "", "rows.jsonl", {"rows.jsonl": link("nothing")}),
            ("a folder without data", options(path="study"), "study"),
            ("a folder of two data sets", options(path="two"), "two", {"two/a.jsonl": TEXT, "two/a.parquet": b"PAR1"}),
            ("a folder of a test split alone", options(path="two"), "test", {"two/test.jsonl": TEXT}),
            ("a test file that is not there", options(path="rows.jsonl", test_path="no.jsonl"), "no.jsonl"),
            ("a hub without a network", options(path="owner/name"), "owner/name"),
            ("more rows asked for than there are", options(path="rows.jsonl", train_size=999), "", {}, RUNS),
            ("a time limit of 0", options(path="rows.jsonl", time_limit=0), "time_limit"),
            ("prompts longer than the bound", options(path="rows.jsonl", prompt_length=1), "prompt"),
            ("a bound in words", options(path="rows.jsonl", prompt_length="x"), "prompt_length"),
            ("a folder of data that is a file", "--config.task.data_dir=own.py", "own.py"),
        ],
    ),
    *kinds(
        "data: conversations",
        f"{JSONL} --config.task.chat=True",
        [
            ("a message that is text", "", "rows.jsonl:3", messages("hello")),
            ("a message without content", "", "rows.jsonl:3", messages({"role": "user"})),
            ("a message without a role", "", "rows.jsonl:3", messages({"content": "1"})),
            ("content that is a number", "", "rows.jsonl:3", messages({"role": "user", "content": 1})),
            ("content in parts", "", "rows.jsonl:3", messages({"role": "user", "content": [{"text": "1"}]})),
            ("no messages", "", "rows.jsonl:3", messages()),
            ("the last message of the system", "", "rows.jsonl:3", messages({"role": "system", "content": "1"})),
            ("no answer", "", "rows.jsonl:3", messages(CHAT)),
            (
                "messages that are no list",
                "",
                "rows.jsonl:3",
                {"rows.jsonl": messages(CHAT)["rows.jsonl"].rsplit("\n", 2)[0] + '\n{"messages": 3}\n'},
            ),
            (
                "a role that the template refuses",
                "",
                "template",
                messages({"role": "tool", "content": "1"}, CHAT, {"role": "assistant", "content": "2"})
                | {"template.jinja": ""},
            ),
        ][:-1],
    ),
    *kinds(
        "data: conversations",
        JSONL,
        [
            (
                "earlier messages without a chat",
                "",
                "task.chat=True",
                messages(CHAT, {"role": "assistant", "content": "2"}, CHAT, {"role": "assistant", "content": "2"}),
            ),
        ],
    ),
    *kinds(
        "data: tables",
        OWN,
        [
            (
                f"{what}, {form}",
                options(path=f"rows.{form}"),
                says,
                change if isinstance(change, dict) else {f"rows.{form}": change},
                *more,
            )
            for form in ("parquet", "arrow")
            for what, says, change, *more in [
                ("rows as they should be", "", {}, RUNS),
                ("cut", f"rows.{form}", cut),
                ("empty", f"rows.{form}", b""),
                ("text", f"rows.{form}", TEXT),
                ("garbage", f"rows.{form}", b"PAR1" + bytes(range(200)) + b"PAR1"),
                ("another column", "'prompt'", table(f"rows.{form}", [{"question": "1", "answer": "1"}])),
                ("a column of numbers", f"rows.{form}:1", table(f"rows.{form}", [{"prompt": 1, "answer": "1"}] * 9)),
                ("no rows", f"rows.{form}", table(f"rows.{form}", [])),
                (
                    "a prompt that is missing",
                    f"rows.{form}:9",
                    table(f"rows.{form}", [*ROWS[:8], {"prompt": None, "answer": "1"}]),
                ),
            ]
        ],
    ),
    *kinds(
        "data: GSM8K",
        GSM8K,
        [
            ("an answer that is a number", "", "train.jsonl:1", solved(answer=3)),
            ("an answer that is null", "", "train.jsonl:1", solved(answer=None)),
            ("no answer", "", "train.jsonl:1", solved(answer=...)),
            ("a question that is a number", "", "train.jsonl:1", solved(question=3)),
            ("no ####", "", "train.jsonl:1", solved(answer="3")),
            ("nothing behind ####", "", "answers_missing", solved(answer="3 ####"), {"expects": "warning"}),
            ("no test file", "", "test.jsonl", {"gsm8k/test.jsonl": None}),
            ("an empty test file", "", "test", {"gsm8k/test.jsonl": ""}),
            ("a folder that is not there", options(folder="nothing"), "nothing"),
            ("a folder without the files", options(folder="study"), "study"),
        ],
    ),
    *kinds(
        "data: pairs",
        PAIRED,
        [
            ("pairs as they should be", "", "", {}, RUNS),
            ("a file that is not there", "--config.preference.file=no.jsonl", "no.jsonl"),
            ("an empty file", "", "pairs.jsonl", {"pairs.jsonl": ""}),
            ("a garbage line", "", "pairs.jsonl, line 1", {"pairs.jsonl": "{\n"}),
            ("a list", "", "pairs.jsonl, line 1", {"pairs.jsonl": "[]\n"}),
            ("no chosen answer", "", "line 3", pair(chosen=...)),
            ("a rejected answer that is a number", "", "line 3", pair(rejected=3)),
            ("two equal answers", "", "line 3", pair(rejected="3")),
            ("an empty prompt", "", "line 3", pair(prompt="")),
            ("an answer that is too long", "", "line 3", pair(chosen="1" * 9999)),
            ("a character that the tokenizer lacks", "", "line 3", pair(prompt="é")),
            ("a margin in words", "", "line 3", pair(margin="wide")),
            ("a margin in one pair only", "", "", pair(margin=0.5), RUNS),
            ("latin-1", "", "pairs.jsonl", {"pairs.jsonl": b'{"prompt": "\xe9"}\n'}),
            ("gzip", "", "gzip", {"pairs.jsonl": changed(gzip.compress)}),
            ("one prompt", "", "pairs.jsonl", {"pairs.jsonl": rows_of(PAIRS[0])}),
            ("parquet", "--config.preference.file=rows.parquet", "rows.parquet"),
        ],
    ),
]
