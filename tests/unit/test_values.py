"""The core's values: specs, rungs, exits, errors."""

from __future__ import annotations

import inspect
import itertools
import signal

import pytest

from cloche.core import errors
from cloche.core.errors import BadRequest, ClocheError
from cloche.core.process import ExecResult, Exit
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec

BOUNDS = {
    "vcpus": (1, 256),
    "memory_mib": (64, 1 << 20),
    "disk_mib": (64, 4 << 20),
    "pids": (32, 32768),
}


def exit_of(code: int, **more: object) -> Exit:
    return Exit(code=code, duration_s=1.0, cpu_s=0.5, max_rss_kib=10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items())
def test_a_spec_takes_its_bounds_and_nothing_beyond(name: str, bounds: tuple[int, int]) -> None:
    low, high = bounds
    for fine in bounds:
        assert getattr(SandboxSpec(**{name: fine}), name) == fine  # type: ignore[arg-type]

    for value in (low - 1, high + 1, 0, -1, float(low), str(low), True, None):
        with pytest.raises(BadRequest, match=name):
            SandboxSpec(**{name: value})  # type: ignore[arg-type]


def test_a_spec_needs_the_name_of_an_image() -> None:
    with pytest.raises(BadRequest, match="image"):
        SandboxSpec(image="")


def test_equal_specs_are_one_to_a_pool() -> None:
    assert {SandboxSpec(): "pool"}[SandboxSpec(vcpus=2)] == "pool"
    assert SandboxSpec() != SandboxSpec(vcpus=3)


def test_rungs_are_listed_strongest_first() -> None:
    assert [str(rung) for rung in Rung] == ["firecracker", "qemu", "gvisor", "container", "docker"]


def test_a_rung_is_as_strong_as_itself_and_those_below() -> None:
    for (place, rung), (other, minimum) in itertools.product(enumerate(Rung), repeat=2):
        assert rung.at_least(minimum) == (place <= other), (rung, minimum)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (exit_of(0), "exit code 0"),
        (exit_of(3), "exit code 3"),
        (exit_of(137), "exit code 137"),
        (exit_of(139, signal=signal.SIGSEGV), "killed by SIGSEGV"),
        (exit_of(137, signal=9), "killed by SIGKILL"),
        (exit_of(128 + 40, signal=40), "killed by signal 40"),
        (exit_of(137, signal=9, timed_out=True), "timed out"),
    ],
)
def test_an_end_is_told_in_a_few_words(ended: Exit, words: str) -> None:
    assert ended.reason == words


def test_output_that_is_not_utf_8_is_shown_as_far_as_it_is() -> None:
    result = ExecResult(exit=exit_of(4), stdout_bytes=b"caf\xe9", stderr_bytes="ñ".encode())

    assert (result.stdout, result.stderr, result.exit_code) == ("caf\ufffd", "ñ", 4)


def every_error() -> list[type[ClocheError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, ClocheError)
    ]


def test_every_error_says_who_must_act() -> None:
    groups = (
        errors.UserError,
        errors.OperatorError,
        errors.TransientError,
        errors.LimitReached,
    )

    strays = [
        kind.__name__
        for kind in every_error()
        if kind is not ClocheError and not issubclass(kind, groups)
    ]
    assert strays == []


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_carries_a_message_and_a_remedy(kind: type[ClocheError]) -> None:
    error = kind("What is wrong.", remedy="What to do.")

    assert (str(error), error.message, error.remedy) == (
        "What is wrong.", "What is wrong.", "What to do.",
    )  # fmt: skip
