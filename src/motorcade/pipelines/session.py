"""A Spark session that is ready for pipelines, embedded or on a cluster.

    spark = start()                              all cores of this machine
    spark = start("spark://host:7077")           a cluster; `motorcade[spark]` must be installed on its machines
    spark = start("local[2]", {"spark.driver.memory": "2g"})

Java is checked before Spark starts, because Spark's message without it is no help; so is the master of a cluster.
The driver is this process. A master on this machine gets a driver that listens here alone, and workers with the Python
that runs the driver; other clusters have a Python of their own, which `spark.pyspark.python` or `PYSPARK_PYTHON` names.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from motorcade.pipelines import MISSING, PipelineError, register

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

OLDEST_JAVA: Final = 17
_NEEDED: Final = f"Spark needs Java {OLDEST_JAVA} or newer."
_INSTALL: Final = f"Install one (Debian: apt-get install openjdk-{OLDEST_JAVA}-jre-headless)"

#: Seconds that Java may take to say its version.
JAVA_PATIENCE: Final = 30.0

#: What pipelines want and users may change.
SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",  # a pipeline shows its own
    "spark.sql.session.timeZone": "UTC",  # as everything in the store
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    # Plans are shown, and logged with errors: not what may hold a password.
    "spark.sql.redaction.options.regex": "(?i)url|store|passw|secret|token",
}

#: 200 shuffle partitions, Spark's default, are for clusters.
LOCAL_SETTINGS: Final = {"spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2))}

#: Where everything is on this machine, the driver's ports are not open to others.
LOOPBACK_SETTINGS: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

#: Seconds that Spark, and after it Java, may take to stop; then Java is killed, which pipelines have to stand anyway.
STOP_PATIENCE: Final = 20.0

#: Seconds until py4j's thread for objects that are collected has come by; it sleeps for one when there are none.
FINALIZER_PATIENCE: Final = 2.0

#: Properties of Java by which users say where Derby writes its log.
DERBY_OWN: Final = (
    "derby.stream.error.file",
    "derby.stream.error.field",
    "derby.stream.error.method",
    "derby.stream.error.style",
    "derby.system.home",
)
DERBY_LOGGED: Final = ("derby.stream.error.field", "java.lang.System.err")
DERBY_SILENT: Final = ("derby.stream.error.method", "java.io.OutputStream.nullOutputStream")

#: Where Spark's log goes if it has a file; see `start`.
_LOG4J: Final = Path(__file__).with_name("log4j2.properties")
JAVA_SETTING: Final = "spark.driver.extraJavaOptions"
_MAX_OUTPUT: Final = 4096  #: bytes of what Java says when it does not start
_MAX_QUOTED: Final = 200  #: characters of what it says instead of its version

PYTHON_SETTING: Final = "spark.pyspark.python"
DEFAULT_PORT: Final = 7077  #: of a standalone master

#: Seconds that a standalone master may take to accept a connection.
MASTER_PATIENCE: Final = 5.0

#: Seconds until a cluster that has given no executor is reported. Spark and pipelines wait for one without limit.
EXECUTOR_PATIENCE: Final = 20.0

#: The standard library's: commands do not set up logs, and this one has to reach standard error, never the output.
log = logging.getLogger("motorcade.pipelines")


def start(
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
    name: str = "motorcade",
    output: Path | None = None,
) -> SparkSession:
    """Start a session with the source registered; reuse the one of this process.

    What Spark logs goes to the end of the file `output`, and what Java prints, warnings of its start above all, to a
    new file beside it (`.out` instead of `.log`); without `output` both go to where our own goes.
    """
    check_java()
    try:
        from pyspark import SparkConf  # noqa: PLC0415 - importing takes a while, and it is an extra
        from pyspark.sql import SparkSession  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise PipelineError(f"{error}; {MISSING}") from error
    local, here = master.startswith("local"), is_here(master)
    chosen = SETTINGS | (LOCAL_SETTINGS if local else {}) | (LOOPBACK_SETTINGS if here else {}) | dict(settings or {})
    if not local:
        check_master(master)
    _choose_python(chosen.get(PYTHON_SETTING), here=here)
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(chosen.items()))
    try:
        if output is not None:
            _launch(conf, output)
        spark = SparkSession.builder.config(conf=conf).getOrCreate()
    except PipelineError:
        raise
    except Exception as error:
        raise _not_started(conf, _words(error)) from error
    register(spark)
    _quiet_derby(spark, logged=output is not None)
    if not local:
        _look_for_executors(spark, master)
    return spark


def _launch(conf: SparkConf, output: Path) -> None:
    """Start Java with its output and Spark's log in files, if this process has none yet.

    Its output has a file of its own each time: the Java of a run that was killed may live on for a while, and what it
    says to its log or its output then is not the reason of this run.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - see above
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    if SparkContext._gateway is not None:  # noqa: SLF001 - no other way to ask
        return
    options = f'"-Dlog4j2.configurationFile={_LOG4J.as_uri()}" "-Dmotorcade.log={output}"'
    conf.set(JAVA_SETTING, f"{options} {conf.get(JAVA_SETTING, '')}".rstrip())
    # For this user's eyes: plans and settings may be in them.
    os.close(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    printed = output.with_suffix(".out")
    printed.unlink(missing_ok=True)
    with os.fdopen(os.open(printed, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600), "ab") as out:
        gateway: Any = None
        try:
            with _signals_wait():
                gateway = launch_gateway(conf, {"stdout": out, "stderr": out})  # type: ignore[no-untyped-call]
            SparkContext(conf=conf, gateway=gateway)
        except BaseException as error:
            if gateway is None:
                raise PipelineError(f"Java did not start: {_last_words(printed) or error}") from error
            words = _words(error)  # as long as there is a Java that knows them
            if gateway.proc is not None:  # else it was there before us
                _let_go(gateway)
                gateway.proc.kill()
            SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - so that another try gets another one
            if isinstance(error, Exception):
                raise _not_started(conf, words) from error
            raise


def _quiet_derby(spark: SparkSession, *, logged: bool) -> None:
    """Keep Derby, a database that Spark has with it, from leaving a file derby.log in the working directory.

    It writes to Java's standard error if that is in a file, else nowhere. It looks for these
    properties when it is used first, so it is early enough now, when all that users may have set is known.
    """
    system: Any = spark._jvm.java.lang.System  # type: ignore[union-attr]  # noqa: SLF001 - there is no other way to it
    own = Path(system.getProperty("user.dir"), "derby.properties").exists()
    if not own and all(system.getProperty(key) is None for key in DERBY_OWN):
        system.setProperty(*(DERBY_LOGGED if logged else DERBY_SILENT))


def _not_started(conf: SparkConf, words: str) -> PipelineError:
    return PipelineError(f"Spark cannot be started on {conf.get('spark.master')}: {words}")


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until this ends: a Java that is left while it starts would never end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in both}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _last_words(printed: Path) -> str:
    """Return the last output of Java before it ended."""
    with printed.open("rb") as said:
        lines = said.read(_MAX_OUTPUT).decode(errors="replace").splitlines()
    return " ".join(
        line.strip() for line in lines if line.strip() and not line.startswith(("\tat ", "WARNING: Using "))
    )


