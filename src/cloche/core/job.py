"""What someone asked for, and what came of it.

A request is checked here as a whole, before anything is stored: whoever sends
it learns what is wrong, and nothing is left behind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cloche.core.network import Network, also_short
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.core.webhook import Webhook, also_a_text

MAX_CODE = 1_000_000
MAX_TASK = 100_000
MAX_STEPS = 1000
MAX_SECONDS = 7 * 24 * 3600
MAX_PATH = 4096
ROOTS = ("/workspace", "/home/user", "/tmp")  # noqa: S108 - places in a machine


class State(enum.StrEnum):
    """Where a job is in its life. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Reason(enum.StrEnum):
    """Why a job ended as it did."""

    DONE = "done"
    EXIT_CODE = "exit_code"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    SILENT = "silent"
    """A step wrote nothing for too long."""
    CPU = "cpu"
    """The job used up its processor time."""
    BAD_STEP = "bad_step"
    NOT_STARTED = "not_started"
    LOST_MACHINE = "lost_machine"
    CANCELLED = "cancelled"
    FAULT = "fault"
    """Cloche's own."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _whole_path(path: str) -> str:
    pure = PurePosixPath("/workspace", path)
    if ".." in pure.parts:
        raise ValueError("leads upwards with `..`")
    if not any(pure.is_relative_to(root) for root in ROOTS):
        raise ValueError(f"lies outside {', '.join(ROOTS)}")
    if len(str(pure)) > MAX_PATH:
        raise ValueError(f"is longer than {MAX_PATH} characters, with the folder it begins in")
    return str(pure)


Text = Annotated[str, AfterValidator(_no_nul)]
Code = Annotated[Text, Field(min_length=1, max_length=MAX_CODE)]
Path = Annotated[Text, Field(min_length=1, max_length=MAX_PATH), AfterValidator(_whole_path)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Label = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.\-/]+$")]
Variable = Annotated[Text, Field(min_length=1, max_length=256, pattern=r"^[^=]+$")]
Env = Annotated[dict[Variable, Text], Field(max_length=256)]
Labels = Annotated[dict[Label, Annotated[str, Field(max_length=256)]], Field(max_length=64)]


class Value(BaseModel):
    """A checked value. An unknown field is a mistake, and told as one."""

    # An error's text may be logged, and must not quote what someone sent.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ShellStep(Value):
    """Run a line of bash."""

    tool: Literal["shell"]
    command: Code
    timeout_s: Seconds | None = None


class CodeStep(Value):
    """Run code as a program of its own."""

    tool: Literal["python", "typescript", "javascript"]
    code: Code
    timeout_s: Seconds | None = None


class WriteFile(Value):
    """Put a file into the machine."""

    tool: Literal["write_file"]
    path: Path
    content: Annotated[str, Field(max_length=10_000_000)]
    encoding: Literal["utf-8", "base64"] = "utf-8"


class ReadFile(Value):
    """Print a file."""

    tool: Literal["read_file"]
    path: Path


class ListFiles(Value):
    """Print what is in a folder."""

    tool: Literal["list_files"]
    path: Path = "/workspace"


class MoveFile(Value):
    """Give a file or folder another name."""

    tool: Literal["move_file"]
    path: Path
    to: Path


class RemoveFile(Value):
    """Remove a file, or a folder with all that is in it."""

    tool: Literal["remove_file"]
    path: Path


Step = Annotated[
    ShellStep | CodeStep | WriteFile | ReadFile | ListFiles | MoveFile | RemoveFile,
    Field(discriminator="tool"),
]


class Input(Value):
    """A file for the job: its content, an upload, or what an earlier job left behind."""

    path: Path
    """Where it goes; the folder to unpack into, for a zip."""
    content: Annotated[str, Field(max_length=10_000_000)] | None = None
    encoding: Literal["utf-8", "base64"] = "utf-8"
    upload: Id | None = None
    unpack: bool = False
    """The upload is a zip: unpack it."""
    job: Id | None = None
    """The job whose artifacts are unpacked."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        given = [name for name in ("content", "upload", "job") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a file is one of content, upload or job; here are {given or 'none'}")
        if self.unpack and self.upload is None:
            raise ValueError("unpack goes with upload")
        return self


class Size(Value):
    """How large a machine is."""

    vcpus: Annotated[int, Field(ge=1, le=256)] = 2
    memory_mib: Annotated[int, Field(ge=64, le=1 << 20)] = 2048
    disk_mib: Annotated[int, Field(ge=64, le=4 << 20)] = 8192
    pids: Annotated[int, Field(ge=32, le=32768)] = 1024

    def spec(self, image: str) -> SandboxSpec:
        return SandboxSpec(
            image=image,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            disk_mib=self.disk_mib,
            pids=self.pids,
        )


class Limits(Size):
    """How large the job's machine is, and how long the job may take."""

    wall_s: Seconds = 3600
    silent_s: Seconds | None = None
    """How long a step may go without writing anything."""
    cpu_s: Seconds | None = None
    """How much processor time the job may use, on all processors together."""


class Request(Value):
    """One job: a task in plain words, or code, or steps; and how to run it."""

    task: Annotated[Text, Field(min_length=1, max_length=MAX_TASK)] | None = None
    kind: Literal["shell", "python", "typescript", "javascript"] | None = None
    code: Code | None = None
    steps: Annotated[list[Step], Field(min_length=1, max_length=MAX_STEPS)] | None = None

    files: Annotated[list[Input], Field(max_length=1000)] = []
    """What the job finds in its machine before its first step."""
    image: Annotated[str, Field(min_length=1, max_length=128)] = "base"
    limits: Limits = Limits()
    min_rung: Rung | None = None
    env: Env = {}
    network: Annotated[Network, Field(json_schema_extra=also_short)] = Network()
    """What the job's machine may connect to; nothing unless it is said."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    """How often the job is run again when its machine is lost."""
    labels: Labels = {}
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    keep_alive_s: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 0
    """How long the job's machine stands on after its end, as a sandbox."""
    artifacts: Annotated[list[Text], Field(min_length=1, max_length=100)] = ["**"]
    """Globs below /workspace: what is kept."""
    webhook: Annotated[Webhook | None, Field(json_schema_extra=also_a_text)] = None
    """Whom to tell when the job starts or ends."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        given = [
            name
            for name, value in (("task", self.task), ("code", self.code), ("steps", self.steps))
            if value is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"a job is one of task, kind + code, or steps; here are {given or 'none of them'}"
            )
        if (self.kind is None) != (self.code is None):
            raise ValueError("kind and code go together")
        return self

    def actions(self) -> list[Step]:
        """Return the steps to run; a task has none until an agent invents them."""
        if self.steps is not None:
            return self.steps
        if self.code is None or self.kind is None:
            return []
        if self.kind == "shell":
            return [ShellStep(tool="shell", command=self.code)]
        return [CodeStep(tool=self.kind, code=self.code)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that was accepted, and what has become of it."""

    id: str
    tenant: str
    request: Request
    state: State
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = 0
    """How often a worker has taken it up."""
    reason: Reason | None = None
    exit_code: int | None = None
    error: str = ""
    """A sentence for people, when it failed."""
    cancel_requested: bool = False
    worker: str = ""
    """Who holds it, while it runs."""
    machine: str = ""
    rung: Rung | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of a job ended."""

    state: State
    reason: Reason
    exit_code: int | None = None
    error: str = ""
