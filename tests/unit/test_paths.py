"""Which of the user's folders a path lies in."""

from __future__ import annotations

import pytest

from cloche.guest import paths
from cloche.guest.http import Refusal


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("/workspace", ("/workspace", ".")),
        ("/workspace/", ("/workspace", ".")),
        ("//workspace/a", ("/workspace", "a")),
        ("/workspace/a/b", ("/workspace", "a/b")),
        ("/workspace/./a//b/", ("/workspace", "a/b")),
        ("/workspace/a/../b", ("/workspace", "b")),
        ("/tmp/../workspace/a", ("/workspace", "a")),
        ("/home/user/.x", ("/home/user", ".x")),
        ("/tmp/...", ("/tmp", "...")),
    ],
)
def test_a_path_inside_is_split_at_its_root(path: str, split: tuple[str, str]) -> None:
    assert paths.split(path) == split


@pytest.mark.parametrize(
    "path",
    ["/", "//", "/etc", "/workspacex", "/home", "/home/user2", "/workspace/..", "/workspace/../etc",
     "/tmp/../../etc/passwd", "///etc", "/../etc", "/home/user/../../root"],
)  # fmt: skip
def test_a_path_outside_is_refused(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        paths.split(path)

    assert caught.value.code == "path_refused"


@pytest.mark.parametrize("path", ["", "workspace", "./workspace", "/workspace/\0", "\0"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        paths.split(path)

    assert caught.value.code == "bad_request"
