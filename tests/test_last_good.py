"""While ``ringsync.yaml`` is wrong, the last good configuration is there for what protects production."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ringsync.config import ConfigError, load_config
from ringsync.config import last_good as kept
from ringsync.config.last_good import Outdated, load_last_good, what_is_wrong
from ringsync.installed import installed

GOOD = "server_name: s\ncassandra: {contact_points: [10.0.0.1]}\nstore: {url: lake}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    (tmp_path / "airflow").mkdir()
    return tmp_path / "airflow"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ringsync.yaml").write_text(GOOD)
    return tmp_path / "config" / "ringsync.yaml"


def write(conf: Path, text: str, age_s: float = 60.0) -> None:
    conf.write_text(text)
    os.utime(conf, (time.time() - age_s,) * 2)


SECTION = "sync: {exclude: [%s]}\n"
WRONG = {
    "a typo": (GOOD + "kafca: null\n", "kafca: unknown key; did you mean kafka?"),
    "no YAML": (GOOD + "kafka: [", "not valid YAML"),
    "cut off": ("", "the configuration must be a mapping"),
    "a section is missing": ("server_name: s\n", "cassandra: this key is required"),
    "no such day": (GOOD + SECTION % "2026-02-30", "line 4, column 18"),
    "no such time": (GOOD + SECTION % "2026-11-28 25:00:00", "line 4, column 18"),
    "no digits": (GOOD + SECTION % "0b_", "line 4, column 18"),
    "too many digits": (GOOD + SECTION % ("9" * 5000), "line 4, column 18"),
    "too many digits to show": (GOOD + f"scan: {{min_splits: 0x{'f' * 5000}}}\n", "cannot be read: ValueError"),
    "no integer": (GOOD + SECTION % "!!int x", "line 4, column 18"),
    "no moment": (GOOD + SECTION % "!!timestamp x", "line 4, column 18"),
    "no truth": (GOOD + SECTION % "!!bool x", "line 4, column 18"),
    "deep": (GOOD + SECTION % ("[" * 500 + "]" * 500), "cannot be read: RecursionError"),
    **{
        url: (GOOD.replace("lake", url), "store.url: ")
        for url in ("s3://b/x", "gs://", "file://lake", "GS://b/x", "gs://b/a//b", "/", "file:///", '"/a\\0b"')
    },
    "no such path": (GOOD + 'metrics: {prometheus_file: "a\\0b"}\n', "metrics.prometheus_file: "),
    "never comes": (GOOD + "replica: {verify_schedule: 0 0 31 2 *}\n", "replica.verify_schedule: "),
    "gone": (None, "cannot read the configuration: No such file or directory"),
}


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_and_the_last_good_one_is_used(
    home: Path, conf: Path, text: str | None, reason: str
) -> None:
    good = load_config(conf)
    assert load_last_good(conf) == (good, "")
    conf.write_text(text) if text is not None else conf.unlink()
    config, wrong = load_last_good(conf)
    assert config == good, "paths, too, which begin in the folder of the file"
    assert wrong.startswith(f"the last good configuration is used: {conf}: ")
    assert reason in wrong
    assert what_is_wrong(conf) == wrong
    write(conf, GOOD.replace("lake", "sea"))
    assert load_last_good(conf) == (load_config(conf), "")
    conf.write_text("")
    assert load_last_good(conf)[0].store.url.endswith("/sea")


@pytest.mark.parametrize("text", [GOOD.replace("lake", "sea"), "", None])
def test_a_task_waits_until_the_file_has_settled(
    home: Path, conf: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began seconds after a change worked by the old configuration to the end of its run."""
    monkeypatch.setattr(kept, "SETTLED_S", 0.2)
    write(conf, GOOD)
    good, _ = load_last_good(conf, waits=True)
    conf.write_text(text) if text is not None else conf.unlink()
    assert load_last_good(conf)[0] == good, "who parses a DAG cannot wait"
    found, wrong = load_last_good(conf, waits=True)
    assert found == (load_config(conf) if text else good)
    assert bool(wrong) == (not text)


def test_a_file_that_an_editor_is_still_writing_does_not_become_the_last_good_one(home: Path, conf: Path) -> None:
    """Cut off behind a section, it is right by itself."""
    whole = GOOD + "archive: {policy: always}\n"
    write(conf, whole)
    good = load_last_good(conf)
    write(conf, GOOD, age_s=0)
    assert load_last_good(conf) == good
    conf.write_text(GOOD + "archive: {")
    assert load_last_good(conf)[0] == good[0]
    write(conf, GOOD)
    assert load_last_good(conf)[0].archive.policy == "pressure"


def test_what_was_never_good_is_an_error(home: Path, conf: Path, tmp_path: Path) -> None:
    other = tmp_path / "ringsync.yaml"
    other.write_text("")
    load_last_good(conf)
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_last_good(other)
    assert "must be a mapping" in what_is_wrong(other)
    (copy,) = (home / "ringsync").iterdir()
    copy.write_text("{")
    conf.write_text("")
    with pytest.raises(ConfigError, match=str(conf)):
        load_last_good(conf)


