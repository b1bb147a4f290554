"""Reports of requests, for people and dashboards: data, text, a picture, a page.

    ReceiptTables ─ collect ─▶ data: plain values, bounded ─┬─▶ JSON    for dashboards, as it is
                                                     ├─▶ text    for a terminal
                                                     ├─▶ png     a picture of one request
                                                     └─▶ html    a page that needs nothing else, pictures inside

Rule 1: only `collect` asks Spark. Everything else is a function of its data, which may as well come from a file.
Rule 2: names of requests and nodes are untrusted text: escaped in pages, and never taken for mathematics in
        pictures.
Rule 3: fields of the data are added; a change that would be misunderstood is a new version `v`.
"""

from __future__ import annotations

import base64
import io
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used

from motorcade.core.receipt import State
from motorcade.pipelines.receipts import PERCENTILES, STAGES, ReceiptTables

VERSION: Final = 1

#: Requests of one collection, the latest first; and the rows of a request. What is left out is counted.
MAX_REQUESTS: Final = 100
MAX_STRAGGLERS: Final = 100
MAX_HOURS: Final = 24 * 31

#: Reasons in a picture; a page has all of them.
MAX_BARS: Final = 10

Data = dict[str, Any]

_STATES: Final = [state.value for state in State]
_ENDS: Final = ("acked", "replaced", "failed", "expired", "cancelled", "pending")
_FUNNEL: Final = ("accepted", "sent", "retried", *_ENDS)
_MEANING: Final = {
    "wait": "accepted → first sent",
    "retry": "first sent → last sent",
    "answer": "last sent → acked",
    "total": "accepted → acked",
}
_COLOURS: Final = {
    "accepted": "#4c78a8",
    "sent": "#72b7b2",
    "retried": "#eeca3b",
    "acked": "#54a24b",
    "replaced": "#9d9da1",
    "failed": "#e45756",
    "expired": "#f58518",
    "cancelled": "#b279a2",
    "pending": "#d0d0d0",
}


# -- from Spark


def collect(
    tables: ReceiptTables,
    *,
    now: float | None = None,
    max_requests: int = MAX_REQUESTS,
    max_stragglers: int = MAX_STRAGGLERS,
    max_hours: int = MAX_HOURS,
) -> Data:
    """Collect the data of all requests in the tables, those with the latest receipts first."""
    with tables.kept():
        known = tables.funnel.count()
        latest = tables.funnel.orderBy(F.desc("last_at"), "request_id").limit(max_requests).collect()
        shown = [row["request_id"] for row in latest]
        latency = _by_request(tables.latency, shown)
        reasons = _by_request(tables.reasons, shown)
        nodes = _by_request(tables.nodes, shown)
        hours = _by_request(tables.hours, shown)
        stragglers = _by_request(_oldest(tables.stragglers, max_stragglers), shown)
    return {
        "v": VERSION,
        "made_at": time.time() if now is None else now,
        "requests": [
            {
                "request_id": request,
                "funnel": {name: value for name, value in _plain(row).items() if name != "request_id"},
                "latency": sorted(map(_plain, latency[request]), key=lambda item: STAGES.index(item["stage"])),
                "reasons": sorted(map(_plain, reasons[request]), key=lambda item: (-item["count"], item["why"])),
                "nodes": _pivoted(nodes[request], "node"),
                "hours": _pivoted(hours[request], "hour")[-max_hours:],
                "stragglers": [
                    {name: value for name, value in _plain(late).items() if name != "total"}
                    for late in sorted(stragglers[request], key=_order)
                ],
                "stragglers_total": stragglers[request][0]["total"] if stragglers[request] else 0,
            }
            for request, row in zip(shown, latest, strict=True)
        ],
        "requests_total": known,
    }


def _order(late: Row) -> tuple[float, str]:
    """Return a sort key by age, the oldest first; without a receipt `accepted` there is no age."""
    return -(late["age"] or 0.0), late["delivery_id"]


def _oldest(frame: DataFrame, most: int) -> DataFrame:
    """Return the first rows of each request, and how many there are."""
    request = Window.partitionBy("request_id")
    rank = F.row_number().over(request.orderBy(F.desc("age"), "delivery_id"))
    counted = frame.withColumns({"rank": rank, "total": F.count(F.lit(1)).over(request)})
    # The first one is needed for the count, if nothing else is.
    return counted.where(F.col("rank") <= max(1, most)).drop("rank")


