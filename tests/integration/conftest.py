"""A data folder of its own for each test module, with the host's built image in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche import settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").symlink_to(settings.load().data / "images")
    return folder
