"""What each kind of step does on a machine.

A step is either a process, which can be followed and taken up again after a
restart, or a file call, which is done in a moment and can be done again.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cloche.core.errors import BadRequest
from cloche.core.job import (
    CodeStep,
    ListFiles,
    MoveFile,
    ReadFile,
    RemoveFile,
    ShellStep,
    Step,
    WriteFile,
)
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

READ_BYTES = 1024 * 1024
"""What a `read_file` step prints at most; the file itself is among the artifacts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every step of a job shares."""

    env: Mapping[str, str]
    timeout_s: float


async def start(
    sandbox: Sandbox, step: ShellStep | CodeStep, settings: Settings, process_id: str
) -> Process:
    """Start a step's process under an id that was written down before."""
    timeout_s = min(step.timeout_s or settings.timeout_s, settings.timeout_s)
    language = "bash" if isinstance(step, ShellStep) else step.tool
    code = step.command if isinstance(step, ShellStep) else step.code
    return await sandbox.start_code(
        language, code, env=settings.env, timeout_s=timeout_s, process_id=process_id
    )


async def do(sandbox: Sandbox, step: Step) -> bytes:
    """Carry out a file call; return what it prints."""
    files = sandbox.files
    match step:
        case WriteFile():
            await files.write(step.path, decode(step.content, step.encoding, step.path))
        case ReadFile():
            return await files.read(step.path, limit=READ_BYTES)
        case ListFiles():
            entries = (await files.list(step.path)).entries
            return "".join(f"{entry.size:>12} {entry.path}\n" for entry in entries).encode()
        case MoveFile():
            await files.move(step.path, step.to)
        case RemoveFile():
            await files.remove(step.path, recursive=True)
        case _:
            raise AssertionError(f"{step.tool} is a process")
    return b""


def decode(content: str, encoding: Literal["utf-8", "base64"], path: str) -> bytes:
    """Return the bytes of a file that came as text.

    Raises:
        BadRequest: it is not in that encoding.
    """
    try:
        if encoding == "utf-8":
            return content.encode()
        return binascii.a2b_base64(content, strict_mode=True)
    except UnicodeEncodeError:
        raise BadRequest(
            f"The content of {path} holds half a character.",
            remedy="Send whole characters, or bytes with encoding base64.",
        ) from None
    except ValueError as error:  # binascii.Error is one; text beyond ASCII is a plain one.
        raise BadRequest(
            f"The content of {path} is not base64: {error}.",
            remedy="Encode it with base64, or send it as text with encoding utf-8.",
        ) from None
