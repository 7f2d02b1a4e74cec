"""Errors, as HTTP tells them: `application/problem+json` (RFC 9457) with `code` and `remedy`.

The one place where an error of ours gets a status.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cloche.core import about, errors

_STATUS: Final[dict[type[errors.ClocheError], HTTPStatus]] = {
    errors.NotAuthenticated: HTTPStatus.UNAUTHORIZED,
    errors.NotAllowed: HTTPStatus.FORBIDDEN,
    errors.NoSuchJob: HTTPStatus.NOT_FOUND,
    errors.NoSuchSandbox: HTTPStatus.NOT_FOUND,
    errors.NoSuchProcess: HTTPStatus.NOT_FOUND,
    errors.NoSuchKey: HTTPStatus.NOT_FOUND,
    errors.NoSuchUpload: HTTPStatus.NOT_FOUND,
    errors.NoSuchFile: HTTPStatus.NOT_FOUND,
    errors.NoSuchMachine: HTTPStatus.NOT_FOUND,
    errors.LimitsOverQuota: HTTPStatus.FORBIDDEN,
    errors.QuotaExceeded: HTTPStatus.TOO_MANY_REQUESTS,
    errors.RateLimited: HTTPStatus.TOO_MANY_REQUESTS,
    errors.JobNotOver: HTTPStatus.CONFLICT,
    errors.MachinePaused: HTTPStatus.CONFLICT,
    errors.SandboxElsewhere: HTTPStatus.MISDIRECTED_REQUEST,
    errors.IdempotencyConflict: HTTPStatus.CONFLICT,
    errors.RequestTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.RangeRefused: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    errors.UserError: HTTPStatus.BAD_REQUEST,
    errors.RungUnavailable: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.LimitReached: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.TransientError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OperatorError: HTTPStatus.SERVICE_UNAVAILABLE,
}


def install(app: FastAPI) -> None:
    """Make every error of the app a problem."""

    @app.exception_handler(errors.ClocheError)
    async def on_cloche_error(_: Request, error: errors.ClocheError) -> JSONResponse:
        return problem(error)

    @app.exception_handler(RequestValidationError)
    async def on_bad_parameter(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(bad_value(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        code = status.phrase.lower().replace(" ", "_").replace("-", "_")
        remedy = "See /docs for the calls there are."
        return _answer(status, code, str(error.detail), remedy)


def problem(error: errors.ClocheError) -> JSONResponse:
    answer = _answer(_status(error), error.code, error.message, error.remedy, **_members(error))
    if isinstance(error, errors.QuotaExceeded | errors.RateLimited) and error.retry_after_s:
        answer.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return answer


def fault() -> JSONResponse:
    """Own up to a fault of ours, which the log tells of."""
    return _answer(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "fault",
        "Cloche itself failed; its log tells how.",
        "Try again; if it fails again, tell whoever runs the server the request's id.",
    )


def describe(error: errors.ClocheError) -> dict[str, Any]:
    """Put an error into a problem's words, for a stream that has begun."""
    return _body(_status(error), error.code, error.message, error.remedy, **_members(error))


def _status(error: errors.ClocheError) -> HTTPStatus:
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def _members(error: errors.ClocheError) -> dict[str, Any]:
    """Return what a problem tells besides the usual (RFC 9457, section 3.2)."""
    if isinstance(error, errors.QuotaExceeded):
        return {"quota": error.quota, "used": error.used, "limit": error.limit}
    return {}


def _body(status: HTTPStatus, code: str, detail: str, remedy: str, **more: Any) -> dict[str, Any]:
    return {
        "type": f"urn:cloche:problem:{code}",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "code": code,
        "remedy": remedy,
        **more,
    }


def _answer(status: HTTPStatus, code: str, detail: str, remedy: str, **more: Any) -> JSONResponse:
    body = _body(status, code, detail, remedy, **more)
    if request_id := about.facts().get("request_id"):
        body["request_id"] = request_id
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(body, status, headers, media_type="application/problem+json")


def bad_value(found: Any) -> errors.BadRequest:
    """Say which field is wrong, and how."""
    first = found[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("query", "path", "body"))
    more = f" ({len(found) - 1} more like it.)" if len(found) > 1 else ""
    return errors.BadRequest(
        f"{where or 'The request'}: {first['msg']}.{more}",
        remedy="Correct it and send the request again; /docs has the fields and an example.",
    )


def bad_body(error: ValidationError) -> errors.BadRequest:
    return bad_value(error.errors(include_url=False, include_input=False, include_context=False))
