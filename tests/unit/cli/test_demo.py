"""`motorcade demo` tells a story that is true."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import run_process


def test_the_demonstration_plays_every_scene_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0 means that every message it shows was checked; its folder and its node are gone.

    The last scene is in tests/pipelines/test_runner_process.py.
    """
    (tmp_path / "tmp").mkdir()
    done = run_process("demo", "--no-spark", cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")})
    assert 0 == done.returncode, done.stderr
    for scene in (
        "QoS 0, 1 and 2",
        "retained",
        "will",
        "shared",
        "offline",
        "queue",
        "last value",
        "list of vehicles",
        "WebSocket",
        "Access",
        "paho-mqtt",
    ):
        assert scene in done.stdout
    assert 12 == done.stdout.count("✓")
    assert "Left out: the whole loop on Spark" in done.stdout
    assert [] == list((tmp_path / "tmp").iterdir())
    assert [tmp_path / "tmp"] == list(tmp_path.iterdir())
