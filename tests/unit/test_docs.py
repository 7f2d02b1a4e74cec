"""What is not documented does not ship."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import typer.main
from fastapi.routing import APIRoute

import cloche
from cloche.api.server import ROUTERS
from cloche.cli.commands import app
from cloche.core import errors
from cloche.core.job import Reason
from cloche.observe.metrics import Metrics
from cloche.sandbox.client import _REFUSALS
from cloche.sandbox.files import Files
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import LANGUAGES, Sandbox
from cloche.settings import Settings

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def error_classes() -> list[type[errors.ClocheError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.ClocheError)
    ]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name: str) -> None:
    assert f"`CLOCHE_{name.upper()}`" in (REFERENCE / "settings.md").read_text()


@pytest.mark.parametrize("kind", error_classes()[1:], ids=lambda kind: kind.code)
def test_every_error_code_is_documented(kind: type[errors.ClocheError]) -> None:
    assert f"| `{kind.code}` | `{kind.__name__}` |" in (REFERENCE / "errors.md").read_text()


def test_error_codes_are_unique() -> None:
    codes = [kind.code for kind in error_classes()]
    assert len(codes) == len(set(codes)), codes


def test_the_error_tree_in_the_docstring_is_complete() -> None:
    drawn = set(re.findall(r"── (\w+)", errors.__doc__ or ""))
    assert drawn == {kind.__name__ for kind in error_classes()} - {"ClocheError"}


def commands() -> list[tuple[str, list[str]]]:
    group = typer.main.get_command(app)
    found = []

    def walk(command: object, path: str) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}")
        if not getattr(command, "commands", None):
            options = [
                option
                for parameter in command.params  # type: ignore[attr-defined]
                for option in parameter.opts
                if option.startswith("--") and option != "--help"
            ]
            found.append((path, options))

    walk(group, "cloche")
    return found


@pytest.mark.parametrize(("command", "options"), commands(), ids=str)
def test_every_command_and_option_is_documented(command: str, options: list[str]) -> None:
    text = (REFERENCE / "cli.md").read_text()
    assert f"`{command}`" in text
    for option in options:
        assert f"`{option}" in text, f"{command} {option}"


@pytest.mark.parametrize("kind", [Sandbox, Process, Files])
def test_every_call_of_the_library_is_documented(kind: type) -> None:
    text = (REFERENCE / "library.md").read_text()
    internal = {"start_on", "hello", "machine", "id", "rung", "spec", "exit"}
    for name in vars(kind):
        if not name.startswith("_") and name not in internal:
            assert re.search(rf"`{name}\b", text), f"{kind.__name__}.{name}"


def test_every_call_of_the_guest_is_documented() -> None:
    source = (ROOT / "src/cloche/guest/server.py").read_text()
    calls = re.findall(r'\("(GET|POST|PUT|DELETE)", f?"?([^",]+)"?,', source)
    assert len(calls) > 20, calls
    text = (REFERENCE / "guest.md").read_text()
    for method, path in calls:
        shown = path.replace("{process}", "/processes/ID").replace("process", "processes/ID", 0)
        shown = "/processes/ID" if shown == "process" else shown
        assert f"| `{method} {shown}` |" in text, f"{method} {path}"


def test_every_refusal_of_the_guest_is_documented_and_known_to_the_host() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/cloche/guest").glob("*.py"))
    codes = set(re.findall(r'(?:Refusal|__init__)\(\d+, "(\w+)"', sources))
    assert len(codes) > 8, codes
    text = (REFERENCE / "guest.md").read_text()
    assert {code for code in codes if f"`{code}`" not in text} == set()
    assert codes - set(_REFUSALS) == {"no_such_call"}


def test_every_call_of_the_api_is_documented() -> None:
    text = (REFERENCE / "api.md").read_text()
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods:
                shown = route.path.replace("{path:path}", "{path}")
                assert f"| `{method} {shown}` |" in text, f"{method} {route.path}"


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    text = (ROOT / "docs/how-to/observe.md").read_text()
    documented = set(re.findall(r"^\| `((?:cloche|process)_\w+)` \|", text, re.MULTILINE))
    families = Metrics(version="0", rung="container").registry.collect()

    names = {
        f"{family.name}{'_total' if family.type == 'counter' else ''}"
        f"{'_info' if family.type == 'info' else ''}"
        for family in families
    }
    assert documented == names


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_for_a_jobs_end_is_documented(reason: Reason) -> None:
    assert f"| `{reason}` |" in (REFERENCE / "api.md").read_text()


def test_every_language_is_documented() -> None:
    text = (REFERENCE / "library.md").read_text()
    assert all(f"`{language}`" in text for language in LANGUAGES)


def test_the_public_surface_is_small_and_loads() -> None:
    assert sorted(cloche.__all__) == ["ClocheError", "ExecResult", "Sandbox", "__version__"]
    assert all(getattr(cloche, name) for name in cloche.__all__)


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, cloche; print([m for m in sys.modules if m.startswith('cloche.')])"
    python = ROOT / ".venv/bin/python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_links_in_the_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert documents
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_lock_file_names_a_host() -> None:
    locks = [
        *ROOT.glob("requirements/*.txt"),
        *ROOT.glob("image/**/*.txt"),
        *ROOT.glob("image/**/*lock*.json"),
    ]
    assert len(locks) > 4
    for lock in locks:
        assert "://" not in lock.read_text(), lock
