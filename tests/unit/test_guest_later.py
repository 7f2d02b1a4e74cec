"""The guest's start loads little, and what it left out is there once it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys

HEAVY = ("concurrent.futures", "inspect", "logging", "subprocess", "traceback", "typing")
START = """
import sys
for name in {heavy!r}:
    for loaded in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
        del sys.modules[loaded]
from cloche.guest import later
later.install()
stand_ins = {{name: sys.modules[name] for name in {heavy!r}}}
import asyncio
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START.format(heavy=HEAVY) + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loop_that_serves_loads_none_of_them() -> None:
    said = run("""
async def main():
    async def greet(reader, writer):
        writer.write(await reader.readline())
        writer.close()

    asyncio.get_running_loop().add_signal_handler(17, print)
    server = await asyncio.start_unix_server(greet, "\\0cloche-test-later")
    reader, writer = await asyncio.open_unix_connection("\\0cloche-test-later")
    writer.write(b"hello\\n")
    await asyncio.wait_for(asyncio.gather(reader.read(), asyncio.sleep(0)), 5)
    server.close()
    print([name for name, module in stand_ins.items() if sys.modules[name] is not module])

asyncio.run(main())
""")

    # What an older Python's asyncio loads by itself is not the machine's concern.
    loaded = set(ast.literal_eval(said))
    assert not loaded & {"logging", "inspect", "subprocess", "concurrent.futures"}, loaded


def test_what_is_asked_of_a_stand_in_is_answered_by_the_real_module() -> None:
    said = run("""
import concurrent.futures, inspect, logging, subprocess, traceback, typing
from typing import get_type_hints
print(concurrent.futures.ThreadPoolExecutor(1).submit(int, "4").result())
print(inspect.getfile(asyncio) == asyncio.__file__, logging.INFO, typing.List[int])
print(subprocess.run(["echo", "hi"], stdout=subprocess.PIPE).stdout)
print(traceback.format_exception_only(ValueError("x")))
print([name for name, module in stand_ins.items() if sys.modules[name] is module])
""")

    assert said.splitlines() == [
        "4",
        "True 20 typing.List[int]",
        "b'hi\\n'",
        "['ValueError: x\\n']",
        "[]",
    ]


def test_asyncio_can_still_tell_what_went_wrong() -> None:
    said = run("""
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def main():
    asyncio.get_running_loop().call_exception_handler({"message": "seen", "task": "that"})
    try:
        async with asyncio.timeout(0.01):
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(sys.intern, "x"))])
            await asyncio.sleep(9)
    except TimeoutError:
        print("late")

asyncio.run(main(), debug=True)
""")

    assert {"seen", "task: 'that'", "late"} <= set(said.splitlines())
