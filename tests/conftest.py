"""What every test run shares: the list of what must not be skipped."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--required",
        type=Path,
        metavar="FILE",
        help="node id prefixes, one a line; a skip of one of these is a failure",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail") and _is_required(item):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} must run here, but was skipped: {report.longrepr}"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail a full run in which something on the list was not even collected."""
    if session.config.option.required is None or session.config.option.collectonly:
        return
    found = [item.nodeid for item in session.items]
    absent = [
        prefix
        for prefix in _required(session.config)
        if not any(node.startswith(prefix) for node in found)
    ]
    if absent:
        raise pytest.UsageError(f"required, but not collected: {', '.join(absent)}")


def _is_required(item: pytest.Item) -> bool:
    return any(item.nodeid.startswith(prefix) for prefix in _required(item.config))


def _required(config: pytest.Config) -> list[str]:
    file: Path | None = config.option.required
    if file is None:
        return []
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]
