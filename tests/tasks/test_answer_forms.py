"""What counts as the right answer: forms in which models write numbers and mathematics, and hostile text."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.tasks.verifiers import exact, gold_number, number, numeric, verifier
from jaxrl_llm.tasks.verifiers.named_verifiers import MathVerifier
from tests.tasks.formula_spellings import FORMULAS
from tests.tasks.further_spellings import FURTHER
from tests.tasks.spellings import SPELLINGS

# answer, gold, right by `numeric`, right by `math` (None: not asked, where reading it either way is defensible)
FORMS = [
    # plain
    ("42", "42", 1, 1), ("42.", "42", 1, 1), (" 42\n", "42", 1, 1), ("42.0", "42", 1, 1), ("042", "42", 1, 1),
    ("43", "42", 0, 0), ("4 2", "42", 0, 0), ("422", "42", 0, 0),
    ("42 is the answer", "42", 1, 1), ("So x = 42", "42", 1, 1), ("**42**", "42", 1, 1), ("(42)", "42", 1, None),
    ("answer:42", "42", 1, None), ("42!", "42", 1, None), ("=42", "42", 1, 1), ("x=42,", "42", 1, 1),
    # negatives
    ("-5", "-5", 1, 1), ("−5", "-5", 1, None), ("–5", "-5", 1, None), ("5", "-5", 0, 0), ("-5", "5", 0, 0),
    ("12-5", "5", 0, None), ("12 - 5 = 7", "7", 1, 1), ("- 5 apples", "5", 1, None), ("it is -5.", "-5", 1, 1),
    ("(-5)", "-5", 1, None), ("$-5$", "-5", 1, 1), ("-0", "0", 1, 1), ("3 to -4", "-4", 1, None),
    # thousands and decimals
    ("1,234", "1234", 1, 1), ("1234", "1,234", 1, 1), ("1,234,567", "1234567", 1, 1), ("1,234.50", "1234.5", 1, 1),
    ("1{,}234", "1234", 1, None), (r"1\,234", "1234", 1, None), ("1,23", "23", 0, None), ("12,34", "1234", 0, None),
    ("1,234", "1.234", 0, 0), ("0.5", ".5", 1, None), (".5", "0.5", 1, 1), ("0.50", "0.5", 1, 1),
    ("3.14", "3.14", 1, 1), ("3.14", "3.15", 0, 0), ("3.14159", "3.14", 0, 0), ("2.", "2", 1, 1),
    ("1e3", "1000", 1, None), ("1.5e-1", "0.15", 1, None), ("2E2", "200", 1, None), ("100,000", "100000", 1, 1),
    # fractions
    ("3/4", "3/4", 1, 1), ("3/4", "0.75", 1, 1), ("0.75", "3/4", 1, 1), ("6/8", "3/4", 1, 1), ("4/3", "3/4", 0, 0),
    ("1 3/4", "7/4", 1, None), ("-3/4", "-0.75", 1, 1), ("3 / 4", "0.75", 1, None), ("1/0", "1", 0, 0),
    ("3⁄4", "0.75", 1, None), ("10/2", "5", 1, 1),
    # LaTeX
    (r"\frac{3}{4}", "3/4", 1, 1), (r"\dfrac{3}{4}", "0.75", 1, None), (r"\tfrac34", "3/4", 1, None),
    (r"$\frac{3}{4}$", "3/4", 1, 1), (r"-\frac{1}{2}", "-0.5", 1, 1), (r"$-\frac12$", "-1/2", 1, 1),
    (r"1\frac{1}{2}", "3/2", 1, None), (r"\frac{1}{0}", "0", 0, None),
    (r"$\boxed{42}$", "42", 1, 1), (r"\boxed{-7}", "-7", 1, 1),
    (r"\boxed{7} and not 8", "7", 1, 1), (r"8 or \boxed{7}", "7", 1, 1), (r"\boxed{1} then \boxed{2}", "2", 1, None),
    (r"\boxed{x = 5}", "5", 1, 1),
    (r"\[ 42 \]", "42", 1, 1), (r"\(42\)", "42", 1, 1), ("$$42$$", "42", 1, 1), (r"\boxed{1,234}", "1234", 1, 1),
    (r"\boxed{42 \text{ km}}", "42", 1, 1), (r"\boxed{43}", "42", 0, 0), (r"$x = \frac{10}{4}$", "2.5", 1, 1),
    # units, currency, percent
    ("$42.00", "42", 1, 1), (r"\$42", "42", 1, None), ("-$5", "-5", 1, None),
    ("€ 42", "42", 1, None),
    ("£1,000", "1000", 1, None), ("42 km", "42", 1, 1), ("42km", "42", 1, None), ("42 cm", "42", 1, 1),
    ("50%", "50", 1, None), ("50%", "50%", 1, 1), ("50", "50%", 1, None), ("50 %", "50", 1, None),
    (r"50\%", "50%", 1, 1), ("42 dollars", "42", 1, 1), ("42°", "42", 1, None), ("3 apples", "3", 1, 1),
    ("$3.50/day", "3.5", 1, None), ("5-day", "5", 1, None),
    # several answers
    ("12 + 30 = 42", "42", 1, 1), ("first 41, then 42", "42", 1, None), ("42, no: 43", "42", 0, None),
    ("41\n#### 42", "42", 1, None), ("#### 42 of 50", "42", 1, None),
    ("#### none", "42", 0, 0), ("Step 1: 2. Step 2: 42", "42", 1, None),
    # half a character, as a model of bytes writes it
    ("42\ufffd", "42", 1, 1), ("\ufffd 42", "42", 1, 1), ("\\boxed{42\ufffd}", "42", 1, 1), ("4\ufffd2", "42", 0, 0),
    ("-\ufffd42", "42", 0, 0), ("\ufffd", "42", 0, 0),
    # none
    ("none", "42", 0, 0), ("forty-two", "42", 0, 0), ("?", "42", 0, 0), ("...", "0", 0, 0),
    ("inf", "42", 0, 0),
    ("1" * 5000, "1", 0, None),
    # prose in other scripts; a digit behind a Greek letter is its index
    ("答案是 42", "42", 1, 1), ("答案是42。", "42", 1, 1), ("答案是42。", "2", 0, 0), ("42 яблока", "42", 1, 1),
    ("ответ: 42", "42", 1, 1), ("所以 x = 42 米", "42", 1, 1), ("θ2", "2", 0, 0),
    # what only `math` reads
    (r"$\sqrt{4}$", "2", None, 1), ("$2x + 1$", "1 + 2x", None, 1), (r"$\{1, 2\}$", r"\{2, 1\}", None, 1),
    ("$x^2 - 1$", "(x-1)(x+1)", None, 1), (r"$\pi/2$", r"\frac{\pi}{2}", None, 1), ("$(1, 2)$", "(1, 2)", None, 1),
    ("$(2, 1)$", "(1, 2)", None, 0), (r"$2\pi$", r"\pi", None, 0),
    (r"$\frac{\sqrt{2}}{2}$", r"\frac{1}{\sqrt{2}}", None, 1),
]  # fmt: skip


ALL = [*FORMS, *SPELLINGS, *FORMULAS, *FURTHER]


def test_no_spelling_stands_twice():
    assert len({form[:2] for form in ALL}) == len(ALL) > 450


def wrong(verify, column):
    asked = [form for form in ALL if form[column] is not None]
    return [form for form in asked if verify("", form[0], form[1], {}) != form[column]]


def test_numeric():
    assert wrong(numeric, 2) == []


def test_math():
    """In this process, where nothing here hangs; the worker's limit is tested in test_verifier_pool."""
    pytest.importorskip("math_verify")
    verify, isolated = verifier("math")
    assert isinstance(verify, MathVerifier)
    assert isolated
    verify.load()
    assert wrong(verify, 3) == []


