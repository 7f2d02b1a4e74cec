"""What a job's machine connected to."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from cloche.api.described import Answer, example


class Connection(Answer):
    """A connection that a program made or tried to make, or several that are alike."""

    at: datetime
    name: str
    port: int
    via: Literal["http", "connect", "socks5"]
    verdict: Literal["allowed", "refused", "failed", "cut"]
    """`cut`: it was allowed, and ended by us."""
    rule: str
    """The rule that allowed it."""
    reason: str
    address: str
    bytes_up: int
    bytes_down: int
    duration_s: float
    count: int
    """How many were alike."""


class Connections(Answer):
    """Connections, oldest first."""

    model_config = example(
        {
            "attempts": [
                {
                    "at": "2026-03-02T09:15:04.402911+00:00",
                    "name": "git.example.com",
                    "port": 443,
                    "via": "connect",
                    "verdict": "allowed",
                    "rule": "*.example.com:443",
                    "reason": "",
                    "address": "93.184.216.34",
                    "bytes_up": 1734,
                    "bytes_down": 88213,
                    "duration_s": 0.412,
                    "count": 1,
                }
            ],
            "left_out": 0,
            "next_after": None,
        }
    )

    attempts: list[Connection]
    left_out: int
    """How many were too many to be told of one by one."""
    next_after: int | None
    """Where the list goes on."""