def _by_request(frame: DataFrame, shown: Sequence[str]) -> defaultdict[str, list[Row]]:
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in frame.where(F.col("request_id").isin(list(shown))).collect():
        found[row["request_id"]].append(row)
    return found


def _plain(row: Row) -> Data:
    """Return times as seconds since the epoch."""
    return {name: value.timestamp() if isinstance(value, datetime) else value for name, value in row.asDict().items()}


def _pivoted(rows: Iterable[Row], key: str) -> list[Data]:
    """Return one entry for each value of `key`, with a count for each state that occurs."""
    found: defaultdict[Any, Data] = defaultdict(dict)
    for row in map(_plain, rows):
        found[row[key]][row["state"]] = row["count"]
    return [
        {key: value, **{state: counts[state] for state in _STATES if state in counts}}
        for value, counts in sorted(found.items())
    ]


# -- text


def text(data: Data) -> str:
    """Return the report for a terminal."""
    blocks = [block for request in data["requests"] for block in _blocks(request)]
    left_out = data["requests_total"] - len(data["requests"])
    if left_out:
        blocks.append(f"{left_out} older requests are not shown")
    return "\n\n".join(blocks)


def _blocks(request: Data) -> Iterable[str]:
    yield f"request {request['request_id']}"
    for title, columns, rows in sections(request):
        yield f"{title}\n{_aligned(columns, rows)}"