def test_numbers_are_read_alike():
    """`numeric` and `math` agree wherever the right answer and the answer are numbers."""
    both = [form for form in ALL if gold_number(form[1]) is not None and number(form[0]) is not None]
    assert len(both) > 150
    assert [form for form in both if None not in form and form[2] != form[3]] == []


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        ("42", 42), (r"\boxed{42}", 42), ("She has 6 * 7 = 42.\n#### 42", 42), ("42 apples", 42), ("x = 42", 42),
        (r"25\text{ cm}^2", 25), (r"\frac{-3}{4}", Fraction(-3, 4)), ("The sum is 5.", 5), ("12, 13", None),
        ("3:30", None), (r"\frac{\sqrt{3}}{2}", None), ("x^3+1", None), ("x + y = 5", 5), ("x - y = 5", None),
        ("3x - y = 0", None), ("B", None), ("", None), (r"\boxed{4", None), ("12 or 13", None), ("MATH_v2", None),
        ('{"ground_truth": "31", "style": "rule-lighteval/MATH_v2"}', None), ('["4", "5"]', None),
    ],
)  # fmt: skip
def test_a_right_answer_is_one_number_or_none(gold, value):
    assert gold_number(gold) == value


def test_exact():
    assert [exact("", answer, "42", {}) for answer in ("42", " 42\n", "42.0", "4 2", "", "42 km")] == [1, 1, 0, 0, 0, 0]
    assert exact("", "a  b", "a b", {}) == 0
    as_a_users_own, isolated = verifier("jaxrl_llm.tasks.verifiers:exact")
    assert isolated
    assert as_a_users_own("", " 42\n", "42", {}) == 1


