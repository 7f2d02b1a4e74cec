"""The documents' own examples, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/tutorial/first-sandbox.md"]


def consoles() -> list[tuple[str, str]]:
    """Return every `cloche exec` of the documents that shows what it prints."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL):
            for command, shown in re.findall(r"\$ ([^\n]+)\n((?:[^$\n][^\n]*\n)+)", block):
                if "cloche exec" in command:
                    found.append((command.partition("  #")[0].strip(), shown))
    return found


def test_there_are_examples() -> None:
    assert len(consoles()) >= 5


@pytest.mark.parametrize(("command", "shown"), consoles(), ids=lambda text: text[:60])
def test_a_command_of_the_documents_prints_what_they_show(command: str, shown: str) -> None:
    ready = command.replace(".venv/bin/cloche", f"{Path(sys.executable).parent}/cloche")
    done = subprocess.run(
        ["bash", "-c", ready],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.stdout == shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_python_of_the_documents_runs(document: Path, data: Path) -> None:
    blocks = re.findall(r"```python\n(import.*?)```", document.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block],
            env={**os.environ, "CLOCHE_DATA": str(data)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
