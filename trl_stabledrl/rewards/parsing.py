# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

r"""
From a completion to the answer it states.

An answer is looked for in this order: the last `<answer>` block, the last `\boxed{}`, what follows the last `####`,
what follows the last "the answer is", the last number. A tag or a box that opens and never closes is an unfinished
answer, and nothing earlier stands in for it.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from .._text import last_boxed

__all__ = ["completion_text", "extract_answer", "extract_number", "find_numbers", "last_boxed", "marked_answer"]

# An answer longer than this is not one; the limit also bounds the work hostile input can ask for.
_MAX_ANSWER_CHARS = 400
_MAX_DIGITS = 50
_TAIL_CHARS = 2000

_OPEN, _CLOSE = "<answer>", "</answer>"
_STATED = re.compile(r"\banswer\s{0,5}(?:\bis\b|:|=)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=\S)[.!?](?=\s|$)")
_INLINE_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")

# [0-9] throughout: \d also matches the digits of other scripts
_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.])(?P<sign>-))?(?:\$\s?)?(?P<inner_sign>(?<=\$)-)?(?<![\w.])"
    r"(?:(?P<whole>[0-9]+)\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<number>(?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    rf"(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}})(?![0-9]))?(?:\s?/\s?(?P<denominator>{_THOUSANDS}|[0-9]+))?)"
)
# What turns the digits before it into something else: a power, a clock time, a list without spaces, a foreign digit, a
# factor such as x, k, \pi or "thousand". A letter right behind may also be a unit: 72m.
_NOT_A_NUMBER_BEFORE = re.compile(
    r"\d|\s*\^|\s*\*\*\s*[\d(]|[:.,/]\d"
    r"|(?![gmhslLCF](?![A-Za-z]))(?:[A-Za-z]|[a-cknx-z]{2,3})(?![A-Za-z])|\s{1,3}[xyzkKMB](?![\w'])"
    r"|\s{0,3}(?:hundred|thousand|million|billion|trillion)s?\b"
    r"|\s{0,3}\+\s{0,3}[A-Za-z\\(]|\s{0,3}-\s{0,3}[b-z](?![\w'])|\*[a-z](?![\w'])"
    r"|\s{0,3}\\(?:pi|sqrt|left|frac|log|ln|sin|cos|tan|binom|theta|alpha|beta|mathbb|pm|mp)(?![a-z])"
)
# What makes the digits behind it part of another expression: \sqrt{144}, \sqrt[3]{8}, 2^{10}, f(2), x + 72
_NOT_A_NUMBER_AFTER = re.compile(
    r"(?:\\(?!(?:approx|boxed|fbox|quad|qquad|left|therefore|implies|Rightarrow|rightarrow|to|displaystyle|equiv|times"
    r"|cdot|div|begin|end|par|newline|item)(?![A-Za-z]))[A-Za-z]{1,20}\s?(?:\[[^\]]{0,5}\])?\s?[{(]?"
    r"|[\^_]\s?\{|\}\{|\u221a\s?[({]?|\b(?:sqrt|log|ln|exp|sin|cos|tan|floor|ceil|[fgh])\(|\\[A-Za-z]{1,20}\["
    r"|(?<![\w'])[A-Za-z]\s{0,3}[-+*/]\s{0,3})-?\Z"
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boldsymbol|bm|operatorname)\s{0,3}\{([^{}]{0,200})\}"
)
_UNIT_POWER = re.compile(r"(?<![A-Za-z\\])([A-Za-z]{2,20}|m)\s?\^\s?(?:[23](?![0-9])|\{\s?[23]\s?\})")
_DEGREE_SIGN = re.compile(r"(?<=[0-9])\s?\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-z]))")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9])\s{0,3}(?:\\times|\\cdot|[*x\u00d7\u00b7\u22c5\u2217])\s{0,3}10\s?(?:\^|\*\*)\s?"
    r"(?:\{\s?([-+]?[0-9]{1,2})\s?\}|\(([-+]?[0-9]{1,2})\)|([-+]?[0-9]{1,2})(?![0-9]))"
)
_FRACTION_PART = r"\{\s?(-?)\s?([0-9][0-9,.]{0,49})\s?\}"
_FRACTION = re.compile(rf"(-?)\s?\\frac\s?{_FRACTION_PART}\s?{_FRACTION_PART}")
_SIGN_APART = re.compile(r"(?:(?<==)\s{0,3}|\A([\s$(\[{*]{0,9}))-\s{1,3}(?=[0-9.$])")
_SPACED_THOUSANDS = re.compile(
    "(?<![\\w.,][ \u00a0\u2009\u202f])(?<![\\w.,])[0-9]{1,3}(?:[ \u00a0\u2009\u202f~][0-9]{3}){1,10}(?![\\w/]| ?[0-9])"
)
_ARITHMETIC = re.compile(r"(?:[-+*/().,$0-9\s\u00d7\u00f7\u00b7\u2212]|\\(?:times|cdot|div)|x(?=\s?[0-9])){1,200}")
_HEDGE = re.compile(r"[0-9]\S*\s+(?:or|maybe|perhaps|possibly)\s+(?:[a-z]+\s+){0,3}\S*[0-9]")


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """
    Text of a completion in either of TRL's two forms.

    Args:
        completion (`str` or `list[dict]`):
            Plain text, or chat messages, of which the last one counts. Its content is a string, a list of content
            blocks of which the text ones are joined, or `None` or absent, as in a tool call.

    Returns:
        `str`:
            The text.
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    content = completion[-1].get("content")  # a tool call has none
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text") or "" for block in content if block.get("type") == "text")


