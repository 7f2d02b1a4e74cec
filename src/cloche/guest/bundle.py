"""Loads modules from the one file that holds them all, already compiled.

Looking for some seventy modules in folders, and each one's date and byte code,
is a third of what it takes to load them. The guest's layer is made with the
image's own Python, which knows where everything is. This module is run before
there is a bundle, and so imports only what Python itself is made of.
"""

import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

Modules = dict[str, tuple[str, str | None, "CodeType | None"]]
"""By name: the file; for a package, its folder; the code, but for a shared library."""


class Bundle:
    """Finds and runs what is in the bundle; all else is looked for in the usual places."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        file, folder, code = self._modules[name]
        if code is None:
            return ModuleSpec(name, ExtensionFileLoader(name, file), origin=file)
        # It has all that is called of a loader; to inherit it from the abstract one takes longer.
        spec = ModuleSpec(name, self, origin=file)  # type: ignore[arg-type]
        if folder is not None:
            spec.submodule_search_locations = [folder]
        return spec

    def create_module(self, _: ModuleSpec) -> None:
        """Have the import system make an ordinary one."""

    def exec_module(self, module: "ModuleType") -> None:
        _, _, code = self._modules.pop(module.__name__)
        if code is not None:
            exec(code, module.__dict__)  # noqa: S102 - that is what loading is


def install(modules: Modules) -> None:
    sys.meta_path.insert(0, Bundle(modules))
