"""Webhooks, as far as nothing is sent."""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from cloche.core.job import Request
from cloche.core.outbox import Delivery, Fate
from cloche.jobs import webhooks
from cloche.jobs.webhooks import GIVE_UP, LONGEST_WAIT_S

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def request(webhook: object) -> Request:
    return Request.model_validate({"kind": "shell", "code": "true", "webhook": webhook})


def delivery(**changes: object) -> Delivery:
    return Delivery(
        id="msg_1",
        job_id="j",
        tenant="t",
        url="https://a.example/",
        event="finished",
        body="{}",
        **{"created_at": NOW, **changes},  # type: ignore[arg-type]
    )


def test_a_bare_url_asks_for_the_end_alone() -> None:
    webhook = request("https://a.example/hook?x=1").webhook

    assert webhook is not None
    assert (webhook.url, webhook.events) == ("https://a.example/hook?x=1", {"finished"})
    assert request({"url": "https://a.example/hook?x=1"}).webhook == webhook


@pytest.mark.parametrize(
    "url",
    [
        *("", "a.example", "ftp://a.example/", "file:///etc/passwd", "gopher://a/", "//a.example/"),
        *("https:a.example", "http:///a", "http://", "http://a b/", "http://a\n.example/"),
        *("http://user@a.example/", "http://user:word@a.example/", "http://:word@a.example/"),
        *("http://a.example:0/", "http://a.example:65536/", "http://1.2.3.4.5/", "http://[::1"),
        *("http://256.1.1.1/", "http://[fe80::1%25eth0]/", "https://a.example/" + "x" * 2048),
        *("http://" + "a" * 254 + "/", "https://a.example/" + "ü" * 1000, "http:\\\\a.example\\"),
    ],
    ids=lambda url: ascii(url[:40]),
)
def test_an_address_that_is_none_of_the_web_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        request(url)


@pytest.mark.parametrize(
    "webhook",
    [
        {"url": "https://a.example/", "events": []},
        {"url": "https://a.example/", "events": ["exploded"]},
        {"url": "https://a.example/", "colour": "red"},
        {"events": ["finished"]},
        7,
        ["https://a.example/"],
    ],
    ids=str,
)
def test_a_webhook_that_makes_no_sense_is_refused(webhook: object) -> None:
    with pytest.raises(ValidationError):
        request(webhook)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    # The example of the specification's own libraries.
    key = webhooks.key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

    signature = webhooks.sign(
        key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, '{"test": 2432232314}'
    )

    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_secret_is_new_each_time_and_spells_a_key() -> None:
    first, second = webhooks.new_secret(), webhooks.new_secret()

    assert first != second
    signed = webhooks.sign(webhooks.key_of(first), "a", 1, "ü").removeprefix("v1,")
    key = base64.b64decode(first.removeprefix("whsec_"))
    assert base64.b64decode(signed) == hmac.digest(key, "a.1.ü".encode(), hashlib.sha256)


@pytest.mark.parametrize(
    "secret", ["", "secret", "whsec_", "whsec_short", "whsec_" + "A" * 200, "whsec_" + "ü" * 40]
)
def test_a_secret_that_spells_no_key_is_refused(secret: str) -> None:
    with pytest.raises(ValueError):
        webhooks.key_of(secret)


def test_waits_grow_to_a_bound_and_spread() -> None:
    waits = [webhooks.wait_s(attempts, 0.5) for attempts in range(1, 100)]

    assert waits[:4] == [2.0, 4.0, 8.0, 16.0]
    assert max(waits) == LONGEST_WAIT_S
    assert webhooks.wait_s(10**6, 1.0) == pytest.approx(LONGEST_WAIT_S * 1.2)
    assert webhooks.wait_s(3, 0.0) < webhooks.wait_s(3, 1.0)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("", 0), ("0", 0), ("30", 30), (" 30 ", 30), ("-5", 0), ("1e9", 0), ("soon", 0)),
        *(("9" * 5000, LONGEST_WAIT_S), ("٣", 0)),
        *(("Thu, 01 Jan 2026 00:01:00 GMT", 60), ("Thu, 01 Jan 2026 00:01:00", 60)),
        *(("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("Fri, 01 Jan 2100 00:00:00 GMT", LONGEST_WAIT_S)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_receiver_may_ask_for_time_within_bounds(header: str, seconds: float) -> None:
    assert webhooks.asked_wait_s(header, NOW) == seconds


def test_a_delivery_is_tried_for_a_day_and_then_given_up() -> None:
    now, tried = NOW, 0
    while (attempt := webhooks.failed(delivery(attempts=tried), now, "no")).state is Fate.PENDING:
        assert attempt.next_at is not None
        assert attempt.next_at > now
        now, tried = attempt.next_at, tried + 1

    assert now == NOW + GIVE_UP, "the last try is when the day is over"
    assert 15 <= tried <= 25
    assert attempt.error == "no"
    assert attempt.next_at is None


def test_what_is_told_of_a_failure_is_bounded() -> None:
    assert len(webhooks.failed(delivery(), NOW + timedelta(days=2), "x" * 10**6).error) == 500
