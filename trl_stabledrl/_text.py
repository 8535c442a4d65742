# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Text helpers that both the graders and the tasks need."""

import re

# A number needs no braces, as in `\boxed72`; TeX would box its first digit, which is not what the writer meant
_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9]{1,50}(?:[.,][0-9]{1,50}){0,20})(?=[\s$.,;:?*<]|\\[)\]]|\Z))"
)


def last_boxed(text: str) -> str | None:
    r"""
    Content of the last `\boxed{...}` of a text, with balanced braces.

    Args:
        text (`str`):
            Text to search. The time taken is linear in its length.

    Returns:
        `str` or `None`:
            Content without the outer braces, `""` where the last box never closes (an earlier box is not an answer
            the writer stood by), `None` where there is no box.
    """
    box = None
    for match in _BOX.finditer(text):
        box = match
    if box is None:
        return None
    if box["bare"] is not None:
        return box["bare"]
    start = box.end()
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":  # \{ and \} are set braces of LaTeX, not grouping
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return ""
