"""Sends word of jobs to whoever asked for it, until it is heard or a day has passed.

What is to be sent lies in the outbox, written with the change it tells of. A server
holds what it sends by a lease, so that two do not send at once; when it is killed in
the middle, it is sent again. A receiver may hear twice, and knows it by the id.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import email.utils
import functools
import hashlib
import hmac
import logging
import random
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import Final

from cloche import __version__
from cloche.core.outbox import Attempt, Delivery, Fate, Outbox
from cloche.jobs.outbound import NotAnswered, Outbound
from cloche.jobs.persistence import attempt

logger = logging.getLogger(__name__)

SLOTS: Final = 32
PER_TENANT: Final = 16
PER_RECEIVER: Final = 4
POLL_S: Final = 0.5
LEASE: Final = timedelta(seconds=60)
GIVE_UP: Final = timedelta(hours=24)
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 4 * 3600.0
_RETRY_S: Final = 1.0
_ERROR_CHARACTERS: Final = 500
_GONE: Final = 410
_SHAPE: Final = re.compile(r"whsec_([A-Za-z0-9+/]+={0,2})")


def new_secret() -> str:
    """Make up what to sign with, in the spelling of Standard Webhooks."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """Return the bytes that a secret spells.

    Raises:
        ValueError: it is not `whsec_` and base64 of 24 to 64 bytes.
    """
    match = _SHAPE.fullmatch(secret)
    try:
        key = binascii.a2b_base64(match[1], strict_mode=True) if match else b""
    except binascii.Error:
        key = b""
    if not 24 <= len(key) <= 64:
        raise ValueError("is not whsec_ and base64 of 24 to 64 bytes")
    return key


def sign(key: bytes, delivery_id: str, timestamp: int, body: str) -> str:
    """Sign as Standard Webhooks does, so that its libraries can verify."""
    signed = f"{delivery_id}.{timestamp}.{body}".encode()
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def wait_s(attempts: int, chance: float) -> float:
    """Return how long to wait after the given number of tries: twice as long each time.

    `chance`, from 0 to 1, spreads them: what failed together does not come back together.
    """
    # The power is bounded, too: 2.0 ** 2000 is an error.
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempts - 1, 30))
    return longest * (0.8 + 0.4 * chance)


def asked_wait_s(retry_after: str, now: datetime) -> float:
    """Read a Retry-After header, in seconds or as a date; anything else asks for nothing."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:10]), LONGEST_WAIT_S)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return min(max(0.0, (aware - now).total_seconds()), LONGEST_WAIT_S)


def failed(delivery: Delivery, now: datetime, error: str, retry_after: str = "") -> Attempt:
    """Say when to try again, or that it is given up: the last try is when a day has passed."""
    told = error[:_ERROR_CHARACTERS]
    end = delivery.created_at + GIVE_UP
    if now >= end:
        return Attempt(at=now, state=Fate.FAILED, error=told)
    chance = random.random()  # noqa: S311 - spreads load, keeps no secret
    seconds = max(wait_s(delivery.attempts + 1, chance), asked_wait_s(retry_after, now))
    return Attempt(
        at=now,
        state=Fate.PENDING,
        next_at=min(now + timedelta(seconds=seconds), end),
        error=told,
    )


class Sender:
    """Sends up to `SLOTS` deliveries at once."""

    def __init__(self, outbox: Outbox, outbound: Outbound, *, name: str, secret: str) -> None:
        self._outbox = outbox
        self._outbound = outbound
        self._name = name
        self._key = key_of(secret)
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Send until cancelled; then let go, for another server or the next start."""
        await attempt("webhooks", self._let_go())
        try:
            while True:
                self._room.clear()
                await attempt("webhooks", self._take())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._room.wait()
        finally:
            tasks = list(self._sending.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await attempt("webhooks", self._let_go())

    async def _let_go(self) -> None:
        await self._outbox.reclaim(self._name)

    async def _take(self) -> None:
        free = SLOTS - len(self._sending)
        if free <= 0:
            return
        claimed = await self._outbox.claim(
            self._name, lease=LEASE, limit=free, per_receiver=PER_RECEIVER, per_tenant=PER_TENANT
        )
        for delivery in claimed:
            task = asyncio.create_task(
                attempt("webhooks", self._deliver(delivery)), name=delivery.id
            )
            self._sending[delivery.id] = task
            task.add_done_callback(functools.partial(self._forget, delivery.id))

    def _forget(self, delivery_id: str, _: asyncio.Task[None]) -> None:
        self._sending.pop(delivery_id, None)
        self._room.set()

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            sent = await self._send(delivery)
        except Exception:
            # A try like any other, or it would be made over and over.
            logger.exception("webhook %s: a fault of ours", delivery.id)
            sent = failed(delivery, datetime.now(UTC), "Cloche itself failed")
        await self._outbox.settle(self._name, delivery.id, sent)
        if sent.state is Fate.FAILED:
            logger.warning("webhook %s is given up: %s", delivery.id, sent.error)

    async def _send(self, delivery: Delivery) -> Attempt:
        began = datetime.now(UTC)
        timestamp = int(began.timestamp())
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": f"cloche/{__version__}",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(self._key, delivery.id, timestamp, delivery.body),
        }
        try:
            answer = await self._outbound.post(delivery.url, delivery.body.encode(), headers)
        except NotAnswered as error:
            return failed(delivery, datetime.now(UTC), str(error))
        if 200 <= answer.status < 300:
            return Attempt(at=began, state=Fate.DELIVERED)
        told = f"answered {answer.status}"
        if answer.status == _GONE:  # The receiver says that it wants no more.
            return Attempt(at=began, state=Fate.FAILED, error=told)
        return failed(delivery, datetime.now(UTC), told, answer.retry_after)
