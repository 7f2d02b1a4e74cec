"""What a quota lets through, and what it says when it does not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from cloche import settings
from cloche.api import problems
from cloche.core.errors import BadSettings, LimitsOverQuota, QuotaExceeded, RateLimited
from cloche.core.quota import Month, Quota

MIB = 1 << 20
SMALL = {"vcpus": 1, "memory_mib": 64, "disk_mib": 64, "wall_s": 1.0}


def test_the_last_place_may_be_taken_and_no_more() -> None:
    quota = Quota(jobs=2, sandboxes=3)
    quota.check_jobs(1)
    quota.check_sandboxes(2)
    with pytest.raises(QuotaExceeded, match="2 jobs"):
        quota.check_jobs(2)
    with pytest.raises(QuotaExceeded, match="3 sandboxes"):
        quota.check_sandboxes(3)


def test_storage_may_be_filled_to_the_last_byte() -> None:
    quota = Quota(storage_mib=1)
    quota.check_storage(MIB - 1)
    quota.check_storage(0, MIB)
    for held, more in ((MIB, 0), (0, MIB + 1), (MIB - 1, 2)):
        with pytest.raises(QuotaExceeded):
            quota.check_storage(held, more)


@pytest.mark.parametrize("name", SMALL)
def test_a_size_over_the_quota_names_what_would_do(name: str) -> None:
    quota = Quota.model_validate({f"max_{name}": 100})
    quota.check_machine(**{**SMALL, name: 100})  # type: ignore[arg-type]

    with pytest.raises(LimitsOverQuota, match=f"{name} is 101") as refused:
        quota.check_machine(**{**SMALL, name: 101})  # type: ignore[arg-type]

    assert f"{name} <= 100" in refused.value.remedy


def test_no_limit_is_no_limit() -> None:
    quota = Quota.model_validate(
        dict.fromkeys(("jobs", "sandboxes", "cpu_s", "storage_mib", "requests_per_s", "max_wall_s"))
    )
    quota.check_jobs(10**9)
    quota.check_sandboxes(10**9)
    quota.check_storage(10**18, 10**18)
    quota.check_cpu(1e12, datetime.now(UTC))


def test_nothing_may_be_had_of_a_quota_of_zero() -> None:
    quota = Quota(jobs=0, sandboxes=0, cpu_s=0, storage_mib=0)
    for check in (
        lambda: quota.check_jobs(0),
        lambda: quota.check_sandboxes(0),
        lambda: quota.check_storage(0),
        lambda: quota.check_cpu(0, datetime.now(UTC)),
    ):
        with pytest.raises(QuotaExceeded):
            check()


def test_a_tenants_values_lie_over_the_default() -> None:
    default = Quota(jobs=5, sandboxes=6)

    assert default.overlaid({"jobs": None, "cpu_s": 3}) == Quota(jobs=None, sandboxes=6, cpu_s=3)


@pytest.mark.parametrize(
    "values",
    [{"jobs": -1}, {"burst": 0}, {"requests_per_s": 0}, {"cpu_s": float("nan")}, {"colour": 1}],
    ids=str,
)
def test_a_quota_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Quota.model_validate(values)


@pytest.mark.parametrize(
    ("moment", "since", "until"),
    [
        (datetime(2024, 2, 29, tzinfo=UTC), (2024, 2), (2024, 3)),
        (datetime(2025, 12, 31, 23, 59, tzinfo=UTC), (2025, 12), (2026, 1)),
        (datetime(2025, 1, 31, tzinfo=UTC), (2025, 1), (2025, 2)),
        (
            datetime(2025, 3, 1, 1, tzinfo=timezone(timedelta(hours=2))),
            (2025, 2),
            (2025, 3),
        ),
    ],
)
def test_a_month_is_a_calendars_in_utc(
    moment: datetime, since: tuple[int, int], until: tuple[int, int]
) -> None:
    month = Month.of(moment)
    assert (month.since, month.until) == (
        datetime(*since, 1, tzinfo=UTC),
        datetime(*until, 1, tzinfo=UTC),
    )


def test_spent_time_says_when_the_next_month_begins() -> None:
    now = datetime(2025, 12, 31, 23, 0, tzinfo=UTC)

    with pytest.raises(QuotaExceeded) as refused:
        Quota(cpu_s=10).check_cpu(10.5, now)

    assert refused.value.retry_after_s == 3600
    answer = problems.problem(refused.value)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3600")
    assert b'"quota":"cpu_s","used":10.5,"limit":10.0' in bytes(answer.body)


def test_a_wait_is_told_in_whole_seconds() -> None:
    answer = problems.problem(RateLimited("Too fast.", remedy="Wait.", retry_after_s=0.2))

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("value", "said"),
    [('{"jobs": -1}', "CLOCHE_QUOTA: jobs: "), ("{", "CLOCHE_QUOTA is not JSON"), ("[]", "QUOTA")],
)
def test_a_bad_default_is_told_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.setenv("CLOCHE_QUOTA", value)
    with pytest.raises(BadSettings, match=said):
        settings.load()


def test_the_default_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCHE_QUOTA", '{"jobs": 3, "sandboxes": null}')
    assert settings.load().quota == Quota(jobs=3, sandboxes=None)
