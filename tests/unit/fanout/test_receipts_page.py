"""docs/receipts.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from motorcade.core.receipt import FINAL, State, decode, encode
from motorcade.plugins.fanout import counters, queries, receipt_writer
from motorcade.plugins.fanout.inflight import ENDS
from motorcade.plugins.fanout.options import FanoutConfig

PAGE = (Path(__file__).parents[3] / "docs" / "receipts.md").read_text()


def rows() -> list[tuple[str, str, str]]:
    """State, final, reasons of the table; what is left out is as in the row above."""
    table = PAGE.split("## States and reasons")[1].split("##")[0]
    found: list[tuple[str, str, str]] = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found.append((cells[0].strip("`"), cells[1], cells[2]))
        elif line.startswith("| |"):
            found.append((found[-1][0], found[-1][1], cells[2]))
    return found


def test_the_examples_are_receipts_byte_by_byte() -> None:
    examples = re.findall(r"^\{.*\}$", PAGE, re.MULTILINE)
    assert 4 == len(examples)
    for example in examples:
        assert example == encode(decode(example.encode())).decode()


def test_every_state_is_there_and_the_final_ones_are_marked() -> None:
    assert set(State) == {state for state, _, _ in rows()}
    assert FINAL == {state for state, final, _ in rows() if final == "yes"}


def test_reasons_that_are_written_are_explained() -> None:
    explained = {(state, reason.strip("` ")) for state, _, reasons in rows() for reason in reasons.split(",")}
    for state, reason in ENDS.values():
        assert (str(state), reason) in explained
    fanout = Path(receipt_writer.__file__).parent
    written = "".join((fanout / f"{name}.py").read_text() for name in ("attempts", "ingress", "source", "dispatcher"))
    for state, reason in re.findall(r'State\.([A-Z]+), "([a-z_0-9]+)"', written):
        assert (state.lower(), reason) in explained


def test_bounds_are_those_of_the_code() -> None:
    for bound in (FanoutConfig().max_requests, counters.MAX_OPEN):
        assert f"| {bound} |" in PAGE
    for bound in (queries.WINDOW, receipt_writer.MAX_UNPUBLISHED):
        assert f" {bound:,} ".replace(",", " ") in PAGE
