"""What was told to receivers of webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from cloche.api.described import Answer, example
from cloche.core.outbox import Fate


class Delivery(Answer):
    """Something that is told to one receiver."""

    id: str
    """The same each time it is sent."""
    type: Literal["job.started", "job.finished"]
    url: str
    state: Fate
    attempts: int
    created_at: datetime
    last_at: datetime | None
    next_at: datetime | None
    """When it is sent next, while it is pending."""
    last_error: str | None


class Deliveries(Answer):
    """What was sent to a job's webhook, oldest first."""

    model_config = example(
        {
            "deliveries": [
                {
                    "id": "msg_7d1f0a3c9b2e4658d0c1a2b3",
                    "type": "job.finished",
                    "url": "https://hooks.example.com/cloche",
                    "state": "delivered",
                    "attempts": 1,
                    "created_at": "2026-03-02T09:15:04.402911+00:00",
                    "last_at": "2026-03-02T09:15:04.611842+00:00",
                    "next_at": None,
                    "last_error": None,
                }
            ]
        }
    )

    deliveries: list[Delivery]


class WebhookSecret(Answer):
    """What every webhook of this server is signed with."""

    model_config = example({"secret": "whsec_RVhBTVBMRSBub3QgYSByZWFsIHNlY3JldA=="})

    secret: str
