"""Globs as the guest understands them."""

from __future__ import annotations

import time

import pytest

from cloche.guest.files import _translate
from cloche.guest.http import Refusal


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*", ["a", ".hidden", "a.b", "new\nline"], ["a/b"]),
        ("*.py", ["a.py", ".py"], ["a.pyc", "d/a.py", "apy"]),
        ("?", ["a", "ñ", "\n"], ["ab", "", "/"]),
        ("**", ["a", "a/b", "a/b/c"], []),
        ("**/*", ["a", "a/b", "a/b/c"], []),
        ("**/a", ["a", "x/a", "x/y/a"], ["xa", "a/x", "x/ya"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab", "x/a/b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "a/b/x"]),
        ("**/a/**/b/**", ["a/b/c", "x/a/y/b/z", "a/a/b/b/c"], ["a/b", "b/a/c"]),
        ("**/**/a", ["a", "x/a"], ["xa"]),
        ("a**b", ["ab", "axxb"], ["a/b", "ax/xb"]),
        ("*a*b*c", ["abc", "xaxbxc", "aabbcc"], ["acb", "ab/c"]),
        ("*a", ["a", "aa", "ba"], ["ab"]),
        ("a*a", ["aa", "aba", "aaa"], ["a"]),
        ("a*/b*", ["a/b", "ax/bx"], ["a/x/b"]),
        ("[abc]", ["a", "b"], ["d", "ab"]),
        ("[!abc]", ["d", "!"], ["a", "/"]),
        ("[^abc]", ["d"], ["a", "/"]),
        ("x[!a]y", ["xby"], ["x/y", "xay"]),
        ("[a-c]x", ["bx"], ["dx", "-x"]),
        ("[+-9]", ["0", "+", "."], ["/"]),
        ("[]]", ["]"], ["[", "a"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[--0]", ["-", "0"], ["/", "a"]),
        ("[&&~~||]", ["&", "~", "|"], ["a"]),
        ("[[]", ["["], ["]"]),
        ("[\\]", ["\\"], ["]"]),
        ("[abc", ["[abc"], ["a"]),
        ("[]", ["[]"], ["]"]),
        ("a.b+(c)$^{}|\\d", ["a.b+(c)$^{}|\\d"], ["axb+(c)$^{}|\\d"]),
        ("ñ🪴*", ["ñ🪴", "ñ🪴x"], ["n"]),
    ],
)
def test_a_pattern_matches_what_it_should(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    matches = _translate(pattern)

    assert [path for path in matching if not matches(path)] == [], "these should match"
    assert [path for path in others if matches(path)] == [], "these should not"


@pytest.mark.parametrize("pattern", ["", "/", "/a", "x" * 1025, "a\0b", "[z-a]", "[!]"])
def test_a_pattern_of_no_sense_is_refused(pattern: str) -> None:
    with pytest.raises(Refusal) as caught:
        _translate(pattern)

    assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 500, "**/" * 300 + "b", "**/a/" * 200 + "b", "*" * 1000 + "b", "?*" * 500, "a*" * 500,
     "*/" * 500 + "b", "**/*a*/" * 120 + "b", "*[!b]" * 150 + "b"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["a" * 255, "/".join("a" * 500), ("a" * 250 + "/") * 15 + "a"])
def test_no_pattern_runs_away(pattern: str, path: str) -> None:
    matches = _translate(pattern)
    began = time.perf_counter()

    matches(path)

    assert time.perf_counter() - began < 1
