"""Every tokenizer as tokenizer.json: the same ids here, in transformers, and after it was read back."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm.run.tokenizer_files import tokenizer_files
from jaxrl_llm.tasks import ByteTokenizer, CharTokenizer, load_tokenizer

pytest.importorskip("tokenizers")
CHARACTERS = CharTokenizer("0123456789+-= é<>|endpa")
CORPUS = ["12 + 30 = 42", "naïve 😀 <|im_end|> x"]


def written(tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def all_three(tmp_path_factory):
    """[(tokenizer, read back, as transformers reads it), ...]: characters, bytes, a trained BPE."""
    folder = tmp_path_factory.mktemp("files")
    trained = write_tokenizer(folder / "trained", CORPUS, 300)
    ours = [CHARACTERS, ByteTokenizer(), trained]
    places = [written(one, folder / str(i)) for i, one in enumerate(ours)]
    theirs = pytest.importorskip("transformers").AutoTokenizer
    return [
        (one, load_tokenizer(place), theirs.from_pretrained(place)) for one, place in zip(ours, places, strict=True)
    ]


def same_ids(tokenizer, back, theirs, text):
    ids = tokenizer.encode(text)
    assert back.encode(text) == theirs.encode(text, add_special_tokens=False) == ids
    if not set(ids) & set(tokenizer.end_ids):
        assert back.decode(ids) == tokenizer.decode(ids) == text
    assert back.end_ids == tokenizer.end_ids


@given(text=st.text(alphabet=CHARACTERS.vocabulary.replace("|", "")))  # "<|end|>" is the end's own name
def test_characters(all_three, text):
    same_ids(*all_three[0], text)


@given(text=st.text())
def test_bytes(all_three, text):
    same_ids(*all_three[1], text)


@given(text=st.text() | st.sampled_from(CORPUS))
def test_a_trained_one(all_three, text):
    same_ids(*all_three[2], text)


def test_end_ids_and_template_are_kept(all_three, tmp_path):
    trained, back, theirs = all_three[2]
    chat = [{"role": "user", "content": "1 + 1?"}]
    assert back.fingerprint == trained.fingerprint
    assert back.chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert json.loads(tokenizer_files(trained)["generation_config.json"])["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("tokenizer", [CHARACTERS, ByteTokenizer()], ids=["characters", "bytes"])
def test_files_need_the_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers; pip install 'jaxrl_llm\[hf\]'"):
        tokenizer_files(tokenizer)


def test_a_tokenizer_of_ones_own_has_no_such_files():
    class Mine:
        end_ids, pad_id, vocab_size, fingerprint = (1,), 0, 2, "mine"

        def encode(self, text):
            return [0] * len(text)

        def decode(self, ids):
            return ""

    with pytest.raises(ValueError, match=r"Mine has no tokenizer\.json"):
        tokenizer_files(Mine())
