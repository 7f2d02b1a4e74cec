"""Callers are slowed down: each key to its rate, each address in its wrong guesses."""

from __future__ import annotations

import time

import pytest

from cloche.api.gate import GUESSES, Gate
from cloche.core.errors import RateLimited
from cloche.core.quota import Quota

HERE = "127.0.0.1"
SLOW = Quota(requests_per_s=2, burst=3)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> Gate:
    return Gate(clock=clock)


def request(gate: Gate, credential: str, quota: Quota = SLOW, key_id: str = "k") -> None:
    if not gate.enter(HERE, credential):
        gate.right(credential, key_id, quota)


def test_a_key_has_its_burst_and_then_its_rate(gate: Gate, clock: Clock) -> None:
    for _ in range(3):
        request(gate, "secret")
    with pytest.raises(RateLimited) as refused:
        request(gate, "secret")
    assert refused.value.retry_after_s == pytest.approx(0.5)

    accepted = 0
    for _ in range(100):
        clock.now += 0.1
        try:
            request(gate, "secret")
        except RateLimited:
            continue
        accepted += 1

    assert accepted == 20, "2 a second, for 10 seconds"


@pytest.mark.parametrize("burst", [1, 3, 7, 11, 2000])
@pytest.mark.parametrize("rate", [0.3, 1, 7, 1000])
def test_a_rested_key_has_exactly_its_burst(
    gate: Gate, clock: Clock, rate: float, burst: int
) -> None:
    quota = Quota(requests_per_s=rate, burst=burst)
    clock.now = 1e6 / 3
    for _ in range(2):
        for _ in range(burst):
            request(gate, "secret", quota)
        with pytest.raises(RateLimited):
            request(gate, "secret", quota)
        clock.now += burst / rate + 20


def test_sessions_of_a_key_share_its_rate_and_other_keys_have_their_own(gate: Gate) -> None:
    for credential in ("secret", "cookie one", "cookie two"):
        request(gate, credential)
    with pytest.raises(RateLimited):
        request(gate, "cookie three")
    request(gate, "another", key_id="other")


def test_a_known_key_is_refused_before_it_is_looked_up(gate: Gate) -> None:
    for _ in range(3):
        request(gate, "secret")
    with pytest.raises(RateLimited):
        gate.enter(HERE, "secret")


def test_no_rate_is_no_limit(gate: Gate) -> None:
    for _ in range(10_000):
        request(gate, "secret", Quota(requests_per_s=None))


def test_a_changed_rate_is_seen_soon(gate: Gate, clock: Clock) -> None:
    fast = Quota(requests_per_s=1000, burst=1000)
    for _ in range(3):
        request(gate, "secret")
    gate.forget_rates()
    with pytest.raises(RateLimited) as refused:
        request(gate, "secret", fast)
    assert refused.value.retry_after_s == pytest.approx(0.001), "held up at the old rate"
    clock.now += 0.01
    request(gate, "secret", fast)
    clock.now += 0.01
    assert gate.enter(HERE, "secret"), "counted at the rate that is known"
    clock.now += 11
    assert not gate.enter(HERE, "secret"), "another process may have changed it"


def guess(gate: Gate, credential: str, address: str = HERE) -> None:
    assert not gate.enter(address, credential)
    gate.wrong(address, credential)


def test_guessing_is_slowed_down_by_address(gate: Gate, clock: Clock) -> None:
    for number in range(GUESSES):
        guess(gate, f"guess {number}")
    with pytest.raises(RateLimited, match="address") as refused:
        guess(gate, "one more")
    assert refused.value.retry_after_s == pytest.approx(1)

    guess(gate, "from elsewhere", "192.0.2.7")
    clock.now += 1.1
    guess(gate, "one a second")
    with pytest.raises(RateLimited):
        guess(gate, "and not two")


def test_a_key_in_use_is_not_held_up_by_guesses_from_its_address(gate: Gate) -> None:
    request(gate, "secret")
    for number in range(GUESSES):
        guess(gate, f"guess {number}")

    request(gate, "secret")
    gate.forget_rates()
    request(gate, "secret")


def test_a_key_that_was_revoked_is_no_longer_known(gate: Gate) -> None:
    request(gate, "secret")
    assert gate.enter(HERE, "secret")
    gate.wrong(HERE, "secret")
    assert not gate.enter(HERE, "secret")


def test_a_whole_network_of_ipv6_addresses_is_one_guesser(gate: Gate) -> None:
    for number in range(GUESSES):
        guess(gate, f"guess {number}", f"2001:db8::{number:x}")
    with pytest.raises(RateLimited):
        guess(gate, "one more", "2001:db8::ffff%eth0")
    guess(gate, "of another network", "2001:db8:0:1::1")


def test_what_is_remembered_is_bounded() -> None:
    gate = Gate(callers=100)
    for number in range(1000):
        request(gate, f"secret {number}", key_id=f"key {number}")
        guess(gate, f"guess {number}", f"192.0.2.{number}")
    assert len(gate._known) == 100
    assert len(gate._requests._full_at) == len(gate._guesses._full_at) == 100


def test_it_costs_microseconds() -> None:
    gate = Gate()
    quota = Quota(requests_per_s=1e6, burst=10**6)
    gate.right("secret", "k", quota)
    began = time.perf_counter()
    for _ in range(10_000):
        gate.enter(HERE, "secret")
    each_s = (time.perf_counter() - began) / 10_000
    assert each_s < 50e-6, f"{each_s * 1e6:.1f} µs"
