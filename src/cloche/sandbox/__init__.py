"""One isolated machine as the rest of the program sees it, whatever backend made it."""

from cloche.sandbox.sandbox import Sandbox as Sandbox
