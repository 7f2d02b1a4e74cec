"""Uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from cloche.api.described import Answer, example

ID: Final = "0b9de7a1c2f34856a7710c5d9e2f4b18"


class Upload(Answer):
    """What is known of an upload."""

    model_config = example(
        {
            "id": ID,
            "tenant": "default",
            "size": 11,
            "sha256": "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9",
            "created_at": "2026-03-02T09:15:04.120518+00:00",
        }
    )

    id: str
    tenant: str
    size: int
    sha256: str
    created_at: datetime
