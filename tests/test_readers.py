"""Every reader of a file, on files that are not what they should be: only the declared errors, and they name the file.

A reader gets its folder with one file changed: to random bytes, to JSON of another shape, cut at any byte, or with one
byte changed. `python -m pytest tests/test_readers.py -m slow -s` tries many more and prints how often each was refused;
the changes are the same every time, and others with --hypothesis-seed=N.
"""

import collections
import copy
import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from jaxrl_llm import tasks
from jaxrl_llm.models import fingerprint
from jaxrl_llm.models.checkpoints.pretrained_config import from_published
from jaxrl_llm.models.checkpoints.published import open_checkpoint, read_published
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import checkpoint_identity, read_record
from jaxrl_llm.records.run_log import keep_rows, read_json, read_rows, scan_rows
from jaxrl_llm.records.writers import TensorBoard
from jaxrl_llm.report import read as report
from jaxrl_llm.report.samples import changes, failures
from jaxrl_llm.report.tables import arm_table, config_table
from jaxrl_llm.tasks.preference.pair_file import read_pairs
from jaxrl_llm.tasks.preference.pair_stream import PairEncoder
from jaxrl_llm.tasks.tokenizers.text_tokenizer import load_tokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer_files import write_tokenizer
from tests.reference.data_forms import FILES

DECLARED = (ValueError, OSError, ImportError)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def text(value):
    return json.dumps(value).encode()


def run_files(prefix=""):
    rows = [
        {"step": i, "reward/mean": i / 4, "load": [0.5, None], "clip/low": 0.1, "eval/greedy": 0.5} for i in range(3)
    ]
    samples = [{"step": i, "prompt": "1+1=", "greedy": "2", "reward": 1.0, "split": "test"} for i in range(2)]
    config = {"seed": 0, "objective": {"name": "grpo", "clip_low": 0.2}, "optimizer": {"schedule": "constant"}}
    config |= {"task": {"name": "sort"}, "warm_start": {}, "checkpoint": {"every": 2}}
    return {
        f"{prefix}metrics.jsonl": lines(*rows),
        f"{prefix}samples.jsonl": lines(*samples, {"step": 2, "prompt": "2+2=", "answer": "5", "reward": 0.0}),
        f"{prefix}config.json": text({"config": config, "config_hash": "ab", "commit": "0123", "cores": 2}),
        f"{prefix}result.json": text({"eval/greedy": 0.5}),
        f"{prefix}failed.json": text({"last_line": "not finite", "exit_code": 1}),
    }


def sweep_files():
    runs = [{"folder": arm, "arm": arm, "condition": "", "seed": 0} for arm in "AB"]
    plan = {"question": "?", "baseline": "A", "pairs": "runs", "runs": runs}
    return {"sweep.json": text(plan), **run_files("A/"), **run_files("B/")}


def branch_files():
    rows = [{"state": 1, "arm": "", "step": 0, "eval/greedy": 0.5}]
    rows += [{"state": 1, "arm": arm, "step": 1, "reward/mean": 0.5, "eval/greedy": 0.5} for arm in "AB"]
    runs = [{"folder": "0", "arm": arm, "condition": "", "seed": 0} for arm in "AB"]
    plan = {"question": "?", "baseline": "A", "branching": {"first": 1, "every": 1, "rollouts": 1}, "runs": runs}
    return {"sweep.json": text(plan), "0/branches.jsonl": lines(*rows), **run_files("0/")}


