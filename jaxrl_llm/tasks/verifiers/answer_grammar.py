r"""The grammar of answers: which part of a text is its answer, and which number that is.

A text answers with its last box (`\boxed{..}`, `\boxed 5`, `\fbox{..}`), else with what follows its last `####`, else
with what follows its last "answer is" or "answer:", else with its last formula between dollars or its last number. A
last box that is empty or not closed is no answer. A number is an exact fraction. Text of which a number is only a part
is none: `12, 13`, `3:30`, `2x`, `\frac{\sqrt{3}}{2}`.
"""

import collections
import re
import unicodedata
from fractions import Fraction
from typing import Any, NamedTuple

_READ = 4096  # characters: a longer box is no answer, and prose is read so far back from its last digit
_LONGEST = 300  # characters of a number with the words around it
_DIGITS = 60  # of a literal
_EXPONENT = 400

# A number. Every repetition is possessive or bounded, so that hostile text costs no more than its length.
_CURRENCY = "[$€£¥₹¤]"
_DECIMAL = (
    r"(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})++|(?:_\d{3})++|(?:'\d{3})++|(?: \d{3})++)(?!\d)|\d++)(?:\.\d++)?+|\.\d++)"
    r"(?:[eE][-+]?\d++)?+"
)
_PART = rf"(?:\{{ ?(?P<%s>[-+]? ?{_DECIMAL}) ?\}}|(?P<%s1>\d))"  # of \frac
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER = (
    rf"(?:(?<![\w)}}])(?P<sign>[-+]))?(?:{_CURRENCY} ?)?(?:"
    rf"(?:(?P<times>{_DECIMAL}) ?[*x] ?)?(?P<base>\d++)"
    r" ?\^ ?(?:(?P<power>[-+]?\d++)|[{(] ?(?P<power1>[-+]?\d++) ?[)}])"
    rf"|(?:(?P<whole>\d++) ?)?\\frac ?{_PART % ('top', 'top')} ?{_PART % ('bottom', 'bottom')}"
    r"|(?P<whole1>\d++) (?P<top2>\d{1,2})/(?P<bottom2>\d++)"
    rf"|(?P<left>{_DECIMAL})(?: ?/ ?(?P<right>[-+]?\d++))?)"
    rf"(?: (?P<scale>{'|'.join(_SCALES)})\b)?"
)

# What may stand beside a number that is the whole answer: words, units with exponents, a name with `=`, a sum before
# `=`, the letter of a choice. Words of mathematics may not, nor may a variable behind its coefficient.
_WORD = (
    r"(?!(?:pi|sqrt|root|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|and|or|plus|minus|times|over|divided|squared|cubed|"
    r"factorial|choose|infinity|not|than|hundred|[mbtr]illion|thousand)\b)[A-Za-z]{2,}+"
)
_UNIT = (
    r"(?:[mk]m/h|km/s|m/s|cm/s|mi/h|mph|[kcmdn]m|μm|[kmμ]g|m[lLsAV]|kW|kWh|[kM]?Hz|k?Pa|k?cal|[kM]J|ft|in|yd|lb|oz|hr|"
    r"h(?=ours?)|(?:hour|min|sec|inch|foot|feet|mile|meter|day)(?:e?s)?|st|nd|rd|th)(?![A-Za-z])"
)
_EXPONENTS = r"(?: ?\^ ?(?:-?\d|\{ ?-?\d ?\})|(?<=[a-z])[23](?!\d|[.,]\d))?+"
_LETTER = r"(?:[mgshLNJWVAKC]|\\Omega|\\mu)(?![A-Za-z])"
_UNITS = rf"(?: ?[*/]? ?(?:{_UNIT}|(?<=[ /*]){_LETTER}){_EXPONENTS})*+"
_PREFIX = (
    r"(?:(?:_\{?\w++\}?|\(\d+\)|[A-Za-z|∠\\ '().+])*+[=≈]|(?:,(?=\d)|[-\d.+*/() $%])*+=|\([A-Z]\)|"
    rf"{_WORD}(?:[ :,]|\. )*|{_CURRENCY}|[#*\"~: ])*+"
)
_BESIDE = rf" ?(?:%|°[CF]?|{_CURRENCY}|\([A-Za-z -]+\))|[ /*-] ?{_WORD}{_EXPONENTS}|[ $\"*,;:](?!\d)|\.(?![.\d])"
_SUFFIX = rf"(?:{_UNITS}(?:{_BESIDE}))*+{_UNITS}"
_WHOLE = re.compile(_PREFIX + _NUMBER + _SUFFIX)

