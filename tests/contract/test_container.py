"""The container backend passes what every backend must."""

from __future__ import annotations

import pytest

from cloche.backends import container
from cloche.core.errors import BackendUnavailable
from cloche.testing.conformance import *  # noqa: F403
from cloche.testing.maker import Maker


@pytest.fixture(scope="session")
async def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    data = tmp_path_factory.mktemp("container")
    try:
        await container.Backend(data).check()
    except BackendUnavailable as error:
        pytest.skip(f"{error.message} {error.remedy}")
    return Maker(factory="cloche.backends.container:Backend", data=data)
