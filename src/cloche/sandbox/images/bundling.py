"""Makes the bundle that `cloche.guest.bundle` loads. A program for the image's Python.

Sources come in and byte code goes out through pipes, so that nothing is written to
the image; the byte code of one Python is not another's. The guest is loaded here as
it will be in the machine, to see which modules that takes; what this program itself
loads is among them.

Docstrings and columns are left out: only programmers read them, and the byte code
is a third smaller without them, and as much quicker to load.
"""

import json
import marshal
import posixpath
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

FOLDER = "opt/cloche/lib/"

Source = tuple[str, str | None, str | None]
"""The file; for a package, its folder; the source, but for a shared library."""


class Finder:
    """Loads the guest from the sources that came in."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in self._sources:
            return None
        is_package = self._sources[name][1] is not None
        return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        """Have the import system make an ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        exec(self._sources[module.__name__][2] or "", module.__dict__)  # noqa: S102


def guest(files: dict[str, str]) -> dict[str, Source]:
    """Name the guest's modules by their paths, and see that each can be compiled."""
    found: dict[str, Source] = {"cloche": ("", f"/{FOLDER}cloche", "")}
    for path, source in files.items():
        compile(source, f"/{path}", "exec", dont_inherit=True)
        folder, file = posixpath.split(path)
        name = path.removeprefix(FOLDER).removesuffix(".py").replace("/", ".")
        package = f"/{folder}" if file == "__init__.py" else None
        found[name.removesuffix(".__init__")] = f"/{path}", package, source
    return found


def loaded() -> dict[str, Source]:
    """Return what is loaded from files, but for what Python itself loads before the guest."""
    found: dict[str, Source] = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or not spec.has_location or name.split(".")[0] == "encodings":
            continue
        package = posixpath.dirname(spec.origin) if spec.submodule_search_locations else None
        found[name] = spec.origin, package, spec.loader.get_source(name)
    return found


def main() -> None:
    ours = guest(json.load(sys.stdin))
    sys.meta_path.insert(0, Finder(ours))
    later = __import__("cloche.guest.later", fromlist=["install"])
    later.install()
    __import__("cloche.guest.__main__")
    __import__("cloche.guest.server")
    bundle: dict[str, tuple[str, str | None, CodeType | None]] = {}
    for name, (file, package, source) in {**loaded(), **ours}.items():
        code = None if source is None else compile(source, file, "exec", optimize=2)
        bundle[name] = file, package, code
    sys.stdout.buffer.write(marshal.dumps(bundle))


if __name__ == "__main__":
    main()
