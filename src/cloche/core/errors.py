"""Every error Cloche raises on purpose, grouped by who must act on it.

    ClocheError
    ├── UserError              fix the request
    │   ├── BadRequest
    │   ├── RequestTooLarge
    │   ├── UnknownLanguage
    │   ├── CommandNotStarted
    │   ├── NoSuchFile
    │   ├── PathRefused
    │   ├── FileRefused
    │   ├── NoSuchProcess
    │   ├── ProcessExists
    │   ├── InputClosed
    │   ├── NoSuchMachine
    │   ├── MachinePaused
    │   ├── ImageMissing
    │   ├── PortClosed
    │   ├── PortTaken
    │   ├── RungUnavailable
    │   ├── NoSuchSandbox
    │   ├── SandboxElsewhere
    │   ├── NoSuchJob
    │   ├── JobNotOver
    │   ├── NoSuchKey
    │   ├── NoSuchUpload
    │   ├── RangeRefused
    │   ├── NotAuthenticated
    │   ├── NotAllowed
    │   ├── AgentMissing
    │   ├── LimitsOverQuota
    │   ├── QuotaExceeded
    │   ├── RateLimited
    │   └── IdempotencyConflict
    ├── OperatorError          fix the host or its settings
    │   ├── BackendUnavailable
    │   ├── BadSettings
    │   ├── ImageCorrupt
    │   ├── ImageBuildFailed
    │   ├── MachineNotStarted
    │   └── MachineNotDestroyed
    ├── TransientError         try again, on another machine if need be
    │   ├── SandboxLost
    │   ├── GuestMisbehaved
    │   ├── LeaseLost
    │   ├── ServerUnreachable
    │   ├── NotReady
    │   └── StoreUnavailable
    └── LimitReached           the caller decides what a limit means
        ├── CommandTimeout
        ├── OutputTooLarge
        ├── ReplyTooLarge
        └── MachineFull

`code` is stable and documented in `docs/reference/errors.md`; the message is not.
"""

from __future__ import annotations

from typing import ClassVar


class ClocheError(Exception):
    """What went wrong, and what to do about it."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class UserError(ClocheError):
    """The request cannot be served as it stands; the caller can mend it."""

    code = "user_error"


class OperatorError(ClocheError):
    """The host or its settings stand in the way; whoever runs Cloche can mend it."""

    code = "operator_error"


class TransientError(ClocheError):
    """Nobody did anything wrong; the same request may work again."""

    code = "transient_error"


class LimitReached(ClocheError):
    """A bound the caller set, or left at its default, was reached."""

    code = "limit_reached"


class BadRequest(UserError):
    """A value is malformed or out of range."""

    code = "bad_request"


class RequestTooLarge(UserError):
    """More was sent than the call takes."""

    code = "request_too_large"


class UnknownLanguage(UserError):
    """`run_code` was asked for a language no machine speaks."""

    code = "unknown_language"


class CommandNotStarted(UserError):
    """The program does not exist, may not be run, or its folder is missing."""

    code = "command_not_started"


class NoSuchFile(UserError):
    """Nothing is at that path in the machine, or among what a job left behind."""

    code = "no_such_file"


class PathRefused(UserError):
    """The path lies outside what the machine's user may touch, or leads there by a link."""

    code = "path_refused"


class FileRefused(UserError):
    """The machine's kernel refused the file call: a folder where a file is wanted, say."""

    code = "file_refused"


class NoSuchProcess(UserError):
    """The machine does not know that process id, or has forgotten it."""

    code = "no_such_process"


class NoSuchMachine(UserError):
    """No machine of that id is alive on this host."""

    code = "no_such_machine"


class MachinePaused(UserError):
    """The machine stands still and cannot answer."""

    code = "machine_paused"


class ProcessExists(UserError):
    """A process of that id was started before."""

    code = "process_exists"


class InputClosed(UserError):
    """The process no longer reads what it is sent."""

    code = "input_closed"


class ImageMissing(UserError):
    """The machine image has not been built on this host."""

    code = "image_missing"


class PortClosed(UserError):
    """Nobody listens there inside the machine."""

    code = "port_closed"


class PortTaken(UserError):
    """A program in the machine listens on a port that the guest needs."""

    code = "port_taken"


class RungUnavailable(UserError):
    """The host's isolation is weaker than what was demanded; nothing was run on it."""

    code = "rung_unavailable"


