"""What every backend is tested with."""

from __future__ import annotations

import pytest

from cloche import settings
from cloche.core.errors import ImageMissing
from cloche.core.image import Image
from cloche.sandbox.images import Images


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return Images(settings.load().data).find()
    except ImageMissing as error:
        pytest.skip(f"{error.message} {error.remedy}")
