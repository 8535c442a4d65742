# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

r"""
Forms of a mathematical answer that are decided here, exactly, because math-verify decides them wrongly or loosely.

What counts as equal: the same value, exactly (0.333 is not 1/3); a number with and without its unit, dollar sign,
degree sign or percent sign (the unit is the question's), but not two different quantities; 50% also equals 0.5; a
label as in `x = 5` may be left out, one side of an equation in several terms may not; texts but for case, articles and
punctuation; a list in any order, a pair in its own; braces are no parentheses.
"""

import re
from fractions import Fraction

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_SMALL_SPACE = re.compile(r"\\[!,;: ]|~|\\quad")
_SEPARATED = re.compile(r"(?<![\w.,])[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\ |~| )[0-9]{3})+(?![0-9])")
_DECIMAL = re.compile(r"(?<![\w.,])([0-9]*)\.([0-9]+)(?![\w.,%]|\\%|\\overline)")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")

_RATIONAL = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<whole>[0-9]*)\\frac(?:\{(?P<top_sign>-?)(?P<top>[0-9]+)\}|(?P<short_top>[0-9]))"
    r"(?:\{(?P<bottom_sign>-?)(?P<bottom>[0-9]+)\}|(?P<short_bottom>[0-9]))"
    r"|(?P<mixed>[0-9]+) (?P<mixed_top>[0-9]+)/(?P<mixed_bottom>[0-9]+)"
    r"|(?P<before>[0-9]*)\.(?P<fixed>[0-9]*)\\overline\{?(?P<repeated>[0-9]+)\}?"
    r"|(?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?)(?:/(?P<divisor>[0-9]+))?)"
    r"(?P<percent>%?)"
)
_BOLD = re.compile(r"\\(?:boldsymbol|bm)(?![A-Za-z])")
_NEGATION = re.compile(r"\\(?:neg|lnot)(?![A-Za-z])")
_CENTS = re.compile(r"(.*[0-9])\s*(?:\u00a2|\\text\{\s*\u00a2\s*\}|\\cents?)", re.DOTALL)
# \text{5 apples}: the number belongs before the text
_COUNTED = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*(-?[0-9][0-9.,/]*)\s+([A-Za-z]+)\s*\}")
# A number times something that is no unit: 2d, 5\text{x}, 5\text{ thousand}
_SCALED = re.compile(
    r"-?[0-9][0-9.,]*\s*(?:[A-Za-z]|\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?:[A-Za-z]"
    r"|(?:hundred|thousand|million|billion|trillion)s?)\s*\})"
)
_SET_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?\s*)?(?:\\mid|\\vert|\||:)(?P<condition>[^,;{}|]*)\\\}"
)
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?([0-9]+)\}?")

# Dimension and size in its own unit of reference: a square of it has the square of the size
_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size))
    for dimension, sizes in {
        "length": {
            "mm millimeter millimetre": "1/1000",
            "cm centimeter centimetre": "1/100",
            "m meter metre": "1",
            "km kilometer kilometre": "1000",
            "in inch inches": "127/5000",
            "ft foot feet": "381/1250",
            "yd yard": "1143/1250",
            "mi mile": "1609344/1000",
        },
        "mass": {
            "mg milligram": "1/1000",
            "g gram": "1",
            "kg kilogram": "1000",
            "oz ounce": "28.349523125",
            "lb lbs pound": "453.59237",
        },
        "time": {
            "s sec second": "1",
            "min minute": "60",
            "h hr hour": "3600",
            "day": "86400",
            "week": "604800",
        },
        "year": {"month": "1/12", "year yr": "1"},
        "money": {"cent": "1/100", "dollar usd": "1"},
        "speed": {
            "mph|miles per hour|mile per hour|miles/hour|mi/h": "0.44704",
            "km/h|kmh|kph|kilometers per hour": "5/18",
            "m/s|meters per second|meter per second": "1",
        },
        "volume": {"ml milliliter millilitre": "1/1000", "l liter litre": "1"},
        "angle": {"degree": "1"},
        "morning": {"a.m.|a.m|am": "1"},
        "afternoon": {"p.m.|p.m|pm": "1"},
        "any": {"unit": "1"},
    }.items()
    for names, size in sizes.items()
    for name in (names.split("|") if "|" in names else names.split())
}
_POWER_WORDS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_UNIT_AT_END = re.compile(
    r"(?P<rest>.*[0-9})A-Za-z])\s*(?:\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{\s*(?P<wrapped>[A-Za-z./ ]+?)\s*\}"
    r"|(?:(?<=[0-9 }])(?P<plain>(?:(?:square|sq|cubic|cu)\.? )?[A-Za-z][A-Za-z./]+(?: per [a-z]+)?)))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?\.?",
    re.DOTALL,
)


