"""For whoever writes a backend: the checks that every backend must pass, and machines
that misbehave on purpose.

`cloche.testing.conformance` needs pytest and pytest-asyncio, which Cloche itself
does not install. `cloche.testing.fakes` needs nothing.
"""
