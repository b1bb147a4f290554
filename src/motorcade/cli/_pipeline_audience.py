"""`motorcade pipeline run audience`: an audience by SQL, and one message to all of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _control, _files, _options, _output, _pipeline
from motorcade.cli._store import StoreFlags
from motorcade.cli.fanout import CheckDigit, DeliveryFlags
from motorcade.core.errors import MotorcadeError
from motorcade.pipelines import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from motorcade.pipelines.audience import AudienceCounts
    from motorcade.pipelines.runner import BatchProgress, RunOutcome
    from motorcade.pipelines.tables import QueryTable
    from motorcade.publisher.address import BrokerAddress
    from motorcade.publisher.batches import Order


def audience(
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", parser=_options.request_id, help="Request id, for example task_ota_1."),
    ],
    payload: Annotated[str, typer.Option("--payload", metavar="FILE|-", help="Payload, sent as it is.")],
    tables: Annotated[
        list[str],
        typer.Option("--table", metavar="NAME=PATH|jdbc:…", help="A table: Parquet, CSV, JSON, ORC, or a database's."),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            parser=_pipeline.folder,
            metavar="DIR",
            help="Run directory: the same command resumes from here. All machines must see it.",
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option("--sql", metavar="QUERY|@FILE", help="Query with a column vin. [SELECT vin FROM the table]"),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME.OPTION=VALUE|@FILE", help="How a table is read: fleet.sep=;"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=65_536, help="VINs in one message to the broker.")] = 200,
    check_digit: CheckDigit = False,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, metavar="N", help="Rate limit, in vehicles per second.")
    ] = None,
    connections: Annotated[
        int | None, typer.Option("--connections", min=1, max=1000, help="Connections to the broker. \\[cores, up to 8]")
    ] = None,
    partitions: Annotated[
        int, typer.Option("--partitions", min=1, max=100_000, help="Maximum number of partitions of the VINs.")
    ] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and count, send and store nothing.")] = False,
    broker: Annotated[
        str, typer.Option("--broker", metavar="URL", help="mqtt://HOST:PORT, mqtts://…, ws://…, wss://…")
    ] = "mqtt://127.0.0.1:1883",
    username: Annotated[str | None, typer.Option("-u", "--username")] = None,
    password_file: Annotated[
        Path | None,
        typer.Option("--password-file", metavar="FILE", help="On every machine. \\[the variable MOTORCADE_PASSWORD]"),
    ] = None,
    cafile: Annotated[Path | None, typer.Option("--cafile", help="Authorities to trust (PEM), on every machine.")] = (
        None
    ),
    cert: Annotated[Path | None, typer.Option("--cert", help="Our certificate (PEM), on every machine.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Our private key (PEM), on every machine.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Over TLS without checking the broker's certificate.")
    ] = False,
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            parser=_options.positive_duration,
            metavar="1m|30s",
            help="How long the broker may be unreachable.",
        ),
    ] = "1m",  # type: ignore[assignment]  # typer has the parser read defaults too
    master: _pipeline.Master = "local[*]",
    trigger: _pipeline.TriggerOption = "once",
    quiet: _pipeline.Quiet = False,
    settings: _pipeline.Set = None,
    as_json: _control.AsJson = False,
    *,
    delivery: DeliveryFlags,
    chosen: StoreFlags,
) -> None:
    """Send a file to every vehicle that a query names, each once, whatever is started again.

    The plan is made once and kept in the folder, then sent. The same command goes on where it was stopped.
    """
    from motorcade.pipelines.tables import tables_of
    from motorcade.publisher.address import BrokerAddress
    from motorcade.publisher.batches import Order

    if trigger != "once":
        raise typer.BadParameter(
            "an audience is chosen and sent once; begin another one in another folder", param_hint="--trigger"
        )
    if checkpoint is None and not dry_run:
        raise typer.BadParameter(
            "name the folder of this run (or look first with --dry-run)", param_hint="--checkpoint"
        )
    with _options.wrong_usage("--table, --option"):
        found = tables_of(tables, options or [])
    query = _query(sql, found)
    order = Order(request, _files.read("--payload", payload), delivery.options())
    files = {"password_file": password_file, "cafile": cafile, "cert": cert, "key": key}
    connection: dict[str, str] = {name: str(file.absolute()) for name, file in files.items() if file is not None}
    with _options.wrong_usage("--broker"):
        address = BrokerAddress.parse(broker, username=username, insecure=insecure, **connection)
    if dry_run or checkpoint is None:
        if not delivery.append:
            where, unknown = _store(chosen)
        else:
            where, unknown = None, ""
        with _pipeline.session(master, settings, "motorcade pipeline audience", quiet=quiet) as (spark, display):
            display.tell("counting")
            figures = _dry_run(spark, order, found, query, batch, check_digit, partitions, where, delivery.append)
        _show_dry_run(figures, unknown, as_json)
        return
    _reach(address)
    identity = _identity(order, found, query, batch, check_digit)
    writer = {
        "fanout": str(address),
        "patience": str(patience),
        **({"username": username} if username else {}),
        **({"insecure": "true"} if insecure else {}),
        **connection,
    }
    with _pipeline.running(checkpoint, "audience", identity, master, settings, quiet=quiet) as running:
        from motorcade.pipelines import audience as audiences  # not without Spark, and `running` says what to do then

        running.tell("choosing the audience")
        counts = audiences.plan(
            running.spark,
            running.folder,
            order,
            found,
            query,
            size=batch,
            check_digit=check_digit,
            partitions=partitions,
            rate=rate,
        )
        outcome = _send(running, counts, writer, rate, connections)
    _ended(outcome, checkpoint, request, as_json)


def _query(sql: str | None, tables: list[QueryTable]) -> str:
    if sql is None:
        if len(tables) != 1:
            raise typer.BadParameter("with several tables a query is needed", param_hint="--sql")
        return f"SELECT vin FROM {tables[0].name}"  # noqa: S608 - checked to be a name
    if not sql.startswith("@"):
        return sql
    try:
        return Path(sql[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"cannot read {sql[1:]}: {why}", param_hint="--sql") from error


def _identity(order: Order, tables: list[QueryTable], sql: str, size: int, check_digit: bool) -> dict[str, str]:
    """Return everything that the plan depends on; it identifies the run."""
    return {
        "request": order.request_id,
        "payload": order.data_id,
        "sql": sql,
        "tables": "; ".join(table.identity for table in tables),
        "batch": str(size),
        "check_digit": str(check_digit).lower(),
        **{name: str(value) for name, value in order.options.items()},
    }


def _reach(address: BrokerAddress) -> None:
    """Say at once if there is no broker, or if it does not let us in; tasks would wait for it."""

    async def reach() -> None:
        client = await address.connect()
        await client.disconnect()

    try:
        asyncio.run(reach())
    except MotorcadeError as error:
        raise PipelineError(f"the broker {address} cannot be used: {error}") from error


def _send(
    running: _pipeline.Running,
    counts: AudienceCounts,
    writer: Mapping[str, str],
    rate: float | None,
    connections: int | None,
) -> RunOutcome:
    from motorcade.pipelines import audience as audiences
    from motorcade.pipelines import runner

    folder = running.folder

    def show(batch: BatchProgress) -> None:
        told = audiences.progress(folder, counts)
        folder.note(counts=told)
        running.display.batch(replace(batch, behind=told["batches"] - told["acknowledged"], counts=told))

    folder.note(counts=audiences.progress(folder, counts))
    running.tell(f"sending {counts.batches} batches to {counts.vehicles} vehicles")
    query = audiences.sending(running.spark, folder, writer, rate=rate, connections=connections)
    outcome = runner.follow(query, folder, runner.Trigger(), show)
    told = audiences.progress(folder, counts)
    folder.note(counts=told)
    if outcome.done and told["acknowledged"] != told["batches"]:
        raise PipelineError(
            f"of {told['batches']} batches {told['acknowledged']} were acknowledged, and Spark says that all are done; "
            "were files of the folder changed?"
        )
    return replace(outcome, counts=told)


def _ended(outcome: RunOutcome, checkpoint: Path, request: str, as_json: bool) -> None:
    counts = outcome.counts
    if outcome.done and not as_json:
        also = [f"{counts[name]} {name}" for name in ("duplicates", "replaced") if counts[name]]
        print(f"request {request!r}: {counts['accepted']} vehicles accepted", *also, sep=", ")
    elif as_json:
        _output.print_json({"request_id": request, **outcome.as_dict()})
    if counts["invalid"]:
        print(f"{counts['invalid']} rows are no VINs; they are in {checkpoint / 'invalid'}", file=sys.stderr)
    if not outcome.done:
        print(_pipeline.STOPPED, file=sys.stderr)
    elif counts["rejected"]:
        print(
            f"error: {counts['rejected']} vehicles rejected: too many messages wait there already (option max_pending);"
            f" `motorcade fanout targets {request} --state failed` names them",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


# -- looking first


def _store(chosen: StoreFlags) -> tuple[str | None, str]:
    """Return the URL of the store with the backlog, or why it cannot be read."""
    from motorcade.storage.readers import open_reader

    where = chosen.find()
    try:
        open_reader(where.url).close()
    except MotorcadeError as error:
        if chosen != StoreFlags():
            raise
        return None, f"{error} (--store, --data or --config name the store)"
    return where.url, ""


def _dry_run(
    spark: SparkSession,
    order: Order,
    tables: list[QueryTable],
    sql: str,
    size: int,
    check_digit: bool,
    partitions: int,
    store: str | None,
    append: bool | None,
) -> dict[str, Any]:
    from motorcade.pipelines import audience as audiences

    pending = 0 if append else None
    with audiences.registered(audiences.sharing(spark, partitions), tables):
        frame = audiences.chosen(spark, sql)
        counts = audiences.counted(audiences.planned(frame, order, size=size, check_digit=check_digit))
        if store is not None:
            pending = audiences.pending_of(spark, store, order.request_id, frame)
    return audiences.dry_run(order, counts, pending)


def _show_dry_run(figures: dict[str, Any], unknown: str, as_json: bool) -> None:
    if as_json:
        _output.print_json({**figures, "dry_run": True})
        return
    shown = {**figures, "pending_replaced": figures["pending_replaced"] if not unknown else f"unknown: {unknown}"}
    _output.print_fields(shown.items())
    print("nothing was sent (--dry-run)", file=sys.stderr)
