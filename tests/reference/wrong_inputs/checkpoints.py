"""Folders of published checkpoints and GGUF files."""

import json
import struct
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.reference.wrong_inputs import changed, cut, json_with, json_without, kinds

GENERATE = "generate --checkpoint=checkpoint --prompt='1+1=' --max-tokens=1"
CONFIG = "checkpoint/config.json"
WEIGHTS = "checkpoint/model.safetensors"
INDEX = "checkpoint/model.safetensors.index.json"


def config(**values):
    return {CONFIG: json_with(**values)}


def header(edit):
    """The weights with another header: edit(header, names)."""

    def change(content):
        length = struct.unpack("<Q", content[:8])[0]
        read = json.loads(content[8 : 8 + length])
        names = sorted(name for name in read if name != "__metadata__")
        edit(read, names)
        text = json.dumps(read).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return {WEIGHTS: changed(change)}


def tensors(edit):
    """The weights with other tensors: edit({name: array})."""

    def change(path: Path):
        arrays = safetensors.numpy.load_file(path)
        edit(arrays)
        safetensors.numpy.save_file(arrays, path)

    return {WEIGHTS: change}


def index(content):
    """The weights listed by an index; content(names) is the index."""

    def change(path: Path):
        names = sorted(safetensors.numpy.load_file(path.with_name("model.safetensors")))
        path.with_name("model.safetensors").rename(path.with_name("shard.safetensors"))
        path.write_text(json.dumps(content(names)))

    return {INDEX: change}


def first(value):
    def edit(arrays):
        name = min(arrays)
        arrays[name] = arrays[name].copy()
        arrays[name].flat[0] = value

    return edit


def renamed(arrays):
    arrays["other"] = arrays.pop(min(arrays))


def entry(**values):
    """The first entry of the header with these values; ... leaves one out."""

    def edit(read, names):
        read[names[0]] = {k: v for k, v in {**read[names[0]], **values}.items() if v is not ...}

    return edit


