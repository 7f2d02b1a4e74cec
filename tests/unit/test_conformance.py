"""The suite that is shipped is whole: a check that is written is a check that runs."""

from __future__ import annotations

import importlib
import pkgutil

from cloche.testing import conformance

THEMES = [
    importlib.import_module(f"{conformance.__name__}.{module.name}")
    for module in pkgutil.iter_modules(conformance.__path__)
]


def test_every_class_of_checks_is_exported() -> None:
    written = {name for theme in THEMES for name in vars(theme) if name.startswith("Test")}

    assert len(written) > 20
    assert written - set(conformance.__all__) == set()


def test_every_exported_name_is_there() -> None:
    assert [name for name in conformance.__all__ if not hasattr(conformance, name)] == []


def test_every_theme_shows_the_values_it_compared() -> None:
    silent = [
        theme.__name__
        for theme in THEMES
        if any(name.startswith("Test") for name in vars(theme)) and "@pytest_ar" not in vars(theme)
    ]

    assert silent == [], "pytest did not rewrite their assertions"
