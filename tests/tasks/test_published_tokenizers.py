"""A prompt is token for token what transformers' AutoTokenizer makes of it, for folders of every form."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.tasks import Prompting, load_tokenizer
from jaxrl_llm.tasks.preference import PairEncoder, read_pairs

pytest.importorskip("transformers")
from tests.reference.published_tokenizers import PUBLISHED, Published, config, sentencepiece

DAY = "2024-02-03"
TEXTS = [
    "The quick brown fox",
    " leading",
    "Hello  world\n\n",
    "",
    "naïve café ½ 日本 😀 \u200b",
    "it's 12,345.67",
    "a <left> b <right> c Word Words café <tool>",
    "<think> [user] </think>",
]
USER = {"role": "user", "content": "Hello world <b>&'\" naïve"}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": " The fox. "}, {"role": "user", "content": "the\nlast"}],
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """{name: (ours, transformers')}, each read once."""
    from transformers import AutoTokenizer

    root, found = tmp_path_factory.mktemp("published"), {}

    def read(name):
        if name not in found:
            folder = PUBLISHED[name].write(root / name)
            theirs = AutoTokenizer.from_pretrained(folder)
            if (folder / "chat_template.json").is_file():  # AutoProcessor alone reads it
                theirs.chat_template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
            found[name] = load_tokenizer(folder, DAY), theirs
        return found[name]

    return read


@pytest.fixture
def that_day(monkeypatch):
    """The clock of transformers' templates in this process; ours are rendered in another."""
    import datetime

    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DAY)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_text(both, name):
    """transformers' ids, without what it appends: an end before the answer."""
    ours, theirs = both(name)
    appended = len(PUBLISHED[name].post.partition("$A")[2].split())
    for text in TEXTS:
        whole = theirs(text).input_ids
        assert Prompting().ids(ours, text) == whole[: len(whole) - appended]
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert len(theirs) == ours.vocab_size


@pytest.mark.parametrize("name", PUBLISHED)
def test_chats(both, that_day, name):
    ours, theirs = both(name)
    for chat in CHATS:
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            for generate in (True, False):
                text = ours.chat(chat, add_generation_prompt=generate, **options)
                whole = dict(add_generation_prompt=generate, **options)
                assert text == theirs.apply_chat_template(chat, tokenize=False, **whole)
                ids = theirs.apply_chat_template(chat, return_dict=False, **whole)
                assert Prompting(chat=True).encode(ours, text) == ids
    asked = Prompting(chat=True, system="Be brief.", chat_options={"enable_thinking": False})
    told = [{"role": "system", "content": "Be brief."}, USER]
    expected = theirs.apply_chat_template(told, return_dict=False, add_generation_prompt=True, enable_thinking=False)
    assert asked.ids(ours, USER["content"]) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_end_ids_begin_with_the_tokenizers_own(both, name):
    ours, theirs = both(name)
    files = PUBLISHED[name].files
    published = [files.get(file, {}).get("eos_token_id") for file in ("generation_config.json", "config.json")]
    listed = next((ids if isinstance(ids, list) else [ids] for ids in published if ids is not None), [])
    own = [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    assert list(ours.end_ids) == list(dict.fromkeys([*own, *listed]))


def test_the_first_word_keeps_its_mark_behind_bos(both):
    """By hand: <s> is 1; Metaspace puts its mark before the first word of a text, and Llama 2's normalizer too."""
    for name in ("metaspace first", "llama 2"):
        ours, _ = both(name)
        ids = Prompting().ids(ours, "The")
        assert ids == [1, ours.backend.token_to_id("▁The")]
    ours, _ = both("metaspace never")
    assert Prompting().ids(ours, "The") == [1, ours.backend.token_to_id("The")]


def test_no_bos_twice_and_no_end_before_the_answer(both):
    ours, theirs = both("BOS and EOS appended")
    assert theirs("The").input_ids[-1] == 2  # transformers would end the text
    assert Prompting("<s>{prompt}").ids(ours, "") == [1]
    begun = Prompting("<s>[INST] {prompt}").ids(ours, "The")
    assert begun[0] == 1
    assert begun.count(1) == 1
    assert 2 not in begun


def test_the_export_of_each_reads_the_same(both, tmp_path):
    from transformers import AutoTokenizer

    from jaxrl_llm.run.tokenizer_files import tokenizer_files

    for number, name in enumerate(PUBLISHED):
        ours, _ = both(name)
        folder = tmp_path / str(number)
        folder.mkdir()
        for file, content in tokenizer_files(ours).items():
            (folder / file).write_bytes(content)
        theirs, back = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, DAY)
        for text in TEXTS:
            assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
            assert Prompting().ids(back, text) == Prompting().ids(ours, text)
        assert back.end_ids == ours.end_ids
        assert back.chat(CHATS[1]) == ours.chat(CHATS[1])


def test_a_folder_never_touches_the_network(tmp_path, monkeypatch):
    folder = PUBLISHED["additional templates"].write(tmp_path)

    def refuse(*_):
        raise AssertionError("the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert load_tokenizer(folder).end_ids == (2,)


def test_a_special_token_that_nobody_numbered_gets_no_row_beyond_the_model(tmp_path):
    """transformers would give it the next number, for which the model has no row."""
    from transformers import AutoTokenizer

    files = {"tokenizer_config.json": config("{{ pad_token }}", bos_token="<s>", eos_token="</s>", pad_token="<pad>")}
    folder = Published(sentencepiece, files, "<s> $A").write(tmp_path)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert theirs.pad_token_id == len(theirs) - 1 == ours.vocab_size
    assert ours.encode_plain("The fox") == theirs("The fox").input_ids
    assert max(ours.encode("a <pad>")) < ours.vocab_size
    assert ours.chat([USER]) == "<pad>"


CODE = "import pathlib\npathlib.Path(r'{}').touch()\nclass Own:\n    pass\n"


def with_code(folder, known):
    """A folder whose configs name classes in files of its own; known: its tokenizer_class is one of transformers."""
    own = {"AutoTokenizer": [None, "own.Own"], "AutoConfig": "own.Own"}
    own_config = config("x", bos_token="<s>", eos_token="</s>", auto_map=own)
    own_config["tokenizer_class"] = "PreTrainedTokenizerFast" if known else "Own"
    files = {"tokenizer_config.json": own_config, "config.json": {"model_type": "own", "auto_map": own}}
    files["own.py"] = CODE.format(folder / "ran")
    return Published(sentencepiece, files).write(folder)


def test_code_of_a_folder_is_never_run(tmp_path):
    with pytest.raises(ValueError, match=r"asks for code of its own \(auto_map\), which is never run: remove auto_map"):
        load_tokenizer(with_code(tmp_path / "own", known=False))
    assert load_tokenizer(with_code(tmp_path / "known", known=True)).end_ids == (2,)
    assert not list(tmp_path.rglob("ran"))


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; .*save_pretrained\(FOLDER\)"):
        load_tokenizer(tmp_path)
    folder = PUBLISHED["llama 2"].write(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers; pip install 'jaxrl_llm\[hf\]'"):
        load_tokenizer(folder)


@pytest.mark.slow
def test_transformers_is_imported_for_published_tokenizers_alone():
    code = (
        "import sys\nfrom jaxrl_llm.run.settings import validate\n"
        "from jaxrl_llm.config import loading\nvalidate(loading.load(loading.find('grpo:smoke'), []))\n"
        "assert not {'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_pairs_of_a_file_begin_as_their_kind_does(both, tmp_path):
    """A text with the tokenizer's BOS and the mark of its first word, a chat as its template writes it."""
    ours, theirs = both("metaspace first, template without BOS")
    told = [{"role": "user", "content": "The fox"}]
    chat = {"chosen": [*told, {"role": "assistant", "content": "a"}]}
    chat["rejected"] = [*told, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "The fox", "chosen": "a", "rejected": "b"}, chat]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = PairEncoder(ours, 40, 8)
    read = read_pairs(tmp_path / "pairs.jsonl", encoder, render=ours.chat)
    plain, rendered = sorted([*read.train, *read.test], key=lambda pair: pair["uid"])
    assert encoder.ids("prompt", plain) == theirs("The fox").input_ids
    expected = theirs.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    assert encoder.ids("prompt", rendered) == expected
    assert expected[0] != 1 == encoder.ids("prompt", plain)[0]