RUNS = {"expects": "runs"}
TABLE = [
    *kinds(
        "checkpoints: config.json",
        GENERATE,
        [
            ("a checkpoint as it should be", "", "", {}, RUNS),
            ("missing", "", "config.json", {CONFIG: None}),
            ("empty", "", "config.json", {CONFIG: ""}),
            ("a list", "", "config.json", {CONFIG: "[]"}),
            ("null", "", "config.json", {CONFIG: "null"}),
            ("cut", "", "config.json", {CONFIG: cut}),
            ("latin-1", "", "config.json", {CONFIG: b'{"a": "\xe9"}'}),
            ("UTF-16", "", "", {CONFIG: changed(lambda text: text.decode().encode("utf-16"))}, RUNS),
            ("nested too deeply", "", "config.json", {CONFIG: "[" * 100_000}),
            ("a folder", "", "config.json", {CONFIG: None, f"{CONFIG}/x": ""}),
            ("no model_type", "", "model_type", {CONFIG: json_without("model_type")}),
            ("another family", "", "model_type='mamba'", config(model_type="mamba")),
            ("model_type a list", "", "model_type", config(model_type=["qwen3"])),
            ("another family of the same names", "", "checkpoint", config(model_type="olmoe")),
            ("no hidden_size", "", "hidden_size", {CONFIG: json_without("hidden_size")}),
            ("hidden_size in words", "", "hidden_size", config(hidden_size="big")),
            ("hidden_size below 0", "", "hidden_size", config(hidden_size=-32)),
            ("another hidden_size", "", "config.json asks for", config(hidden_size=64)),
            ("hidden_size of 10^12", "", "hidden_size", config(hidden_size=10**12)),
            ("no heads", "", "num_attention_heads", config(num_attention_heads=0)),
            ("heads that do not divide", "", "num_key_value_heads", config(num_key_value_heads=3)),
            ("a fraction of a token", "", "vocab_size", config(vocab_size=1.5)),
            ("another vocabulary", "", "config.json asks for", config(vocab_size=7)),
            ("more layers than weights", "", "missing", config(num_hidden_layers=3)),
            ("fewer layers than weights", "", "left over", config(num_hidden_layers=1)),
            ("a million layers", "", "num_hidden_layers", config(num_hidden_layers=10**6)),
            ("rope_theta a list", "", "rope_theta", config(rope_theta=[1])),
            ("rope_scaling a list", "", "rope", config(rope_scaling=[1])),
            ("rope_scaling of another kind", "", "rope", config(rope_scaling={"rope_type": "yarn", "factor": 4})),
            ("rope_scaling without its numbers", "", "factor", config(rope_scaling={"rope_type": "llama3"})),
            ("rms_norm_eps null", "", "rms_norm_eps", config(rms_norm_eps=None)),
            ("a sliding window", "", "sliding", config(use_sliding_window=True, sliding_window=8)),
            ("another activation", "", "hidden_act", config(hidden_act="gelu")),
            ("a type that is not known", "", "dtype", config(dtype="int8", torch_dtype="int8")),
            ("tied embeddings that differ", "", "tie_word_embeddings", config(tie_word_embeddings=True)),
        ],
    ),
    *kinds(
        "checkpoints: weights",
        GENERATE,
        [
            ("missing", "", "model.safetensors", {WEIGHTS: None}),
            ("empty", "", "model.safetensors", {WEIGHTS: b""}),
            ("cut", "", "model.safetensors", {WEIGHTS: cut}),
            ("text", "", "model.safetensors", {WEIGHTS: "version https://git-lfs.github.com/spec/v1\noid x\n" * 9}),
            ("bytes more", "", "model.safetensors", {WEIGHTS: changed(lambda content: content + bytes(8))}),
            ("a header of 10^18 bytes", "", "model.safetensors", {WEIGHTS: struct.pack("<Q", 10**18)}),
            ("a header that is a list", "", "model.safetensors", {WEIGHTS: struct.pack("<Q", 2) + b"[]"}),
            ("a header nested too deeply", "", "safetensors", {WEIGHTS: struct.pack("<Q", 10**5) + b"[" * 10**5}),
            ("an entry that is a number", "", "safetensors", header(lambda read, names: read.update({names[0]: 3}))),
            ("an entry without dtype", "", "model.safetensors", header(entry(dtype=...))),
            ("an entry without offsets", "", "model.safetensors", header(entry(data_offsets=...))),
            ("an entry without shape", "", "model.safetensors", header(entry(shape=...))),
            ("a dtype that is not known", "", "F99", header(entry(dtype="F99"))),
            ("a dtype of 8 bits", "", "F8_E4M3", header(entry(dtype="F8_E4M3"))),
            ("a shape too large", "", "model.safetensors", header(entry(shape=[10**9, 10**9]))),
            ("a shape below 0", "", "model.safetensors", header(entry(shape=[-1, -4]))),
            ("a shape of fractions", "", "model.safetensors", header(entry(shape=[0.5, 2]))),
            ("offsets the wrong way round", "", "model.safetensors", header(entry(data_offsets=[64, 0]))),
            ("offsets behind the end", "", "model.safetensors", header(entry(data_offsets=[10**9, 10**9 + 4]))),
            (
                "tensors that share bytes",
                "",
                "share bytes",
                header(lambda read, names: read[names[1]].update(read[names[0]])),
            ),
            ("a tensor less", "", "missing", tensors(lambda arrays: arrays.pop(min(arrays)))),
            ("a tensor more", "", "left over", tensors(lambda arrays: arrays.update(more=np.ones(2, np.float32)))),
            ("a tensor of another name", "", "missing", tensors(renamed)),
            (
                "a tensor of another shape",
                "",
                "has shape",
                tensors(lambda arrays: arrays.update({min(arrays): np.ones((3, 3), np.float32)})),
            ),
            ("a weight that is NaN", "", "not finite", tensors(first(np.nan))),
            ("a weight that is infinite", "", "not finite", tensors(first(np.inf))),
            (
                "weights of whole numbers",
                "",
                "I32",
                tensors(lambda arrays: arrays.update({min(arrays): arrays[min(arrays)].astype(np.int32)})),
            ),
            ("pickled weights alone", "", "safetensors", {WEIGHTS: None, "checkpoint/pytorch_model.bin": b"\x80\x04"}),
            (
                "weights with an index",
                "",
                "",
                index(lambda names: {"weight_map": dict.fromkeys(names, "shard.safetensors")}),
                RUNS,
            ),
            ("an index without weight_map", "", "weight_map", index(lambda names: {"metadata": {}})),
            ("an index whose weight_map is a list", "", "weight_map", index(lambda names: {"weight_map": names})),
            ("an index that is a list", "", "index.json", index(lambda names: [])),
            ("an index cut", "", "index.json", index(lambda names: {}) | {INDEX: "{"}),
            (
                "an index with a file that is a number",
                "",
                "weight_map",
                index(lambda names: {"weight_map": dict.fromkeys(names, 1)}),
            ),
            (
                "an index with a file that is not there",
                "",
                "no.safetensors",
                index(lambda names: {"weight_map": dict.fromkeys(names, "no.safetensors")}),
            ),
            (
                "an index with a file of another folder",
                "",
                "weight_map",
                index(lambda names: {"weight_map": dict.fromkeys(names, "../shard.safetensors")}),
            ),
            (
                "an index with a tensor less",
                "",
                "",
                index(lambda names: {"weight_map": dict.fromkeys(names[1:], "shard.safetensors")}),
                RUNS,
            ),
            (
                "an index with a tensor more",
                "",
                "more",
                index(lambda names: {"weight_map": dict.fromkeys([*names, "more"], "shard.safetensors")}),
            ),
        ],
    ),
    *kinds(
        "checkpoints: GGUF",
        "generate --checkpoint=model.gguf --prompt='1+1=' --max-tokens=1",
        [
            ("a file as it should be", "", "", {}, RUNS),
            ("empty", "", "model.gguf", {"model.gguf": b""}),
            ("cut", "", "model.gguf", {"model.gguf": cut}),
            ("cut in its header", "", "model.gguf", {"model.gguf": changed(lambda content: content[:20])}),
            ("text", "", "model.gguf", {"model.gguf": "GGUF" * 20}),
            ("another version", "", "model.gguf", {"model.gguf": changed(lambda x: x[:4] + b"\x63\0\0\0" + x[8:])}),
            (
                "10^18 tensors",
                "",
                "model.gguf",
                {"model.gguf": changed(lambda x: x[:8] + struct.pack("<Q", 10**18) + x[16:])},
            ),
            (
                "10^18 fields",
                "",
                "model.gguf",
                {"model.gguf": changed(lambda x: x[:16] + struct.pack("<Q", 10**18) + x[24:])},
            ),
            (
                "another architecture",
                "",
                "architecture",
                {
                    "model.gguf": changed(
                        lambda x: x.replace(struct.pack("<Q", 5) + b"qwen3", struct.pack("<Q", 5) + b"mamba", 2)
                    )
                },
            ),
            (
                "no tokenizer",
                "",
                "model.gguf",
                {"model.gguf": changed(lambda x: x.replace(b"tokenizer.", b"tokenixer."))},
            ),
            ("another tokenizer", "", "tokenizer", {"model.gguf": changed(lambda x: x.replace(b"gpt2", b"bert"))}),
            (
                "a field less",
                "",
                "model.gguf",
                {"model.gguf": changed(lambda x: x.replace(b"qwen3.block_count", b"qwen3.block_c0unt"))},
            ),
            (
                "a tensor of another name",
                "",
                "model.embed_tokens.weight",
                {"model.gguf": changed(lambda x: x.replace(b"token_embd.weight", b"token_embx.weight"))},
            ),
        ],
    ),
]
