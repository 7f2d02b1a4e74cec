"""Globs and paths, over any text at all."""

from __future__ import annotations

import posixpath
import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cloche.guest import paths
from cloche.guest.files import _translate
from cloche.guest.http import Refusal

letters = st.text("ab*?[]!^-/.\\&~|", max_size=12)
names = st.text("ab-.\n", min_size=1, max_size=4)
relative = st.lists(names, min_size=1, max_size=5).map("/".join)


@given(pattern=st.text(max_size=30) | letters, path=relative | st.text(max_size=30))
@settings(max_examples=500)
def test_any_text_is_a_pattern_or_refused(pattern: str, path: str) -> None:
    try:
        matches = _translate(pattern)
    except Refusal as refusal:
        assert refusal.code == "bad_request"  # noqa: PT017
        return
    matches(path)


simple = st.lists(st.text("ab*?.", min_size=1, max_size=5), min_size=1, max_size=5).map("/".join)


def reference(pattern: list[str], path: list[str]) -> bool:
    """Match by the definition, without a thought for speed."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(reference(pattern[1:], path[skip:]) for skip in range(len(path) + 1)) and (
            len(pattern) > 1 or bool(path)
        )
    return bool(path) and one(pattern[0], path[0]) and reference(pattern[1:], path[1:])


def one(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(one(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and one(pattern[1:], name[1:])


@given(pattern=simple, path=relative)
@settings(max_examples=1500)
def test_a_pattern_matches_by_its_definition(pattern: str, path: str) -> None:
    expected = reference(pattern.split("/"), path.split("/"))

    assert bool(_translate(pattern)(path)) == expected


@given(pattern=st.text("ab*?", min_size=1, max_size=7), name=st.text("ab", min_size=1, max_size=8))
@settings(max_examples=1500)
def test_stars_within_a_name_match_by_their_definition(pattern: str, name: str) -> None:
    assume(pattern != "**")

    assert bool(_translate(pattern)(name)) == one(pattern, name)


folders = st.lists(st.sampled_from(["**", "a", "b", "*"]), min_size=1, max_size=7).map("/".join)


@given(pattern=folders, path=st.lists(st.sampled_from("ab"), min_size=1, max_size=8).map("/".join))
@settings(max_examples=1500)
def test_double_stars_match_by_their_definition(pattern: str, path: str) -> None:
    expected = reference(pattern.split("/"), path.split("/"))

    assert bool(_translate(pattern)(path)) == expected


@given(pattern=letters, path=relative)
def test_only_a_double_star_crosses_folders(pattern: str, path: str) -> None:
    assume("**" not in pattern.split("/") and "[" not in pattern)
    try:
        matches = _translate(pattern)
    except Refusal:
        return
    if matches(path):
        assert path.count("/") == pattern.count("/")


@given(path=relative)
def test_a_plain_path_matches_itself_and_nothing_else(path: str) -> None:
    matches = _translate(path)

    assert matches(path)
    assert not matches(path + "x")
    assert not matches("x/" + path)


@given(body=st.text(min_size=1, max_size=8), path=st.text(min_size=1, max_size=3))
def test_a_class_stands_for_one_character_that_is_no_slash(body: str, path: str) -> None:
    assume("]" not in body and "/" not in body and "\0" not in body)
    try:
        matches = _translate(f"[{body}]")
    except Refusal:
        return
    if matches(path):
        assert len(path) == 1
        assert path != "/"


parts = st.sampled_from(["", ".", "..", "...", "workspace", "home", "user", "tmp", "etc", "a", "ñ"])


@given(path=st.lists(parts, max_size=12).map("/".join) | st.text(max_size=20))
@settings(max_examples=1000)
def test_a_path_is_split_inside_or_refused(path: str) -> None:
    try:
        root, rest = paths.split(path)
    except Refusal as refusal:
        assert refusal.code in ("path_refused", "bad_request")  # noqa: PT017
        return
    whole = posixpath.join(root, rest)
    assert root in paths.ROOTS
    assert not rest.startswith("/")
    assert ".." not in rest.split("/")
    assert posixpath.normpath(whole) == re.sub("^/+", "/", posixpath.normpath(path))
    assert paths.split(whole) == (root, rest), "it is its own split"