def stop(spark: SparkSession, patience: float = STOP_PATIENCE) -> None:
    """Stop Spark and its Java, whatever this thread was saying to them when it was interrupted.

    Not needed where the process ends anyway, as long as Java may live a moment longer.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - see above

    stopping = threading.Thread(target=_stop, args=[spark], daemon=True)  # it has a connection of its own
    stopping.start()
    stopping.join(patience)
    gateway = SparkContext._gateway  # noqa: SLF001 - no other way to Java
    if gateway is None or (process := gateway.proc) is None:  # it was there before us
        return
    _let_go(gateway)
    process.stdin.close()  # by this Java learns that it is no longer needed
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - so that another session gets a Java of its own


def _let_go(gateway: Any) -> None:
    """Keep py4j from telling Java of objects that are collected; return when it is not about to.

    Race: a thread of its own does that. When Java is gone, or goes before it has answered, py4j would write a traceback
    to standard error for each object; a client that is not connected is silent. `shutdown` would connect, and fail as
    loudly.
    """
    client = gateway._gateway_client  # noqa: SLF001 - no other way to it
    client.is_connected = False
    tasks = getattr(client, "finalizer_deque", None)  # without PYSPARK_PIN_THREAD there is no such thread
    if tasks is not None:
        idle = _Idle()
        tasks.append((idle, ""))  # the next that its thread takes
        idle.reached.wait(FINALIZER_PATIENCE)


class _Idle:
    """Stands for a client with an object to collect, for py4j."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def garbage_collect_object(self, _target: str, _enqueue: bool) -> None:
        self.reached.set()


def _stop(spark: SparkSession) -> None:
    with suppress(Exception):  # Java is gone
        spark.stop()


def is_here(master: str) -> bool:
    """Return True if all of it runs on this machine: embedded, or a cluster with masters on the loopback interface."""
    if master.startswith("local"):
        return True
    hosts = [host for host, _port in _masters(master)]
    return bool(hosts) and all(_is_loopback(host) for host in hosts)