HOSTILE = st.text(
    alphabet=st.one_of(st.sampled_from("0123456789.,-+/%$\\{}()eE#boxedfrac \n−⁄"), st.characters()), max_size=300
)


@settings(max_examples=500, deadline=None)
@given(HOSTILE)
def test_numeric_reads_any_text(text):
    assert numeric("", text, "42", {}) in (0.0, 1.0)
    assert exact("", text, text, {}) == 1.0


@settings(max_examples=300, deadline=None)
@given(st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6), HOSTILE)
def test_a_boxed_fraction_is_read_whatever_stands_before_it(value, noise):
    written = f"{value.numerator}/{value.denominator}"
    assert number(f"{noise} \\boxed{{{written}}}") == value


@settings(max_examples=300, deadline=None)
@given(st.integers(-(10**30), 10**30))
def test_integers_in_every_spelling(value):
    for text in (f"{value}", f"{value:,}", f"so {value}.", f"${value}$", f"{value:,}.00", f"#### {value:,}\nnot 7"):
        assert number(text) == Fraction(value)


PIECES = [
    "9",
    "1,111",
    "-",
    "1 ",
    r"\frac{",
    "{",
    r"\boxed{",
    " ",
    "1 1/",
    "1.",
    r"\frac1",
    "1e",
    "$",
    "#",
    "1,1",
    "$ ",
]
PIECES += ["* ", "answer is ", "\n", "(1", "x=", "½", "a ", "and ", "$1$ and ", "minus 1 ", r"\text{", "1^", "1 000 "]


@pytest.mark.parametrize("before", ["", "#### ", r"\boxed{"])
@pytest.mark.parametrize("piece", PIECES)
def test_long_hostile_text_costs_no_more_than_its_length(piece, before):
    began = time.process_time()
    number(before + piece * 100_000)
    assert time.process_time() - began < 0.5


def test_an_answer_of_ten_megabytes_is_read_from_its_end():
    began = time.process_time()
    assert number(r"\boxed{5}" + "so it is " * 1_200_000) == 5
    assert number("It is 5. " + "So it is. " * 1_000_000) == 5
    assert number("9" * 10_000_000) is None
    assert time.process_time() - began < 5
