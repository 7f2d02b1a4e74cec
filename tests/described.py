"""Holds values to the API's description."""

from __future__ import annotations

from typing import Any

import jsonschema_rs


def against(
    described: dict[str, Any], schema: dict[str, Any]
) -> jsonschema_rs.Draft202012Validator:
    """Return what checks values by a schema of the description, formats and all."""
    whole = {**schema, "components": described["components"]}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


def strict(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description with no room for what it does not tell of."""
    schemas = {
        name: {"additionalProperties": False, **schema} if "properties" in schema else schema
        for name, schema in described["components"]["schemas"].items()
    }
    return {**described, "components": {"schemas": schemas}}
