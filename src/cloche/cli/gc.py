"""`cloche gc`: forgets what is past its time, straight in the stores."""

from __future__ import annotations

import sys
from dataclasses import asdict

from cloche import settings
from cloche.cli.show import print_json
from cloche.upkeep import opened


async def gc(*, as_json: bool) -> None:
    """Do once what a server does every few minutes, and say what went."""
    async with opened(settings.load()) as retention:
        removed = await retention.collect()
    if as_json:
        print_json(asdict(removed))
    else:
        sys.stdout.write(
            f"Forgot: jobs {removed.jobs}, uploads {removed.uploads},"
            f" stray blobs {removed.orphans}; {removed.bytes} bytes in all.\n"
        )
