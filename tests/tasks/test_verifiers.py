import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import tasks
from jaxrl_llm.tasks.countdown import evaluate

SYNTHETIC = ["addition", "countdown", "modular", "sort", "subtraction"]
JUNK = ["", " ", "=", "0" * 5000, "9" * 5000, "(" * 5000, "\ufffd", "٣", "²", "1e9", "nan", "-", "--1", "1_0"]

CASES = [  # task, options, prompt, right answers, wrong answers
    (
        "sort",
        {},
        "3915062847=",
        ["0123456789"],
        ["123456789", "0123456789=", "00123456789", "9876543210", "0123456789 "],
    ),
    ("sort", {"digits": 3}, "707=", ["077"], ["77", "770", "0077", "707"]),
    ("addition", {}, "58+67=", ["521"], ["125", "5210", "52", "521=", "+521"]),
    ("addition", {"reverse": False}, "58+67=", ["125"], ["521", "0125", "125 ", "+125", "58+67"]),
    ("addition", {}, "999+1=", ["0001"], ["1", "1000", "00010"]),
    ("addition", {"spaced": True}, "58 + 67 =", ["521"], ["125", "521 ", " 521"]),
    ("subtraction", {}, "12-345=", ["-333"], ["333", "333-"]),
    ("subtraction", {}, "10-31=", ["-12"], ["-21", "12-", "--12"]),
    ("subtraction", {"reverse": False}, "10-31=", ["-21"], ["-12", "21", "- 21"]),
    ("subtraction", {}, "7-7=", ["0"], ["-0", "00", ""]),
    ("modular", {}, "(45*67)%97=", ["8"], ["08", "3015", "105", "-89"]),  # 3015 = 31 * 97 + 8
    ("modular", {}, "(3-5)%97=", ["95"], ["-2", "2"]),
    ("modular", {"modulus": 7}, "(6+1)%7=", ["0"], ["7", "", "00"]),
    (
        "countdown",
        {},
        "3,7,12:43=",
        ["12*3+7", "7+3*12", "(12*3)+7", "((7+((12)*3)))"],
        # another value; a number twice, missing or invented; division; a sign; a gap; an equation; unbalanced, empty ()
        "12+3*7 12*3+7+7-7 36+7 43 12*3+7/1 +7+12*3 12*3\t+7 12*3+7=43 (12*3+7 12*3+7) 12*3+()7 12*3+07 12*3+ "
        f"12**3+7 12(3)+7 12*3+7+{'9' * 200} {'(' * 130}12*3+7{')' * 130}".split(" "),
    ),
    ("countdown", {}, "5,5,10:10=", ["5-5+10", "10+5-5", "10-(5-5)"], ["10", "5+5", "5-(5+10)", "10-5-5"]),
]


@pytest.mark.parametrize(("name", "options", "prompt", "right", "wrong"), CASES)
def test_right_wrong_and_malformed_answers(name, options, prompt, right, wrong):
    task = tasks.make(name, **options)
    assert [task.verify(prompt, answer, "", {}) for answer in right] == [1.0] * len(right)
    assert [task.verify(prompt, answer, "", {}) for answer in wrong + JUNK] == [0.0] * len(wrong + JUNK)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_supervised_answers_are_right_and_fit(name):
    task = tasks.make(name)
    rng = np.random.default_rng(7)
    drawn = [task.sample(rng) for _ in range(300)]
    assert {task.verify(prompt, answer, "", {}) for prompt, answer in drawn} == {1.0}
    assert max(len(task.tokenizer.encode(prompt)) for prompt, _ in drawn) <= task.prompt_length
    assert max(len(task.tokenizer.encode(answer)) for _, answer in drawn) + 1 <= task.answer_length


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sort", {"digits": 64}),
        ("addition", {"digits": 18}),
        ("subtraction", {"digits": 2, "spaced": True}),
        ("subtraction", {"digits": 1}),
        ("modular", {"modulus": 2, "operators": "*"}),
        ("modular", {"modulus": 9999}),
        ("countdown", {"numbers": 2, "maximum": 2}),
        ("countdown", {"numbers": 6, "maximum": 999, "target_maximum": 9999}),
    ],
)
def test_options_at_their_bounds_fit_the_lengths(name, options):
    task = tasks.make(name, **options)
    rng = np.random.default_rng(3)
    for prompt, answer in [task.sample(rng) for _ in range(100)]:
        assert len(task.tokenizer.encode(prompt)) <= task.prompt_length
        assert len(task.tokenizer.encode(answer)) < task.answer_length
        assert task.verify(prompt, answer, "", {}) == 1.0


@pytest.mark.parametrize("name", ["sort", "addition", "subtraction", "modular"])
@given(data=st.data())
def test_only_the_one_right_text_is_rewarded(name, data):
    task = tasks.make(name)
    prompt, answer = task.sample(np.random.default_rng(data.draw(st.integers(0, 99))))
    edit = st.integers(0, len(answer)).flatmap(
        lambda i: st.sampled_from(["", *task.tokenizer.vocabulary]).map(lambda c: answer[:i] + c + answer[i + 1 :])
    )
    text = data.draw(st.one_of(edit, st.text(alphabet="0123456789+-*/()%= \n²٣")))
    assert task.verify(prompt, text, "", {}) == float(text == answer)


NUMBERS = ["3", "7", "12"]
LEAVES = st.permutations(NUMBERS)
REFUSED = [
    "",
    "3+7",
    "3+7*012",
    "3**7+12",
    "+3+7*12",
    "3-+7*12",
    "3(7)+12",
    "(3)(7)*12",
    "3+7*12)",
    "(3+7*12",
    "3+(7,12)",
]
REFUSED += [
    "3 +7*12",
    "3+7/12",
    "3+7*12+12",
    "37+12",
    "3+7*12*",
    "()+3+7*12",
    "3+7*12#",
    f"{'(' * 130}3+7*12{')' * 130}",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_sum_of_products_of_the_numbers_has_no_value(text):
    assert evaluate(text, NUMBERS) is None


@settings(max_examples=100)
@given(
    LEAVES, st.tuples(*[st.sampled_from("+-*")] * 2), st.sampled_from(["{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})"])
)
def test_well_formed_expressions_have_pythons_value(leaves, signs, shape):
    text = shape.format(leaves[0], signs[0], leaves[1], signs[1], leaves[2])
    assert evaluate(text, NUMBERS) == eval(text)


def test_a_chat_models_sum_is_read_from_its_sentence():
    task = tasks.make("addition", reverse=False, strict=False)
    sentences = ["58 + 67 = 125.", "The sum is 125", "125", "It is 126", "", "one hundred and twenty-five"]
    assert [task.verify("58+67=", text, "125", {}) for text in sentences] == [1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"addition\.strict=False reads numbers .* set addition\.reverse=False"):
        tasks.make("addition", strict=False)
