"""The checks that every backend must pass.

A backend's author puts them into one module of their own tests:

    from cloche.testing.conformance import *
    from cloche.testing.maker import Maker

    @pytest.fixture(scope="session")
    def maker(tmp_path_factory):
        return Maker(factory="my.backend:Backend", data=tmp_path_factory.mktemp("data"))

    @pytest.fixture(scope="session")
    def image():
        return Images(Path("/var/lib/cloche")).find()

`maker.factory` is called with the data folder, here and in other processes that
the checks start and kill. Where machines are slow, under emulation say, define a
fixture `time_scale` of session scope that returns by how much.

The checks use what the protocols offer and no more. What a backend leaves on its
host, such as cgroups or devices, is for the backend's own tests to prove.
"""

import pytest

# Or a failed check would not show the values it compared. Before the imports, and
# not by the package's own name: pytest rewrites what is not imported yet.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{theme}"
        for theme in (
            "archives", "code", "commands", "confinement", "files", "isolation", "lifecycle",
            "limits", "output", "searching", "stdin", "terminals", "tunnels", "watching",
        )
    )
)  # fmt: skip

from cloche.testing.conformance.archives import TestArchives  # noqa: E402
from cloche.testing.conformance.code import TestCode  # noqa: E402
from cloche.testing.conformance.commands import TestCommands, TestUser  # noqa: E402
from cloche.testing.conformance.confinement import TestConfinement  # noqa: E402
from cloche.testing.conformance.files import TestFiles  # noqa: E402
from cloche.testing.conformance.fixtures import (  # noqa: E402
    backend,
    folder,
    new_sandbox,
    sandbox,
    time_scale,
)
from cloche.testing.conformance.isolation import TestIsolation, neighbour  # noqa: E402
from cloche.testing.conformance.lifecycle import (  # noqa: E402
    TestDestroying,
    TestOutliving,
    TestPausing,
    TestSweeping,
    owners,
)
from cloche.testing.conformance.limits import (  # noqa: E402
    TestCancellation,
    TestMachineBounds,
    TestOutputBounds,
    TestTimeouts,
)
from cloche.testing.conformance.output import TestAttaching, TestEnding, TestOutput  # noqa: E402
from cloche.testing.conformance.searching import TestGlob, TestGrep  # noqa: E402
from cloche.testing.conformance.stdin import TestInput  # noqa: E402
from cloche.testing.conformance.terminals import TestTerminals  # noqa: E402
from cloche.testing.conformance.tunnels import TestTunnels  # noqa: E402
from cloche.testing.conformance.watching import TestWatch  # noqa: E402

__all__ = [
    "TestArchives",
    "TestAttaching",
    "TestCancellation",
    "TestCode",
    "TestCommands",
    "TestConfinement",
    "TestDestroying",
    "TestEnding",
    "TestFiles",
    "TestGlob",
    "TestGrep",
    "TestInput",
    "TestIsolation",
    "TestMachineBounds",
    "TestOutliving",
    "TestOutput",
    "TestOutputBounds",
    "TestPausing",
    "TestSweeping",
    "TestTerminals",
    "TestTimeouts",
    "TestTunnels",
    "TestUser",
    "TestWatch",
    "backend",
    "folder",
    "neighbour",
    "new_sandbox",
    "owners",
    "sandbox",
    "time_scale",
]
