"""Answers of the control port, as tests look at them."""

from __future__ import annotations

from typing import Any

import httpx


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error, which has words too."""
    assert {"code", "message"} == answer.json().keys()
    return answer.status_code, answer.json()["code"]


def pages(
    web: httpx.Client, path: str, limit: int, *, by: str = "cursor", first: str = "", **query: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """All entries of a list, and how many were on each page; `by` is the parameter that takes the cursor."""
    found: list[dict[str, Any]] = []
    sizes: list[int] = []
    cursor: str | None = first
    while cursor is not None:
        page = web.get(path, params={by: cursor, "limit": limit, **query}).json()
        found += page["data"]
        sizes.append(len(page["data"]))
        cursor = page["meta"]["cursor"]
    return found, sizes
