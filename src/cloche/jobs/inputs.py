"""Files that a job is given: put into its machine before the first step."""

from __future__ import annotations

from cloche.core.blobs import Blobs, artifacts_key, upload_key
from cloche.core.errors import NoSuchFile
from cloche.core.job import Input, Request
from cloche.jobs.steps import decode
from cloche.sandbox import archives
from cloche.sandbox.sandbox import Sandbox


async def place(sandbox: Sandbox, request: Request, blobs: Blobs) -> None:
    """Put every input file in its place. Done again, it does no harm.

    Raises:
        UserError, LimitReached: which one cannot be had or placed, and why.
        StoreUnavailable: the blob store does not answer.
    """
    for given in request.files:
        if given.content is not None:
            await sandbox.files.write(given.path, decode(given.content, given.encoding, given.path))
        else:
            await _copy(sandbox, given, blobs)


async def _copy(sandbox: Sandbox, given: Input, blobs: Blobs) -> None:
    of_job = given.job is not None
    key = artifacts_key(given.job) if given.job else upload_key(given.upload or "")
    blob = await blobs.find(key)
    if blob is None:
        source = f"Job {given.job} left no files" if of_job else f"Upload {given.upload} is gone"
        raise NoSuchFile(f"{source}.", remedy="Check the id; uploads are forgotten after a while.")
    if of_job or given.unpack:
        await archives.unpack_zip(sandbox, blobs.read(blob), given.path)
    else:
        await sandbox.files.write(given.path, blobs.read(blob))
