"""How calls are described: what FastAPI cannot tell by itself.

Answers are described, and not checked on their way out: that would cost time, and turn a
slip in the description into a fault of the server. Tests hold real answers to it instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]

_BYTES: Final = {"type": "string", "format": "binary"}
_REF: Final = "#/components/schemas/"
OPEN: Final[dict[str, Any]] = {"security": []}
"""For a call that takes no key."""


class Answer(BaseModel):
    """An answer in JSON. What is not always in it has a default."""


def example(value: dict[str, Any]) -> ConfigDict:
    """Give a model an example, which every call shows that takes or answers it."""
    return ConfigDict(json_schema_extra={"examples": [value]})


class Problem(Answer):
    """What went wrong, and what to do about it (RFC 9457)."""

    model_config = example(
        {
            "type": "urn:cloche:problem:no_such_job",
            "title": "Not Found",
            "status": 404,
            "detail": "There is no job '5f0c2a9be1d34c77'.",
            "code": "no_such_job",
            "remedy": "List your jobs for their ids.",
            "request_id": "9f86d081884c7d65",
        }
    )

    type: str
    title: str
    status: int
    detail: str
    """A sentence for people; it may change."""
    code: str
    """For programs; it never changes."""
    remedy: str
    request_id: str | None = None
    """By which the server's log tells of the request."""
    quota: str | None = None
    """With `quota_exceeded`: which one."""
    used: float | None = None
    limit: float | None = None


def _problem(description: str) -> dict[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": f"{_REF}Problem"}}}
    return {"description": description, "content": content}


PROBLEMS: Final[Responses] = {
    "4XX": _problem("The request is refused."),
    "5XX": _problem("The server, its host or the machine could not do it."),
}


def answer(model: type[Answer], status: int = 200) -> Responses:
    """Describe an answer in JSON."""
    return {status: {"model": model, "description": _first_line(model)}}


def event_stream(text: str) -> Responses:
    """Describe server-sent events: told instead of the JSON, or alone."""
    return content("text/event-stream", text, schema={"type": "string"})


def content(media_type: str, shown: str, *, schema: dict[str, Any] | None = None) -> Responses:
    """Describe an answer that is not JSON; of bytes, unless there is a schema."""
    return {200: {"content": {media_type: {"schema": schema or _BYTES, "example": shown}}}}


def both(first: Responses, second: Responses) -> Responses:
    """Describe a call that answers with one or the other, as the caller accepts."""
    content = {**first[200].get("content", {}), **second[200].get("content", {})}
    return {200: {**first[200], **second[200], "content": content}}


def bytes_body(shown: str, media_type: str = "*/*") -> dict[str, Any]:
    """Describe a body that is taken as it is."""
    media = {"schema": _BYTES, "example": shown}
    return {"requestBody": {"required": True, "content": {media_type: media}}}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a body in JSON that a call reads by itself."""
    media = {"schema": {"$ref": f"{_REF}{model.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


def finish(described: dict[str, Any]) -> None:
    """Add the problem's schema, and show each model's examples where it is taken or answered."""
    schemas = described["components"]["schemas"]
    schemas["Problem"] = Problem.model_json_schema()
    for model in _models(Answer):
        # FastAPI drops every null of a description, those of examples too.
        extra = model.model_config.get("json_schema_extra")
        if model.__name__ in schemas and isinstance(extra, dict):
            schemas[model.__name__] |= extra
    for path in described["paths"].values():
        for operation in path.values():
            _summarize(operation)
            told = [operation.get("requestBody", {}), *operation["responses"].values()]
            for media in (media for one in told for media in one.get("content", {}).values()):
                _show_examples(media, schemas)


def _models(kind: type[Answer]) -> Iterator[type[Answer]]:
    for model in kind.__subclasses__():
        yield model
        yield from _models(model)


def _summarize(operation: dict[str, Any]) -> None:
    """Take a call's summary from its docstring, not from its function's name."""
    summary, _, rest = operation.get("description", "").partition("\n")
    sentence, stop, _ = summary.partition(". ")
    operation["summary"] = sentence.removesuffix(".")
    if not (stop or rest.strip()):
        operation.pop("description", None)


def _show_examples(media: dict[str, Any], schemas: dict[str, Any]) -> None:
    schema = media["schema"]
    # A body that may be left out is described as one of two.
    ref = schema.get("$ref") or schema.get("anyOf", [{}])[0].get("$ref")
    if ref is None:
        return
    if "$ref" in schema:
        # FastAPI leaves what it knew of the answer before: that it is an object of anything.
        media["schema"] = {"$ref": ref}
    examples = schemas[ref.removeprefix(_REF)].get("examples")
    if examples and not media.keys() & {"example", "examples"}:
        media["example"] = examples[0]


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]
