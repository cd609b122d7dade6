"""ringsync.yaml: every mistake is named with its key and a remedy."""

from pathlib import Path

import pytest
import yaml

from ringsync.config import ConfigError, load_config

MINIMAL = {"server_name": "demo", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
EXAMPLE = Path(__file__).parent.parent / "config" / "ringsync.yaml"


def written(folder: Path, document: object) -> Path:
    path = folder / "ringsync.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def test_the_example_is_valid_and_shows_the_defaults(tmp_path: Path) -> None:
    example, minimal = load_config(EXAMPLE), load_config(written(tmp_path, MINIMAL))
    for section in ("stream", "replica", "scan", "verify", "airflow"):
        assert getattr(example, section) == getattr(minimal, section)
    assert example.cassandra == minimal.cassandra


def test_the_example_comments_every_key() -> None:
    text = EXAMPLE.read_text()
    for line in text.splitlines():
        if ":" in line and not line.lstrip().startswith("#"):
            assert "#" in text[: text.index(line)], line


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    document = {**MINIMAL, "airflow": {"password": {"file": "secret"}}}
    config = load_config(written(tmp_path, document))
    assert config.store.url == str(tmp_path / "lake")
    (tmp_path / "secret").write_text("hush\n")
    assert config.airflow.password.resolve("airflow.password") == "hush"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cassandra": {"contact_points": ["a"], "prot": 1}}, r"cassandra\.prot: unknown key; did you mean port\?"),
        ({"zzz": 1}, "zzz: unknown key; known keys here: server_name"),
        ({"cassandra": {}}, r"cassandra\.contact_points: this key is required"),
        ({"cassandra": {"contact_points": []}}, r"cassandra\.contact_points"),
        ({"cassandra": {"contact_points": ["a"], "port": "9042"}}, r"cassandra\.port: .*integer, found '9042'"),
        ({"cassandra": {"contact_points": ["a"], "port": 0}}, r"cassandra\.port: .*greater than or equal to 1"),
        ({"cassandra": {"contact_points": ["a"], "consistency_level": "QUORUMM"}}, r"consistency_level: .*'QUORUM'"),
        ({"cassandra": {"contact_points": ["a"], "username": "u"}}, "username and password go together"),
        ({"server_name": "my server"}, "server_name: must be letters, digits and underscores"),
        ({"airflow": {"password": {"env": "A", "file": "b"}}}, r"airflow\.password: a secret is a reference"),
        ({"stream": {"mapping": "lossy"}}, r"stream\.mapping"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, {**MINIMAL, **change}))


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**MINIMAL, "zzz": 1, "stream": {"mapping": "x"}}))
    assert "zzz" in str(caught.value)
    assert "stream.mapping" in str(caught.value)


def test_a_plain_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    document = {**MINIMAL, "airflow": {"password": "hunter2"}}
    with pytest.raises(ConfigError, match=r"airflow\.password: a secret must not stand here itself") as caught:
        load_config(written(tmp_path, document))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML.*line 1"), ("- a", "must be a mapping"), ("", "must be a mapping"), ("a: b: c", "YAML")],
)
def test_malformed_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".*", r"(?s:.*)")):
        load_config(written(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load_config(tmp_path / "nothing.yaml")


def test_secrets_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSYNC_AIRFLOW_PASSWORD", raising=False)
    config = load_config(written(tmp_path, MINIMAL))
    with pytest.raises(
        ConfigError, match=r"airflow\.password: environment variable RINGSYNC_AIRFLOW_PASSWORD is not set"
    ):
        config.airflow.password.resolve("airflow.password")
