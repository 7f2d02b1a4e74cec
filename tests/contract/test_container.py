"""The container backend passes what every backend must."""

from __future__ import annotations

import pytest

from cloche.testing.conformance import *  # noqa: F403
from cloche.testing.maker import Maker


@pytest.fixture(scope="session")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    data = tmp_path_factory.mktemp("container")
    return Maker(factory="cloche.backends.container:Backend", data=data)