def marked_answer(text: str) -> str | None:
    r"""
    Content of the last `<answer>` block or, without one, of the last `\boxed{}`.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `str` or `None`:
            The content, stripped, without the box it may be wrapped in; `""` where the block or box never closes;
            `None` where the text has neither.
    """
    opened = text.rfind(_OPEN)
    if opened < 0:
        return last_boxed(text)
    closed = text.find(_CLOSE, opened)
    if closed < 0:
        return ""
    block = text[opened + len(_OPEN) : closed]
    boxed = last_boxed(block)
    return block.strip() if boxed is None else boxed


def _stated_answers(text: str) -> list[str]:
    """What follows the last `####` and the last "answer is", in that order, each to the end of its sentence."""
    stated = []
    hashes = text.rfind("####")
    if hashes >= 0:
        stated.append(text[hashes + 4 : hashes + 4 + _MAX_ANSWER_CHARS].strip().split("\n", 1)[0])
    phrase = None
    for match in _STATED.finditer(text):
        phrase = match.end()
    if phrase is not None:
        sentence = text[phrase : phrase + _MAX_ANSWER_CHARS].lstrip(" \t\n:*").split("\n", 1)[0]
        stated.append(_SENTENCE_END.split(sentence, maxsplit=1)[0])
    return stated


def extract_answer(text: str) -> str | None:
    r"""
    Answer a completion states, as text.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `str` or `None`:
            The answer without its markers and `$` signs, `""` for an unfinished one, `None` where there is none.

    Example:
    ```python
    >>> from .parsing import extract_answer

    >>> extract_answer(r"<reasoning>half of one</reasoning><answer>\boxed{\frac{1}{2}}</answer>")
    '\\frac{1}{2}'
    ```
    """
    marked = marked_answer(text)
    if marked is not None:
        return marked.strip().removeprefix("$").removesuffix("$").strip()
    for stated in _stated_answers(text):
        inline = _INLINE_MATH.search(stated)
        answer = (inline[1] or inline[2]) if inline else stated
        if answer.strip():
            return answer.strip(" \t*")
    numbers = list(_NUMBER.finditer(_plain(text[-_TAIL_CHARS:])))
    return numbers[-1].group() if numbers else None