def sections(request: Data) -> Iterable[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield title, columns and cells of each table of a request; those without rows are left out."""
    funnel = request["funnel"]
    whole = max(1, funnel["accepted"])
    counts = [[name, str(funnel[name]), f"{100 * funnel[name] / whole:.1f} %"] for name in _FUNNEL]
    times = f"{_when(funnel['first_at'])} to {_when(funnel['last_at'])}"
    yield f"deliveries to {funnel['vehicles']} vehicles, {times}", ("state", "deliveries", "share"), counts
    names = ("mean", *PERCENTILES, "max")
    stages = [
        [item["stage"], _MEANING[item["stage"]], str(item["count"]), *(span(item[name]) for name in names)]
        for item in request["latency"]
    ]
    if stages:
        yield "latency", ("stage", "from → to", "deliveries", *names), stages
    if request["reasons"]:
        cells = [[item["state"], item["why"], str(item["count"])] for item in request["reasons"]]
        yield "reasons", ("state", "why", "deliveries"), cells
    yield _counted("receipts by node", "node", request["nodes"], str)
    yield _counted("receipts by hour", "hour", request["hours"], _when)
    if request["stragglers"]:
        listed, total = request["stragglers"], request["stragglers_total"]
        title = f"stragglers: {total}" if total == len(listed) else f"stragglers: the oldest {len(listed)} of {total}"
        cells = [
            [item["vin"], item["state"], item["why"], str(item["attempts"]), span(item["age"]), _when(item["last_at"])]
            for item in listed
        ]
        yield title, ("vin", "state", "why", "attempts", "age", "last receipt"), cells


def _counted(title: str, key: str, rows: Sequence[Data], show: Any) -> tuple[str, Sequence[str], list[list[str]]]:
    states = [state for state in _STATES if any(state in row for row in rows)]
    return title, (key, *states), [[show(row[key]), *(str(row.get(state, 0)) for state in states)] for row in rows]


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows))
    return "\n".join(f"  {line}".rstrip() for line in lines)


#: Up to how many seconds, divided by what, is called how, with so many digits.
_UNITS: Final = ((1, 1e-3, "ms", 0), (100, 1, "s", 2), (6000, 60, "min", 1), (172_800, 3600, "h", 1))


def span(seconds: float | None) -> str:
    """Format a duration so that its length is seen at once: 12 ms, 3.25 s, 4.0 min, 7.5 h, 2.1 d."""
    if seconds is None:
        return ""
    size = abs(seconds)
    for below, divisor, unit, digits in (
        (1, 1e-3, "ms", 0),
        (100, 1, "s", 2),
        (6000, 60, "min", 1),
        (172_800, 3600, "h", 1),
    ):
        if size < below:
            return f"{seconds / divisor:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


# -- a picture


def png(request: Data) -> bytes:
    """Draw one request: progress, durations, times, and reasons of failures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - takes half a second
    from matplotlib.figure import Figure  # noqa: PLC0415 - likewise

    # Without pyplot: it keeps figures, and chooses a backend by what the machine has.
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    figure.suptitle(f"request {request['request_id']}", parse_math=False)
    _draw_funnel(panels[0][0], request["funnel"])
    _draw_latency(panels[0][1], request["latency"])
    _draw_hours(panels[1][0], request["hours"])
    _draw_reasons(panels[1][1], request["reasons"])
    made = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have letters that the font has not: they become boxes
        figure.savefig(made, format="png")
    return made.getvalue()


def _draw_funnel(panel: Any, funnel: Mapping[str, Any]) -> None:
    panel.set_title("deliveries")
    bars = panel.barh(_FUNNEL, [funnel[name] for name in _FUNNEL], color=[_COLOURS[name] for name in _FUNNEL])
    panel.bar_label(bars, padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.15)


def _draw_latency(panel: Any, latency: Sequence[Data]) -> None:
    panel.set_title("latency (seconds)")
    if not latency:
        _nothing(panel, "nothing was sent yet")
        return
    names = (*PERCENTILES, "max")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [stage + (index - (len(names) - 1) / 2) * width for stage in range(len(latency))]
        bars = panel.bar(places, [item[name] for item in latency], width, label=name)
        panel.bar_label(bars, [span(item[name]) for item in latency], fontsize=6, rotation=90, padding=3)
    panel.set_xticks(
        range(len(latency)), [f"{item['stage']}\n{_MEANING[item['stage']]}" for item in latency], fontsize=7
    )
    panel.set_yscale("symlog", linthresh=0.01)  # from milliseconds to days; a difference of clocks may be below 0
    panel.margins(y=0.2)
    panel.legend(fontsize=7)


def _draw_hours(panel: Any, hours: Sequence[Data]) -> None:
    panel.set_title("receipts by hour (UTC)")
    places = range(len(hours))
    below = [0] * len(hours)
    for state in (state for state in _STATES if any(state in hour for hour in hours)):
        counts = [hour.get(state, 0) for hour in hours]
        panel.bar(places, counts, bottom=below, color=_COLOURS[state], label=state)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    step = max(1, math.ceil(len(hours) / 8))
    panel.set_xticks(
        places[::step],
        [f"{datetime.fromtimestamp(hour['hour'], UTC):%m-%d %H:00}" for hour in hours[::step]],
        fontsize=7,
    )
    panel.legend(fontsize=7)


def _draw_reasons(panel: Any, reasons: Sequence[Data]) -> None:
    panel.set_title("reasons")
    most = reasons[:MAX_BARS]
    if not most:
        _nothing(panel, "none")
        return
    places = range(len(most))
    bars = panel.barh(places, [item["count"] for item in most], color=[_COLOURS[item["state"]] for item in most])
    panel.bar_label(bars, padding=3)
    panel.set_yticks(places, [f"{item['state']}: {item['why']}" for item in most], fontsize=8, parse_math=False)
    panel.invert_yaxis()
    panel.margins(x=0.15)


def _nothing(panel: Any, words: str) -> None:
    panel.set_axis_off()
    panel.text(0.5, 0.5, words, ha="center", va="center", transform=panel.transAxes)


# -- a page

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #ddd; }
td { font-variant-numeric: tabular-nums; }
footer { color: #777; }
"""


def html(data: Data, pictures: Sequence[bytes] | None = None) -> str:
    """Make a page that fetches nothing; `pictures` of its requests, if they are made already."""
    made = pictures if pictures is not None else [png(request) for request in data["requests"]]
    parts = [_html_request(request, picture) for request, picture in zip(data["requests"], made, strict=True)]
    left_out = data["requests_total"] - len(data["requests"])
    if left_out:
        parts.append(f"<p>{left_out} older requests are not shown.</p>")
    names = ", ".join(escape(request["request_id"]) for request in data["requests"][:3])
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>Fan-out report: {names}</title>\n<style>{_STYLE}</style>\n"
        + "\n".join(parts)
        + f"\n<footer>Made at {_when(data['made_at'])} from the receipts of Motorcade.</footer>\n</html>\n"
    )


def _html_request(request: Data, png_: bytes) -> str:
    name = escape(request["request_id"])
    picture = base64.b64encode(png_).decode()
    tables = "\n".join(
        f"<h2>{escape(title)}</h2>\n{_html_table(columns, rows)}" for title, columns, rows in sections(request)
    )
    shown = f'<img alt="Deliveries, latency, hours and reasons of {name}" src="data:image/png;base64,{picture}">'
    return f"<section>\n<h1>Request {name}</h1>\n{shown}\n{tables}\n</section>"


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