class NoSuchSandbox(UserError):
    """There is no sandbox of that id, or it is no more, or it is not this tenant's."""

    code = "no_such_sandbox"


class SandboxElsewhere(UserError):
    """The machine is on another host, and only the server there can reach into it."""

    code = "sandbox_elsewhere"


class NoSuchJob(UserError):
    """There is no job of that id, or it is not this tenant's."""

    code = "no_such_job"


class JobNotOver(UserError):
    """The job has not ended, and so cannot be deleted or built upon."""

    code = "job_not_over"


class NoSuchKey(UserError):
    """There is no API key of that id."""

    code = "no_such_key"


class NoSuchUpload(UserError):
    """There is no upload of that id, or it is not this tenant's."""

    code = "no_such_upload"


class RangeRefused(UserError):
    """The range asked for lies behind the end of the file."""

    code = "range_refused"


class NotAuthenticated(UserError):
    """The request carries no key, or one that opens nothing."""

    code = "not_authenticated"


class NotAllowed(UserError):
    """The key does not open this, or the request comes from where it must not."""

    code = "not_allowed"


class AgentMissing(UserError):
    """A task in plain words needs an agent, and there is none."""

    code = "agent_missing"


class IdempotencyConflict(UserError):
    """The idempotency key was used before, for another request."""

    code = "idempotency_conflict"


class LimitsOverQuota(UserError):
    """The machine or time asked for is larger than this tenant may have."""

    code = "limits_over_quota"


class QuotaExceeded(UserError):
    """The tenant has as much as it may have; nothing was stored."""

    code = "quota_exceeded"

    def __init__(
        self,
        message: str,
        *,
        remedy: str,
        quota: str = "",
        used: float = 0,
        limit: float = 0,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.quota = quota
        self.used = used
        self.limit = limit
        self.retry_after_s = retry_after_s


class RateLimited(UserError):
    """Too many requests, or too many wrong keys, in too short a time."""

    code = "rate_limited"

    def __init__(self, message: str, *, remedy: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class BackendUnavailable(OperatorError):
    """This host cannot give the isolation asked for."""

    code = "backend_unavailable"


class BadSettings(OperatorError):
    """A setting does not make sense on this host."""

    code = "bad_settings"


class ImageCorrupt(OperatorError):
    """The machine image is damaged."""

    code = "image_corrupt"


class ImageBuildFailed(OperatorError):
    """The machine image could not be built."""

    code = "image_build_failed"


class MachineNotStarted(OperatorError):
    """The backend could not bring a machine up; nothing is left of it."""

    code = "machine_not_started"


class MachineNotDestroyed(OperatorError):
    """Something of a machine outlived its destruction."""

    code = "machine_not_destroyed"


class SandboxLost(TransientError):
    """The machine is gone; the fate of what ran in it is unknown."""

    code = "sandbox_lost"


class GuestMisbehaved(TransientError):
    """The guest sent what it never would: treat the machine as hostile and destroy it."""

    code = "guest_misbehaved"


class LeaseLost(TransientError):
    """Another worker has the job now, or it is over: stop working on it."""

    code = "lease_lost"


class ServerUnreachable(TransientError):
    """No server answers at the address."""

    code = "server_unreachable"


class NotReady(TransientError):
    """The server is up, but its worker does not look at the queue."""

    code = "not_ready"


class StoreUnavailable(TransientError):
    """The database or the blob store cannot be reached."""

    code = "store_unavailable"


class CommandTimeout(LimitReached):
    """The command ran out of time; its whole process tree is dead."""

    code = "command_timeout"

    def __init__(
        self, message: str, *, remedy: str, stdout: bytes = b"", stderr: bytes = b""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.stdout = stdout
        self.stderr = stderr


class OutputTooLarge(LimitReached):
    """The command wrote more than the caller allowed; its whole process tree is dead."""

    code = "output_too_large"

    def __init__(
        self, message: str, *, remedy: str, stdout: bytes = b"", stderr: bytes = b""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.stdout = stdout
        self.stderr = stderr


class ReplyTooLarge(LimitReached):
    """A file or listing is larger than the caller allowed."""

    code = "reply_too_large"


class MachineFull(LimitReached):
    """The machine has no process slot, disk or memory left for the request."""

    code = "machine_full"