def checkpoint_files():
    config = {"model_type": "qwen3", "vocab_size": 4, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "head_dim": 4}
    config |= {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}, "dtype": "float32", "mlp_only_layers": []}
    shards = {f"model-{i}.safetensors": save({f"t{i}": np.ones((3, 2), np.float32)}) for i in range(2)}
    index = {"metadata": {}, "weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(2)}}
    return {"config.json": text(config), "model.safetensors.index.json": text(index), **shards}


def gguf_files():
    gguf = pytest.importorskip("gguf")
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(f"{folder}/x.gguf", "qwen3")
        for add, value in (
            (writer.add_block_count, 1),
            (writer.add_context_length, 48),
            (writer.add_embedding_length, 8),
            (writer.add_feed_forward_length, 8),
            (writer.add_head_count, 2),
            (writer.add_head_count_kv, 1),
            (writer.add_key_length, 4),
            (writer.add_rope_freq_base, 1e4),
            (writer.add_layer_norm_rms_eps, 1e-6),
            (writer.add_tokenizer_model, "gpt2"),
            (writer.add_tokenizer_pre, "smollm"),
            (writer.add_token_list, ["<e>", "a", "b", "ab"]),
            (writer.add_token_merges, ["a b"]),
            (writer.add_eos_token_id, 0),
        ):
            add(value)
        writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
        writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 8), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {"x.gguf": Path(folder, "x.gguf").read_bytes()}


def tokenizer_files():
    pytest.importorskip("tokenizers")
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder, ["a b"], vocab_size=260)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | {"config.json": text({"eos_token_id": [2, 0], "model_type": "qwen3"})}


def table_files(form):
    with tempfile.TemporaryDirectory() as folder:
        FILES[form](Path(folder, form), [{"prompt": f"{i}+1=", "answer": i, "more": [1, None]} for i in range(4)])
        return {form: Path(folder, form).read_bytes()}


def payload_files():
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, {"a": jnp.ones(2)}, {"config_hash": "abc"})
        checkpoints.close()
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def event_files():
    with tempfile.TemporaryDirectory() as folder:
        board = TensorBoard(Path(folder))
        board.metrics(1, {"a": 1.0, "b": [1.0, 2.0]})
        board.close()
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def read_checkpoint(folder):
    place = next(folder.glob("*.gguf"), folder)
    fingerprint(place)
    from_published(read_published(place).config, None, place)
    with open_checkpoint(place) as (_, tensors):
        for tensor in tensors.values():
            tensor.rows(0, tensor.shape[0] if tensor.shape else 1)


def read_run(folder):
    run = report.Run(folder, "A")
    read_study(report.Study("", [run], "A"))
    changes(run)
    failures(run, 4)


def read_study(study):
    study.damaged()
    for condition in study.conditions:
        arm_table(study, condition)
    config_table(study)
    for run in study.runs:
        assert run.status
        for row in run.rows:
            for key in row.keys() - {"arm", "failed"}:
                run.series(key)


def read_dir(folder):
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows, damaged = scan_rows(folder / name)
        assert all(type(row["step"]) is int for _, row in rows)
        keep_rows(folder / name, lambda row: row["step"] <= 1)
        assert (folder / f"{name}.damaged").exists() == bool(damaged)
        assert all(row["step"] <= 1 for row in read_rows(folder / name))
    read_json(folder / "result.json")
    read_record(folder)


def read_task(name, **options):
    task = tasks.make(name, **options)
    task.source.fingerprint()
    for draws in task.source.read().values():
        assert all(isinstance(part, str) for draw in draws for part in draw[:2])