def decide(gold: str, answer: str) -> bool | None:
    """
    Whether an answer equals the right one, where that can be told without algebra.

    Args:
        gold (`str`):
            Right answer, as LaTeX.
        answer (`str`):
            Answer to grade, as LaTeX.

    Returns:
        `bool` or `None`:
            `None` for a pair that a computer algebra system should compare, as `prepared` writes it.
    """
    gold, answer = _without_label(_plain(gold), _plain(answer))
    if _squeezed(gold) == _squeezed(answer):
        return True
    gold_words, words = _words(gold), _words(answer)
    if gold_words is not None and words is not None and (_WRAPPER.search(gold) or re.search("[a-z]{3}", gold_words)):
        if gold_words == words:
            return True
        if _is_wrapped_text(gold) and not re.search("[0-9]", gold_words + words):
            return False
    if not _WRAPPER.search(gold + answer) and _squeezed(gold).lower() == _squeezed(answer).lower():
        return False  # as symbols: a is not A, whatever math-verify makes of 2a and 2A
    if bool(_NEGATION.search(gold)) != bool(_NEGATION.search(answer)):
        return False  # math-verify reads past the sign
    (gold, gold_unit), (answer, unit) = _without_unit(gold), _without_unit(answer)
    gold_number, number = _rational(gold), _rational(answer)
    if gold_unit is not None and unit is not None and gold_unit != unit and "any" not in (gold_unit[0], unit[0]):
        if gold_unit[0] != unit[0] or gold_number is None or number is None:
            return False
        return gold_number[0] * gold_unit[1] == number[0] * unit[1]
    for one, other_unit in ((gold_number, unit), (number, gold_unit)):
        if one is not None and one[1] and other_unit is not None and other_unit[0] == "angle":
            return False  # 30% is not 30 degrees
    if gold_number is not None and number is not None:
        return _is_equal_number(*gold_number, *number)
    if _squeezed(gold) == _squeezed(answer):
        return True
    if (gold_number and _SCALED.fullmatch(answer)) or (number and _SCALED.fullmatch(gold)):
        return False
    gold_base, base = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if gold_base is not None:
        if base is not None:
            return gold_base.groups() == base.groups()
        if number is not None:
            return answer == gold_base[1]
    if len(_sides(answer)) == 1 and _is_equation(gold):
        return False
    claims = {claim for claim in map(_rational, _sides(answer)) if claim is not None}
    if len(_sides(gold)) == 1 and len(claims) > 1:
        return False  # 71 = 72
    if {_bracket(gold), _bracket(answer)} == {"\\{", "("} and "," in gold and "," in answer:
        return False
    return None


def prepared(gold: str, answer: str) -> tuple[str, str]:
    """The pair in the form in which a computer algebra system reads it as meant."""
    gold, answer = (_readable(_without_unit(text)[0]) for text in _without_label(_plain(gold), _plain(answer)))
    if _bracket(answer) == "(" and not _bracket(gold) and "," in gold and "(" not in gold:
        gold = f"({gold})"  # a list that is answered by a pair: the order counts
    return gold, answer


def _is_equal_number(gold: Fraction, gold_is_percent: bool, number: Fraction, is_percent: bool) -> bool:
    if gold == number:
        return True
    return gold_is_percent != is_percent and (gold == 100 * number if gold_is_percent else 100 * gold == number)


def _plain(text: str) -> str:
    r"""Without bold type, and a set of numbers by its condition alone, as `x>3`."""
    text = _BOLD.sub("", text).strip()
    builder = re.fullmatch(_SET_BUILDER, re.sub(r"\\(?:left|right)(?![a-z])", "", text))
    if builder is None or re.search(r"[<>]|\\(?:le|ge|lt|gt)", builder["condition"]) is None:
        return text
    return builder["condition"].strip()


def _squeezed(text: str) -> str:
    text = _joined(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return re.sub(
        r"(?<![0-9])\s+|\s+(?![0-9])|\\left(?![a-z])|\\right(?![a-z])|\\!|\.$",
        "",
        text.replace("\\varnothing", "\\emptyset"),
    )


def _joined(text: str) -> str:
    """Without separators between thousands."""
    return _SEPARATED.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)


def _readable(text: str) -> str:
    text = _joined(text).replace("\\varnothing", "\\emptyset")
    if re.fullmatch(r"\\\{\s*\\\}", text):
        return "\\emptyset"
    text = _DECIMAL.sub(lambda match: f"(\\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}})", text)
    return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) if _TRIGONOMETRIC.search(text) else text


def _words(text: str) -> str | None:
    """An answer in words, without what does not matter; `None` for a formula."""
    plain = _WRAPPER.sub(r" \1 ", text.replace("$", " "))
    plain = _SMALL_SPACE.sub(" ", plain).strip().lower()
    if re.search(r"[\\^_{}=<>+*/]", plain) or not re.search("[a-z]", plain):
        return None
    plain = re.sub(r"^(?:an?|the)\s+(?=[a-z]{2})", "", plain)
    plain = re.sub(r"^\(([a-z])\)$", r"\1", plain)
    return re.sub(r"\s+|\.(?![0-9])", "", plain)


