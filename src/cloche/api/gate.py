"""Slows callers down: each key to its rate, and each address in its wrong guesses.

It lives in one process and remembers a bounded number of callers; those it has
not seen for the longest time are forgotten first.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from cloche.core.errors import RateLimited
from cloche.core.quota import Quota

CALLERS: Final = 10_000
GUESSES_PER_S: Final = 1.0
GUESSES: Final = 50
"""Wrong keys that an address may send at once."""
_FRESH_S: Final = 10.0
"""How long a key's rate is taken as known: another process may have changed it."""

_FUZZ_S: Final = 1e-6
"""What sums of fractions may be off by."""

V = TypeVar("V")


class Recent(Generic[V]):
    """A mapping that forgets what was not used for the longest time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Hashable, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size:
            self._values.popitem(last=False)

    def remove(self, key: Hashable) -> None:
        self._values.pop(key, None)


class Buckets:
    """Token buckets, told by one number each: when the bucket will be full again (GCRA)."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._full_at: Recent[float] = Recent(size)
        self._clock = clock

    def wait_s(self, key: Hashable, rate: float, burst: int) -> float:
        """Return how long it is until the bucket has a token; 0 when it has one."""
        now = self._clock()
        wait_s = self._full(key, rate, burst, now) - now + (1 - burst) / rate
        return wait_s if wait_s > _FUZZ_S else 0.0

    def take(self, key: Hashable, rate: float, burst: int) -> float:
        """Take a token, or return how long it is until there is one."""
        now = self._clock()
        full_at = self._full(key, rate, burst, now)
        wait_s = full_at - now + (1 - burst) / rate
        refused = wait_s > _FUZZ_S
        self._full_at.put(key, full_at if refused else full_at + 1 / rate)
        return wait_s if refused else 0.0

    def _full(self, key: Hashable, rate: float, burst: int, now: float) -> float:
        full_at = self._full_at.get(key)
        if full_at is None or full_at < now:
            return now
        # At most as empty as a bucket can be: it may have been filled at another rate.
        return min(full_at, now + burst / rate)


class Gate:
    """What a request passes before and after its key is looked up.

    A key that was right a moment ago is held to its rate without asking the
    database, and is not held up by wrong guesses from the same address.
    """

    def __init__(
        self, *, callers: int = CALLERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._requests = Buckets(callers, clock)
        self._guesses = Buckets(callers, clock)
        self._known: Recent[tuple[str, Quota, float]] = Recent(callers)
        self._changed_at = -math.inf

    def enter(self, address: str, credential: str) -> bool:
        """Let a request try its credential; return whether its key's rate was counted.

        Raises:
            RateLimited: its key, or its address, must wait.
        """
        known = self._known.get(_mark(credential))
        if known is not None:
            key_id, quota, noted_at = known
            if noted_at > max(self._changed_at, self._clock() - _FRESH_S):
                self._count(key_id, quota)
                return True
        else:
            wait_s = self._guesses.wait_s(_network(address), GUESSES_PER_S, GUESSES)
            if wait_s:
                raise RateLimited(
                    "Too many wrong keys came from this address.",
                    remedy=f"Wait {wait_s:.0f} s, and send a key that is in force.",
                    retry_after_s=wait_s,
                )
        return False

    def right(self, credential: str, key_id: str, quota: Quota) -> None:
        """Note that a credential opened something, and count the request.

        Raises:
            RateLimited: its key must wait.
        """
        self._known.put(_mark(credential), (key_id, quota, self._clock()))
        self._count(key_id, quota)

    def wrong(self, address: str, credential: str) -> None:
        """Note that a credential opened nothing."""
        self._known.remove(_mark(credential))
        self._guesses.take(_network(address), GUESSES_PER_S, GUESSES)

    def forget_rates(self) -> None:
        """Look every key's rate up again: one was changed."""
        self._changed_at = self._clock()

    def _count(self, key_id: str, quota: Quota) -> None:
        if quota.requests_per_s is None:
            return
        wait_s = self._requests.take(key_id, quota.requests_per_s, quota.burst)
        if wait_s:
            raise RateLimited(
                f"This key makes more than {quota.requests_per_s:g} requests a second.",
                remedy=f"Wait {wait_s:.2f} s. Follow a job by its events rather than by polling.",
                retry_after_s=wait_s,
            )


def _mark(credential: str) -> bytes:
    """Tell a credential without keeping it."""
    return hashlib.sha256(credential.encode(errors="replace")).digest()


def _network(address: str) -> str:
    """Take a caller's whole network for one: whoever has an IPv6 address has 2**64 of them."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address