def test_a_copy_is_its_users_alone_and_written_whole_and_seldom(
    home: Path, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_last_good(conf)
    (copy,) = (home / "ringsync").iterdir()
    assert (copy.read_text(), copy.stat().st_mode & 0o77) == (GOOD, 0)
    written = copy.stat().st_ino
    load_last_good(conf)
    assert copy.stat().st_ino == written
    monkeypatch.setattr(kept.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    write(conf, GOOD.replace("lake", "sea"))
    assert load_last_good(conf)[1] == "", "what cannot be kept stops nobody"
    assert copy.read_text() == GOOD


def test_outside_of_airflow_nothing_is_kept(tmp_path: Path, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    load_last_good(conf)
    assert not [*(tmp_path / "home").iterdir()]


def test_a_run_is_outdated_once_another_good_configuration_is_there(home: Path, conf: Path) -> None:
    write(conf, GOOD, 300)
    is_outdated = Outdated(conf, load_config(conf))
    assert not is_outdated()
    write(conf, GOOD + "# a comment\n", 200)
    assert not is_outdated(), "it says the same"
    write(conf, GOOD.replace("lake", "sea"), 0)
    assert not is_outdated(), "an editor may still be writing it"
    os.utime(conf, (time.time() - 10,) * 2)
    assert is_outdated()
    assert is_outdated(), "whoever asks again gets the same answer"
    write(conf, GOOD, 100)
    assert not is_outdated(), "it is as before again"


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_makes_no_run_outdated_and_is_named_until_it_is_right(
    home: Path, conf: Path, text: str | None, reason: str
) -> None:
    """The next run would only fail, or go on with the last good one, too."""
    write(conf, GOOD, 300)
    config, wrong = load_last_good(conf)
    is_outdated = Outdated(conf, config, wrong)
    assert (is_outdated(), is_outdated.wrong) == (False, "")
    write(conf, text) if text is not None else conf.unlink()
    assert not is_outdated()
    assert is_outdated.wrong.startswith(f"the last good configuration is used: {conf}: ")
    assert reason in is_outdated.wrong
    begun_meanwhile = Outdated(conf, *load_last_good(conf))
    assert (begun_meanwhile(), begun_meanwhile.wrong) == (False, is_outdated.wrong)
    write(conf, GOOD, 200)
    assert (is_outdated(), is_outdated.wrong) == (False, "")
    assert (begun_meanwhile(), begun_meanwhile.wrong) == (False, ""), "the archive said so until the end of its run"
    write(conf, GOOD.replace("lake", "sea"), 100)
    assert is_outdated()


def test_a_run_ends_when_the_file_stays_wrong_unless_it_protects_production(home: Path, conf: Path) -> None:
    """Another host's file may be right, and name a table that this run leaves out."""
    clock = [1000.0]
    write(conf, GOOD, 300)
    config, _ = load_last_good(conf)
    ends, lasts = (Outdated(conf, config, lasting=lasting, clock=lambda: clock[0]) for lasting in (False, True))
    write(conf, "sync: [", 200)
    for now_s, is_over in ((1000, False), (1299, False), (1300, True)):
        clock[0] = now_s
        assert (ends(), lasts()) == (is_over, False)
    write(conf, GOOD, 100)
    assert not ends()
    write(conf, "sync: [", 50)
    clock[0] += 299
    assert not ends(), "it counts from when the file was right last"


def test_a_file_that_is_gone_from_the_first_look_on_is_wrong(home: Path, conf: Path) -> None:
    write(conf, GOOD, 300)
    is_outdated = Outdated(conf, load_config(conf))
    conf.unlink()
    assert not is_outdated()
    assert is_outdated.wrong


def test_a_run_ends_when_another_version_is_installed(home: Path, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, digest = [1000.0], [installed()["ringsync"]]
    write(conf, GOOD, 300)
    monkeypatch.setattr("ringsync.config.last_good.digest_of_source", lambda: digest[0])
    is_outdated = Outdated(conf, load_config(conf), clock=lambda: clock[0])

    def minutes_later(minutes: float) -> bool:
        clock[0] += 60 * minutes
        return is_outdated()

    assert [minutes_later(1) for _ in range(3)] == [False] * 3
    with monkeypatch.context() as installing:
        installing.setattr("ringsync.config.last_good.digest_of_source", lambda: Path("/nowhere").read_text())
        assert not minutes_later(1), "a file that was listed is gone"
    digest[0] = "half of the files"
    assert not minutes_later(1)
    digest[0] = "all of the files"
    assert not minutes_later(1), "somebody was installing"
    assert not minutes_later(0.5)
    assert minutes_later(0.5)
    assert minutes_later(0), "whoever asks again gets the same answer"


def test_a_disk_that_is_away_for_a_moment_hides_no_change(
    home: Path, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(conf, GOOD, 300)
    is_outdated = Outdated(conf, load_config(conf))
    write(conf, GOOD.replace("lake", "sea"))
    with monkeypatch.context() as away:
        away.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        assert not is_outdated()
        assert "Stale file handle" in is_outdated.wrong
    assert is_outdated()


def test_a_file_is_parsed_once_for_each_change(home: Path, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops ask each second, and on the hosts of Cassandra."""
    write(conf, GOOD, 300)
    is_outdated, parsed = Outdated(conf, load_config(conf)), []
    monkeypatch.setattr(kept, "parse_config", lambda *given: parsed.append(given) or load_config(conf))
    for text in (GOOD, GOOD + "# more\n", GOOD + "#\n", GOOD + "kafca: null\n"):
        write(conf, text, 200 - len(text))
        parsed.clear()
        for _ in range(3):
            with suppress(ConfigError):
                is_outdated()
        assert len(parsed) == 1