def _is_wrapped_text(text: str) -> bool:
    return _WRAPPER.sub("", text).strip(" .()") == ""


def _without_unit(text: str) -> tuple[str, tuple[str, Fraction] | None]:
    """An expression without the unit behind it, and the unit, if it is one we know."""
    text = text.strip()
    cents = _CENTS.fullmatch(text)
    if cents is not None:
        return cents[1], _UNITS["cent"]
    text = _COUNTED.sub(r"\1\\text{ \2}", text) if _COUNTED.fullmatch(text) else text
    if text.startswith(("\\$", "$")):
        return text.lstrip("\\$ "), _UNITS["dollar"]
    degrees = _DEGREES.fullmatch(text)
    if degrees is not None:
        return degrees[1], _UNITS["degree"]
    match = _UNIT_AT_END.fullmatch(text)
    if match is None:
        return text, None
    power, words = int(match["power"] or 1), (match["wrapped"] or match["plain"]).lower().split()
    if words[0] in _POWER_WORDS:
        power *= _POWER_WORDS[words.pop(0)]
    name = " ".join(words)
    unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.rstrip("."))
    if unit is None:
        return text, None
    dimension = unit[0] if power == 1 or unit[0] == "any" else f"{unit[0]}^{power}"
    return match["rest"].strip(), (dimension, unit[1] ** power)


def _rational(text: str) -> tuple[Fraction, bool] | None:
    """Value of an expression that is one number and nothing else, and whether a percent sign follows."""
    text = _joined(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\N{MINUS SIGN}", "-"))
    text = re.sub(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|percent)$", "%", text.strip())
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])", "", text)
    text = re.sub(r"^([-+]?)\s*(?:\(([^()]*)\)|\{([^{}]*)\})$", r"\1\2\3", text.strip())
    text = re.sub(r"\s*([-+\\{}/%])\s*", r"\1", _SMALL_SPACE.sub("", text))
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["decimal"] is not None:
        value, divisor = Fraction(match["decimal"]), int(match["divisor"] or 1)
    elif match["repeated"] is not None:
        fixed, repeated = match["fixed"], match["repeated"]
        value = Fraction(int(fixed + repeated) - int(fixed or 0), (10 ** len(repeated) - 1) * 10 ** len(fixed))
        value, divisor = value + int(match["before"] or 0), 1
    elif match["mixed"] is not None:
        value, divisor = Fraction(int(match["mixed_top"])), int(match["mixed_bottom"])
        value += int(match["mixed"]) * divisor
    else:
        value, divisor = Fraction(match["top"] or match["short_top"]), int(match["bottom"] or match["short_bottom"])
        value += int(match["whole"] or 0) * divisor
        sign *= -1 if (match["top_sign"] or "") != (match["bottom_sign"] or "") else 1
    return (sign * value / divisor, bool(match["percent"])) if divisor else None


def _sides(text: str) -> list[str]:
    """What stands around the equals signs of a text, those of a sum's bounds apart."""
    sides, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "=" and depth == 0:
            sides.append(text[start:position].strip())
            start = position + 1
    return [*sides, text[start:].strip()]


def _is_label(side: str) -> bool:
    """Whether this side of an equation is the name of a value rather than several terms."""
    side = re.sub(r"\{[^{}]*\}|_\w|(?<=[A-Za-z])\([^()]*\)", "", side)
    return re.search("[A-Za-z]", side) is not None and re.search(r"[-+0-9]", re.sub(r"\\[a-z]+", "", side)) is None


def _is_equation(text: str) -> bool:
    sides = _sides(text)
    return len(sides) == 2 and re.search("[A-Za-z]", sides[0]) is not None and not _is_label(sides[0])


def _without_label(gold: str, answer: str) -> tuple[str, str]:
    """A pair without the name of the value, where only one of them gives it, as in `f(2) = 5`."""
    gold_sides, sides = _sides(gold), _sides(answer)
    if len(gold_sides) == 2 and len(sides) == 1 and _is_label(gold_sides[0]):
        gold = gold_sides[1]
    if len(sides) == 2 and len(gold_sides) == 1 and _is_label(sides[0]):
        answer = sides[1]
    return gold, answer


def _bracket(text: str) -> str:
    r"""`"("`, `"["` or `"\{"` where one pair of brackets holds the whole text, else `""`."""
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\s", "", text)
    for opening, closing in (("\\{", "\\}"), ("(", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            inside = text[len(opening) : -len(closing)]
            depth = 0
            for character in inside:
                depth += (character in "({[") - (character in ")}]")
                if depth < 0:
                    return ""
            return opening
    return ""
