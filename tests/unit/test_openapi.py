"""The API's description: every call has an id, a summary, schemas, and examples that fit them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from cloche.api.server import description
from described import against

DESCRIBED = description()
METHODS = {"get", "put", "post", "delete", "head", "patch"}


def operations() -> Iterator[Any]:
    for path, item in DESCRIBED["paths"].items():
        assert item.keys() <= METHODS
        for method, operation in item.items():
            yield pytest.param(operation, id=f"{method.upper()} {path}")


every_operation = pytest.mark.parametrize("operation", list(operations()))


def examples(media: dict[str, Any]) -> list[Any]:
    named = [one["value"] for one in media.get("examples", {}).values()]
    return [media["example"]] if "example" in media else named


def check(media: dict[str, Any]) -> None:
    shown = examples(media)
    assert shown, media
    for value in shown:
        against(DESCRIBED, media["schema"]).validate(value)


def test_the_description_is_of_openapi_3_1_and_every_schema_in_it_is_one() -> None:
    assert DESCRIBED["openapi"].startswith("3.1.")
    for name, schema in DESCRIBED["components"]["schemas"].items():
        assert jsonschema_rs.Draft202012Validator(jsonschema_rs_meta()).is_valid(schema), name
        against(DESCRIBED, {"$ref": f"#/components/schemas/{name}"})


def jsonschema_rs_meta() -> dict[str, Any]:
    return {"$ref": "https://json-schema.org/draft/2020-12/schema"}


def test_ids_of_calls_are_unique() -> None:
    ids = [one["operationId"] for item in DESCRIBED["paths"].values() for one in item.values()]
    assert len(ids) == len(set(ids)), sorted(ids)


@every_operation
def test_every_call_has_an_id_a_summary_and_a_tag(operation: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z]+([A-Z][a-z]+)*[A-Z]?[a-z]*", operation["operationId"])
    assert " " in operation["summary"], "the docstring's first sentence, not the function's name"
    assert operation["tags"]


@every_operation
def test_every_parameter_has_an_example_that_fits(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", []):
        schema = parameter["schema"]
        assert schema.get("examples"), parameter
        for value in schema["examples"]:
            against(DESCRIBED, schema).validate(value)


@every_operation
def test_every_body_has_an_example_that_fits(operation: dict[str, Any]) -> None:
    for media in operation.get("requestBody", {}).get("content", {}).values():
        check(media)


@every_operation
def test_every_answer_has_a_schema_and_an_example_that_fits(operation: dict[str, Any]) -> None:
    good = {status: one for status, one in operation["responses"].items() if status[0] in "23"}
    assert good
    for status, answer in good.items():
        assert answer["description"]
        assert ("content" in answer) is (status not in {"204", "303"}), status
        for media in answer.get("content", {}).values():
            assert media["schema"].keys() & {"$ref", "type"}, media
            check(media)


@every_operation
def test_every_call_may_answer_with_a_problem(operation: dict[str, Any]) -> None:
    for status in ("4XX", "5XX"):
        check(operation["responses"][status]["content"]["application/problem+json"])
    assert "422" not in operation["responses"]
