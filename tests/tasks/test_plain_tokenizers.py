import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.tasks import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=")


def test_ids_follow_the_vocabulary_after_padding_and_eos():
    assert TOKENIZER.vocab_size == 14
    assert (TOKENIZER.pad_id, TOKENIZER.end_ids[0]) == (0, 1)
    assert TOKENIZER.encode("09+=") == [2, 11, 12, 13]


@given(st.text(alphabet="0123456789+="), st.lists(st.integers(0, 20)))
def test_round_trip_whatever_follows_eos(text, rest):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode([*TOKENIZER.encode(text), TOKENIZER.end_ids[0], *rest]) == text


@given(st.lists(st.integers(0, 20)))
def test_decoding_loses_no_token_before_eos(ids):
    before = ids[: ids.index(1)] if 1 in ids else ids
    text = TOKENIZER.decode(ids)
    assert len(text) == len(before)
    assert [c == "\ufffd" for c in text] == [not 2 <= i < 14 for i in before]


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"character '-' at position 1 of '1-2'.*vocabulary='0123456789\+='"):
        TOKENIZER.encode("1-2")


def test_a_negative_id_is_an_error():
    with pytest.raises(ValueError, match="token id -1 is negative"):
        TOKENIZER.decode([2, -1])


@pytest.mark.parametrize("vocabulary", ["", "0120", "01\ufffd"])
def test_a_vocabulary_holds_each_character_once(vocabulary):
    with pytest.raises(ValueError, match="vocabulary="):
        CharTokenizer(vocabulary)