def _plain(text: str) -> str:
    r"""LaTeX numbers as plain ones: `-\frac{1}{2}` as `-1/2`, `9{,}500` as `9,500`, `72\text{ cm}^2` as `72  cm`."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "$")
    text = _UNIT_POWER.sub(r"\1", _WRAPPER.sub(r" \1", text))
    text = _POWER_OF_TEN.sub(r"e\1\2\3", _DEGREE_SIGN.sub("", text))
    text = re.sub(r"(?<=[0-9])\\frac", r" \\frac", text)
    text = _FRACTION.sub(_plain_fraction, text)
    text = re.sub(r"\\frac\s?([0-9])\s?([0-9])", r"\1/\2", text)
    return _SIGN_APART.sub(r"\1-", text)


def _plain_fraction(match: re.Match[str]) -> str:
    before, top_sign, top, bottom_sign, bottom = match.groups()
    is_negative = (before + top_sign + bottom_sign).count("-") % 2 == 1
    return f"{'-' if is_negative else '+' if before else ' '}{top}/{bottom}"


def find_numbers(text: str) -> list[Fraction | None]:
    r"""
    Numbers written in a text, in order and exact.

    Args:
        text (`str`):
            Text with integers, decimals, fractions, mixed numbers, thousands separators, dollar signs or LaTeX.

    Returns:
        `list[Fraction or None]`:
            One entry a number; `None` for digits that do not stand for a number of their own (`10^2`, `7:30`, `1/0`,
            `72k`, the 144 of `\sqrt{144}`).
    """
    text = _plain(text)
    numbers: list[Fraction | None] = []
    for match in _NUMBER.finditer(text):
        following = text[match.end() : match.end() + 16]
        # str.isdigit is true for superscripts, which the pattern's \d does not match
        is_plain = not _NOT_A_NUMBER_BEFORE.match(following) and not following[:1].isdigit()
        is_plain = is_plain and not _NOT_A_NUMBER_AFTER.search(text, max(match.start() - 30, 0), match.start())
        if not is_plain or len(match.group()) > _MAX_DIGITS:
            numbers.append(None)
            continue
        if match["whole"] is not None:
            value, denominator = Fraction(int(match["top"])), int(match["bottom"])
        else:
            value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
            denominator = int((match["denominator"] or "1").replace(",", ""))
        if denominator == 0:
            numbers.append(None)
            continue
        value = value / denominator + int(match["whole"] or 0)
        numbers.append(-value if match["sign"] or match["inner_sign"] else value)
    return numbers


def _value_side(answer: str) -> str:
    """The side of an equation that gives its value: the last, or the first before mere arithmetic (`72 = 3 * 24`)."""
    first, *others = answer.split("=")
    last = others[-1] if others else first
    if len(others) == 1 and _ARITHMETIC.fullmatch(last) and len(find_numbers(last)) > 1:
        last = first
    return _SPACED_THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), last)


def extract_number(text: str) -> Fraction | None:
    """
    Number a completion gives as its answer.

    In an `<answer>` block or a box all numbers must agree, so `71 or 72` is no answer; `6 * 12 = 72` counts as what
    follows its last equals sign, `72 = 6 * 12` as what precedes it.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `Fraction` or `None`:
            The number, exact, or `None` where there is none or the answer is ambiguous or unfinished.
    """
    marked = marked_answer(text)
    if marked is not None:
        # 72! is a sentence's end in prose, a factorial here
        if len(marked) > _MAX_ANSWER_CHARS or re.search(r"[0-9)}]\s?!", marked):
            return None
        numbers = set(find_numbers(_value_side(marked)))
        return numbers.pop() if len(numbers) == 1 else None
    for stated in _stated_answers(text):
        stated = _value_side(stated)
        numbers = find_numbers(stated)
        if numbers:
            return None if len(set(numbers)) > 1 and _HEDGE.search(stated) else numbers[0]
    numbers = find_numbers(text[-_TAIL_CHARS:])
    return numbers[-1] if numbers else None