# In prose the last formula between dollars counts (which touch it, as pandoc has it) or the last number. A digit that
# belongs to something else, such as a date, a sum or an exponent, is no number, and hides those before it.
_MATH = r"[^\s$](?:[^$\n]*[^\s$])?"
_SPAN = rf"\$(?P<span>{_MATH}(?:\$ (?:and|or) \${_MATH})*)\$(?!\d)"
_BEFORE = r"(?<![A-Za-zͰ-Ͽ\d_.^{/\\+*-])(?<![*/+] )(?<![\d)}] - )(?<!\W[a-z] - )(?<!\d:)(?<!\d[,'])"
_AFTER = r"(?![\d^_\\({]|\.\.| ?\^|[.,:/'*+-]\d| [*/+-] ?[\d\\(]|\*\*\d|[A-Za-z]| ?\\(?!(?:implies|R?r?ightarrow)\b))"
_READABLE = (
    rf"{_BEFORE}(?P<number>(?:[-\d][-\d.,+*/() ]* ?= ?)?{_NUMBER}(?: ?%)?)(?:{_LETTER}{_EXPONENTS})?+{_UNITS}{_AFTER}"
)
_ITEM = re.compile(rf"{_SPAN}|{_READABLE}|(?P<junk>\d)")
_LEADING = re.compile(
    r"[\s:*~≈=]*(?:(?:approximately|about|simply|just|exactly|therefore|thus|indeed|clearly|equal to) ?)*"
    rf"(?:{_SPAN}|{_READABLE})(?!(?: [a-z]+)? ?(?:[,;] ?(?:and|or)?|and|or) ?-?[\d$\\(])"
)

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_MARKER = re.compile(r"(?i:\banswer\b)\**(?:[^\n.:=]{0,60}?\bis\b|[ *]*[:=])[\s:*]*")
_CLAUSE = re.compile(r"(?:[^.\n,;]|[.,](?=\S)|,(?! (?!and|or)[a-z]{2}))*")
# What is a formula, or one word, without prose around it, in any script but that of Greek letters.
_PROSE = (
    r"(?<![\\A-Za-z])(?!and|or|sqrt|sin|cos|tan|log|exp)[A-Za-z]{3}|(?<= )(?!or)[a-z]{2} "
    r"|(?:(?![\x00-\x7fͰ-Ͽ])[^\W\d_]){2}"
)
_FORMULA = re.compile(rf"[A-Za-z]+|(?:(?!{_PROSE})[^\n])*[^!\n]")

_PLAIN: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<!\d)\ufffd+|\ufffd+(?!\d)", " "),  # half a character, which a byte-level model may write around a number
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])", ""),
        *2 * [(r"\\(?:text\w*|math(?:rm|bf|it|sf)|[mh]box|operatorname|emph)\s*\{([^{}]*)\}", r" \1 ")],
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r" ?\\(?:times|cdot|ast)(?![A-Za-z]) ?|[×·⋅∙]", "*"),
        (r"\\(?:approx|simeq)(?![A-Za-z])", "≈"),
        (r"\{,\}|,\\! ?", ","),
        (r"\\!", ""),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\\$", "¤"),
        (r"\\([-%_#&])", r"\1"),
        (r"(?:\\[(\[]|\$\$)\s*|\s*\\[)\]]", "$"),
        (r" ?\^? ?\{? ?\\circ ?\}?|\\degree", "°"),
        (r"\$(\^[^$]{1,6})\$", r"\1"),  # cm$^2$
        (r"(?<!\d)\*\*|\*\*(?!\d)", ""),  # markdown: bold, bullets
        (r"(?m)^ *[*+-] (?=.*[A-Za-z]{2})", ""),
        (r"(?:(?<=^)|(?<=[=≈$]))\s*([-+])\s+(?=[\d.\\(])", r"\1"),
        (r"(?<!\d )(?i:\b(?:negative|minus)) +(?=\d)", "-"),
        (r"[^\S\n]+", " "),
        (
            rf"(?<![\w)}}\]^_])(?:\( ?({_NUMBER}) ?\)|\{{ ?(?P<braced>[-\d.,]+) ?\}})(?! ?[\^\w])",  # (5), {5}
            lambda match: match[1] or match["braced"],
        ),
    ]
]
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁻]+")
_CHARACTERS = str.maketrans(dict.fromkeys("−–‐‑‒﹣－", "-") | {"⁄": "/", "∕": "/", "º": "°", "’": "'"})


class Answer(NamedTuple):
    """The answer in a text, and whether prose stands around it; the right side of an equation then counts."""

    text: str
    prose: bool