QA = [{"prompt": "1+1=", "answer": "2", "more": [1, {"a": None}]}, {"prompt": "2+2=", "answer": 4}]
CONVERSATIONS = [
    {"messages": [{"role": role, "content": "1"} for role in ("system", "user", "assistant")], "answer": i}
    for i in range(2)
]
PAIRS = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "x", "margin": 0.5} for i in range(3)]
SOLVED = [{"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}]

# Name -> (its files, what reads them).
READERS = {
    "a DIR": (run_files, read_dir),
    "a run for the report": (run_files, read_run),
    "a sweep for the report": (sweep_files, lambda folder: read_study(report.load(folder))),
    "branches for the report": (branch_files, lambda folder: read_study(report.load(folder))),
    "a checkpoint's payload": (payload_files, checkpoint_identity),
    "event files": (event_files, lambda folder: TensorBoard(folder).cut(0)),
    "a published checkpoint": (checkpoint_files, read_checkpoint),
    "a GGUF checkpoint": (gguf_files, read_checkpoint),
    "a GGUF tokenizer": (gguf_files, lambda folder: load_tokenizer(folder / "x.gguf")),
    "a tokenizer": (tokenizer_files, load_tokenizer),
    "questions": (
        lambda: {"qa.jsonl": lines(*QA)},
        lambda folder: read_task("jsonl", path=str(folder / "qa.jsonl")),
    ),
    "conversations": (
        lambda: {"train.jsonl": lines(*CONVERSATIONS), "test.jsonl": lines(*CONVERSATIONS)},
        lambda folder: read_task("jsonl", path=str(folder)),
    ),
    "a table of parquet": (
        lambda: table_files("rows.parquet"),
        lambda folder: read_task("jsonl", path=str(folder / "rows.parquet")),
    ),
    "a table of arrow": (
        lambda: table_files("rows.arrow"),
        lambda folder: read_task("jsonl", path=str(folder / "rows.arrow")),
    ),
    "GSM8K": (
        lambda: {"train.jsonl": lines(*SOLVED), "test.jsonl": lines(*SOLVED)},
        lambda folder: read_task("gsm8k", folder=str(folder)),
    ),
    "pairs": (
        lambda: {"pairs.jsonl": lines(*PAIRS)},
        lambda folder: read_pairs(folder / "pairs.jsonl", PairEncoder(tasks.ByteTokenizer(), 64, 64)),
    ),
}

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10**20)
    | st.floats()
    | st.text(max_size=5)
    | st.just("\ud800")
    | st.just(10**400)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def of_another_shape(draw, content):
    """A JSON file, or a line of a .jsonl file, with one value in it replaced or left out."""
    try:
        parts = (
            [json.loads(line) for line in content.splitlines()] if content.count(b"\n") > 1 else [json.loads(content)]
        )
    except ValueError:
        try:
            parts = [json.loads(content)]
        except ValueError:  # no JSON file
            return draw(st.binary(max_size=40))
    whole = copy.deepcopy(parts)
    inside, key = whole, draw(st.sampled_from(range(len(whole))))
    while isinstance(inside[key], dict | list) and inside[key] and draw(st.integers(0, 3)):
        inside = inside[key]
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
    if isinstance(inside, dict) and draw(st.booleans()):
        del inside[key]
    else:
        inside[key] = draw(VALUES)
    return lines(*whole)


def one_byte(content, at, bit):
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :] if at < len(content) else content


@st.composite
def changed(draw, files):
    """(name of the file, its content): every kind of change is as likely as the others."""
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    kind = draw(st.sampled_from(["bytes", "shape", "cut", "flip", "gone"]))
    if kind == "bytes":
        start = draw(st.sampled_from([b"", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1f\x8b", b"[" * 100_000, content[:8]]))
        return name, start + draw(st.binary(max_size=40))
    if kind == "shape":
        return name, draw(of_another_shape(content))
    at = draw(st.integers(0, min(len(content), 64)) | st.integers(0, len(content)))
    if kind == "cut":
        return name, content[:at]
    return name, None if kind == "gone" else one_byte(content, at, draw(st.integers(0, 7)))


def tried(reader, examples, config):
    """How often the reader gave something, and how often it raised each declared error."""
    make, read = READERS[reader]
    files, counts = make(), collections.Counter()

    @settings(
        max_examples=examples,
        derandomize=config.getoption("--hypothesis-seed") is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(files))
    def check(change):
        name, content = change
        with tempfile.TemporaryDirectory() as folder:
            for other, own in files.items():
                place = Path(folder, other)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(own)
            if content is None:
                Path(folder, name).unlink()
            else:
                Path(folder, name).write_bytes(content)
            said = None
            try:
                read(Path(folder))
            except DECLARED as error:
                said = error
            counts["read" if said is None else type(said).__name__] += 1
            assert said is None or folder in str(said) or Path(name).name in str(said), f"{name}: {said!r}"

    check()
    return counts


@pytest.mark.parametrize("reader", READERS)
def test_only_declared_errors_that_name_the_file(reader, pytestconfig):
    tried(reader, 20, pytestconfig)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_the_same_many_times(reader, pytestconfig):
    print(f"\n{reader}: {dict(tried(reader, 1000, pytestconfig))}")