def check_master(master: str) -> None:
    """Refuse a standalone cluster none of whose masters answers: Spark would take a minute, and say less."""
    reasons = []
    for host, port in _masters(master):
        try:
            socket.create_connection((host, port), MASTER_PATIENCE).close()
            return
        except OSError as error:
            reasons.append(f"{host}:{port}: {error.strerror or error}")
    if reasons:
        raise PipelineError(
            f"there is no Spark master at {master} ({'; '.join(reasons)}); start it, or name another one with --master"
        )


def _masters(master: str) -> list[tuple[str, int]]:
    """Return the addresses of `spark://host:port,host:port`; other clusters have no address to try."""
    kind, _, addresses = master.partition("://")
    if kind != "spark":
        return []
    found = []
    for address in addresses.split(","):
        host, colon, port = address.rpartition(":")
        if colon and not port.isdigit():
            raise PipelineError(f"{master!r} is no master; write spark://HOST:PORT")
        found.append((host.strip("[]"), int(port)) if colon else (address, DEFAULT_PORT))
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _choose_python(wanted: str | None, *, here: bool) -> None:
    """Choose Python in the environment, which alone PySpark reads; `spark-submit` may not be in between."""
    if wanted:
        os.environ["PYSPARK_PYTHON"] = wanted
    elif here:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _look_for_executors(spark: SparkSession, master: str) -> None:
    """Report that a cluster gives none: Spark's warning about it is one of many that are hidden."""
    context: Any = spark.sparkContext
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return  # it asks for executors when there is work
    tracker = context._jsc.sc().statusTracker()  # noqa: SLF001 - PySpark's own does not tell of executors
    end = time.monotonic() + EXECUTOR_PATIENCE
    while len(tracker.getExecutorInfos()) < 2:  # the driver is one of them
        if time.monotonic() > end:
            log.warning(
                "%s has given no executor within %g s; waiting for one. Are there workers with a core free, and with "
                "as much memory as spark.executor.memory says?",
                master,
                EXECUTOR_PATIENCE,
            )
            return
        time.sleep(0.1)


def _words(error: BaseException) -> str:
    """Return the message of the innermost error, without the stack of Java."""
    java = getattr(error, "java_exception", None)
    if java is None:
        return str(error).partition("\n")[0]
    while java.getCause() is not None:
        java = java.getCause()
    return str(java.getMessage() or java.toString()).partition("\n")[0]


def check_java() -> int:
    """Return the version of the Java that Spark will use; `PipelineError` if there is none, or an old one."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")  # as Spark's own script chooses
    if program is None:
        raise PipelineError(
            f"{_NEEDED} There is no `java` in PATH, and JAVA_HOME is not set. {_INSTALL}, and set JAVA_HOME to its "
            "folder if it is not in PATH"
        )
    try:
        done = subprocess.run(  # noqa: S603 - the Java that Spark would run anyway
            [program, "-version"], capture_output=True, text=True, timeout=JAVA_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        why = f"it has not told its version within {JAVA_PATIENCE:g} s"
        raise _no_java(program, home, f"cannot be run: {why}") from error
    except OSError as error:
        raise _no_java(program, home, f"cannot be run: {_why_not(program, error)}") from error
    said = (done.stderr + done.stdout).strip()
    version = _version(said)
    if version is None:
        raise _no_java(program, home, f"is no such Java: asked for its version, it says {said[:_MAX_QUOTED]!r}")
    if version < OLDEST_JAVA:
        raise _no_java(program, home, f"is no such Java: it is Java {version}")
    return version


def _no_java(program: str, home: str | None, trouble: str) -> PipelineError:
    """Return what is wrong with the Java that was tried, why it was chosen, and what to do."""
    if home:
        chosen = f"of JAVA_HOME={home}"
        remedy = (
            "Set JAVA_HOME to the folder of another one, which has bin/java in it, or unset it if the `java` of PATH "
            "will do"
        )
    else:
        chosen = "the first one of PATH; JAVA_HOME is not set"
        remedy = f"{_INSTALL}, and set JAVA_HOME to its folder"
    return PipelineError(f"{_NEEDED} {program} ({chosen}) {trouble}. {remedy}")


def _why_not(program: str, error: OSError) -> str:
    if Path(program).exists():
        return error.strerror or str(error)
    return "there is no bin/java in it" if Path(program).parents[1].is_dir() else "there is no such folder"


def _version(text: str) -> int | None:
    """Return 17 of `openjdk version "17.0.15"`, 8 of `java version "1.8.0_402"`."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None
