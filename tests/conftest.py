"""What every kind of test shares: the machine image, and when to do without."""

from __future__ import annotations

import os

import pytest

from cloche import settings
from cloche.backends import container
from cloche.core.errors import BackendUnavailable, ImageMissing
from cloche.core.image import Image
from cloche.sandbox.images import Images


def lacking(what: str, reason: str) -> None:
    """Skip; or fail, where CLOCHE_MUST_RUN says that this host is meant to have `what`."""
    if what in os.environ.get("CLOCHE_MUST_RUN", "").split(","):
        pytest.fail(f"{what} must run here: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
async def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The machine image, on a host that can start machines from it."""
    try:
        await container.Backend(tmp_path_factory.mktemp("probe")).check()
        return Images(settings.load().data).find()
    except (BackendUnavailable, ImageMissing) as error:
        lacking("container", f"{error.message} {error.remedy}")
        raise