def final_answer(text: str) -> Answer | None:
    """Return what a text answers, or None. The cost is linear in the length of the text."""
    if box := _last(_BOX, text):
        content = _boxed(text[box.end() : box.end() + _READ])
        return Answer(content, prose=False) if content else None
    _, marker, rest = text.rpartition("####")
    if marker:
        line = plain(rest[:_READ].strip().partition("\n")[0])
        first = _ITEM.search(line)
        formula = _formula(_LEADING.match(line, first.start())) if first else None
        return Answer(formula or line, prose=True) if line else None
    if marked := _last(_MARKER, text):
        line = plain(text[marked.end() : marked.end() + _READ].partition("\n")[0])
        if formula := _formula(_LEADING.match(line)):
            return Answer(formula, prose=True)
        clause = _CLAUSE.match(line)
        if clause and _FORMULA.fullmatch(clause[0].strip()):
            return Answer(clause[0], prose=False)
    digit = re.match(r"(?s).*[\d$¼-¾⅐-⅞]", text)
    end = digit.end() if digit else len(text)
    written = plain(text[max(0, end - _READ) : end + 99])
    if _FORMULA.fullmatch(written) and "$" not in written[1:-1]:
        return Answer(written, prose=False)
    formula = _formula(_last(_ITEM, written))
    return Answer(formula or written, prose=bool(formula))


def number(text: str) -> Fraction | None:
    """Return the number that a text answers with, or None."""
    answer = final_answer(text)
    if answer is None:
        return None
    written = plain(answer.text)
    value = _whole(written)
    left, equals, right = written.rpartition("=")
    if value is None and answer.prose and equals and not re.search("[,;]", left):
        return _whole(right)
    return value


def gold_number(gold: str) -> Fraction | None:
    """Return the right answer as one number, or None: a list, a time, a radical or algebra is no number."""
    return _whole(plain(gold_answer(gold)))


def gold_answer(gold: str) -> str:
    """Return what a right answer says: the content of its box, what follows its `####`, else all of it."""
    answer = final_answer(gold)
    return "" if answer is None else gold if answer.prose and "####" not in gold else answer.text


def plain(text: str) -> str:
    """Write Unicode and the LaTeX of layout in plain characters: `25\\text{ cm}²` becomes `25 cm^{2}`."""
    text = ascii_of(text)
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text.strip()


def ascii_of(text: str) -> str:
    """Write digits, spaces, signs, fractions and exponents of Unicode as LaTeX in ASCII has them."""
    text = _SUPERSCRIPTS.sub(lambda run: f"^{{{run[0]}}}", text)
    return "".join(_character(c) for c in text).translate(_CHARACTERS)


def _character(character: str) -> str:
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    written = unicodedata.normalize("NFKC", character)
    return f" {written}" if "⁄" in written else written


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(collections.deque(pattern.finditer(text), maxlen=1)), None)


def _boxed(rest: str) -> str | None:
    """Return the content of a box, given the text behind its macro; None if the box does not end."""
    if not rest.startswith("{"):
        bare = re.match(r"(?:(?!\\[)\]])[^\s$])+", rest)
        return bare[0].rstrip(".,;") if bare else None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return rest[1 : brace.start()]
    return None


def _formula(item: re.Match[str] | None) -> str | None:
    return None if item is None else item["span"] or item["number"]


def _whole(text: str) -> Fraction | None:
    match = _WHOLE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        return None
    part = {name: re.sub("[,_' ]", "", digits) for name, digits in match.groupdict().items() if digits is not None}
    part = {name.rstrip("12"): digits for name, digits in part.items()}
    if max(map(len, part.values())) > _DIGITS or abs(int(part.get("power", 0))) > _EXPONENT:
        return None
    try:
        value = _value(part) * 10 ** _SCALES.get(part.get("scale", ""), 0)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if part.get("sign") == "-" else value


def _value(part: dict[str, str]) -> Fraction:
    if "base" in part:
        return _decimal(part.get("times", "1")) * Fraction(int(part["base"])) ** int(part["power"])
    if "top" in part:
        fraction = _decimal(part["top"]) / _decimal(part["bottom"])
        if "whole" in part and not 0 <= fraction < 1:
            raise ValueError("a product, or a mixed number")
        return int(part.get("whole", 0)) + fraction
    return _decimal(part["left"]) / int(part.get("right", 1))


def _decimal(digits: str) -> Fraction:
    _, _, exponent = digits.lower().partition("e")
    if abs(int(exponent or 0)) > _EXPONENT:
        raise ValueError(f"{digits:.80} is too large")
    return Fraction(digits)
