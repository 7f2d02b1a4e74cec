"""What stands in the paths of calls."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from cloche.api.answers import access, jobs, sandboxes, tenants, uploads

JobId = Annotated[str, Path(examples=[jobs.ID])]
SandboxId = Annotated[str, Path(examples=[sandboxes.ID])]
ProcessId = Annotated[str, Path(examples=[sandboxes.PROCESS_ID])]
UploadId = Annotated[str, Path(examples=[uploads.ID])]
KeyId = Annotated[str, Path(examples=[access.KEY_ID])]
TenantName = Annotated[
    str, Path(min_length=1, max_length=64, pattern=r"^[\w.\-]+$", examples=[tenants.NAME])
]
