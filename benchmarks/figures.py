"""What every benchmark tells of its samples."""

from __future__ import annotations

import statistics

Figures = dict[str, float]


def summary(samples_ms: list[float]) -> Figures:
    ordered = sorted(samples_ms)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(p99, 2)}
