"""Spans of requests and jobs, by OpenTelemetry's API.

They go nowhere, and cost next to nothing, until `use` is given a tracer that sends
them. A span names ids, tenants, tools and outcomes: never code, variables, output
or the text of an error, which may quote any of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cloche.core import about
from cloche.core.job import Job, Outcome, State

_NOWHERE = trace.NoOpTracer()
_propagator = TraceContextTextMapPropagator()
_NO_PARENT = contexts.Context()
_NONE = contextlib.nullcontext(trace.INVALID_SPAN)
_job: ContextVar[Span] = ContextVar("job", default=trace.INVALID_SPAN)

Attribute = str | int


class _Used:
    # Not OpenTelemetry's global one: FastAPI, for one, would send spans of its own by that,
    # with the whole path and query of every request.
    tracer: Tracer = _NOWHERE


def use(tracer: Tracer | None) -> None:
    """Send spans by `tracer` from now on, or nowhere."""
    _Used.tracer = tracer or _NOWHERE


def span(name: str, **attributes: Attribute) -> contextlib.AbstractContextManager[Span]:
    """Open a span for the length of a `with` block; an error in it is told by its name alone."""
    return _open(name, SpanKind.INTERNAL, None, attributes)


def _open(
    name: str,
    kind: SpanKind,
    parent: contexts.Context | None,
    attributes: Mapping[str, Attribute],
) -> contextlib.AbstractContextManager[Span]:
    return _NONE if _Used.tracer is _NOWHERE else _opened(name, kind, parent, attributes)


@contextlib.contextmanager
def _opened(
    name: str,
    kind: SpanKind,
    parent: contexts.Context | None,
    attributes: Mapping[str, Attribute],
) -> Iterator[Span]:
    with _Used.tracer.start_as_current_span(
        name,
        parent,
        kind,
        {f"cloche.{key}": value for key, value in attributes.items()},
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            current.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def request(name: str, traceparent: str | None) -> contextlib.AbstractContextManager[Span]:
    """Open the span of a request that the caller may have sent as part of a trace of its own."""
    return _open(name, SpanKind.SERVER, _parent(traceparent), {})


def note_answer(span: Span, method: str, route: str, status: int) -> None:
    """Tell in a request's span what was asked for, by whom, and how it was answered."""
    if not span.is_recording():
        return
    span.update_name(f"{method} {route}")
    span.set_attribute("http.request.method", method)
    span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    for name, value in about.facts().items():
        span.set_attribute(f"cloche.{name}", value)


def step(index: int, tool: str) -> contextlib.AbstractContextManager[Span]:
    return span(f"step {tool}", step=index, tool=tool)


def begin_job(job: Job, traceparent: str) -> None:
    """Open the span of a job, below the request that submitted it, in the task that runs it.

    It stays open until `end_job`, through whatever befalls the job.
    """
    attributes: dict[str, Attribute] = {
        "cloche.job_id": job.id,
        "cloche.tenant": job.tenant,
        "cloche.attempt": job.attempt,
    }
    opened = _Used.tracer.start_span("job", _parent(traceparent), SpanKind.CONSUMER, attributes)
    _job.set(opened)
    contexts.attach(trace.set_span_in_context(opened))


def end_job() -> None:
    _job.get().end()


def note_job(outcome: Outcome) -> None:
    """Tell in the job's span how the job ended."""
    _tell(_job.get(), outcome)


def note_step(outcome: Outcome) -> None:
    _tell(trace.get_current_span(), outcome)


def note(**attributes: Attribute) -> None:
    """Add to the current span."""
    current = trace.get_current_span()
    for name, value in attributes.items():
        current.set_attribute(f"cloche.{name}", value)


def traceparent() -> str:
    """Spell the current span, as W3C's Trace Context does; empty when there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """Return the current trace's id; empty when there is none."""
    current = trace.get_current_span().get_span_context()
    return trace.format_trace_id(current.trace_id) if current.is_valid else ""


def _tell(told: Span, outcome: Outcome) -> None:
    told.set_attribute("cloche.state", outcome.state)
    told.set_attribute("cloche.reason", outcome.reason)
    if outcome.exit_code is not None:
        told.set_attribute("cloche.exit_code", outcome.exit_code)
    if outcome.state is not State.SUCCEEDED:
        told.set_status(StatusCode.ERROR, outcome.reason)


def _parent(traceparent: str | None) -> contexts.Context:
    # Never what happens to be current: a connection's next request is no child of its last.
    if not traceparent:
        return _NO_PARENT
    return _propagator.extract({"traceparent": traceparent}, _NO_PARENT)
