"""ringsync.yaml as a document: how it is read, and how its mistakes are told to who edits it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ringsync.config.section import ConfigError

_SECRETS = {"password", "key_password", "client_secret", "token"}
_LOGINS = {"schema_registry_login", "oauth", "arguments"}
"""Keys whose values are not repeated: somebody may have written the secret itself there."""

_PLAIN = {
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a mapping of keys",
    "model_type": "must be a mapping of keys",
    "string_type": "must be a text: put it between quotes",
    "int_type": "must be an integer, without quotes or a unit",
    "float_type": "must be a number, without quotes or a unit",
    "bool_type": "must be true or false",
}
"""Our sentences instead of pydantic's, by the types of its errors."""


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key which is written twice: the last would win, and nobody would be told. No message
    repeats what is written: it may be a secret in a wrong place."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(f"a key is written twice, in lines {lines[key.value]} and {line}: put both together")
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # 2026-02-30, 0b_, !!int x
            if isinstance(error, ConfigError):
                raise
            raise yaml.MarkedYAMLError(problem_mark=node.start_mark) from error


def read_document(path: str | Path, text: str) -> dict[Any, Any]:
    """Read the mapping of keys in a YAML file.

    :param path: name of the file, for messages
    :raises ConfigError: it is no YAML, no mapping, or has a key twice
    """
    try:
        document = yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(
            f"{path}: not valid YAML: {place}this cannot be read. Indent with spaces, close brackets and quotes, put "
            "texts with special characters, such as * & ! % : # {, or like a date or a number, between quotes"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: the configuration must be a mapping of keys, see config/ringsync.yaml")
    return document


def real_problems(error: ValidationError) -> Iterator[Any]:
    """Yield pydantic's errors without those that only follow from others: a list with a wrong item counts as short."""
    places = [problem["loc"] for problem in error.errors()]
    for problem in error.errors():
        place = problem["loc"]
        inside = any(len(other) > len(place) and other[: len(place)] == place for other in places)
        if not (inside and problem["type"] == "too_short"):
            yield problem


def explain(problem: Any, model: type[BaseModel]) -> str:
    """Explain one of pydantic's errors to a person who edits the file.

    :param model: the whole configuration
    """
    location = [str(part) for part in problem["loc"]]
    is_wrong_key = problem["type"] in ("extra_forbidden", "invalid_key")
    named = location[:-1] if is_wrong_key and not _SECRETS.isdisjoint(location[:-1]) else location
    key = ".".join(part for part in named if part != "[key]")
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1], model)
        near = did_you_mean(location[-1], known) or f"known keys here: {', '.join(known)}"
        return f"{key}: unknown key; {near}"
    if problem["type"] == "missing":
        return f"{key}: this key is required"
    message = _PLAIN.get(problem["type"], problem["msg"].removeprefix("Value error, ").replace("Input should", "must"))
    if problem["type"] == "model_type":
        message += f"; known keys here: {', '.join(_known_keys(location, model))}"
    return f"{key}: {message}{_shown(problem['input'], location)}" if key else message


def _shown(found: object, location: Collection[str]) -> str:
    """Repeat what was found, unless it may be a secret, alone or within a URL."""
    text = repr(found)
    is_secret = not _SECRETS.isdisjoint(location) or not _LOGINS.isdisjoint([*location][-1:])
    return "" if isinstance(found, dict | list | BaseModel) or is_secret or "@" in text else f", found {text}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Ask whether a known name was meant; empty: none is near."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]}?" if near else ""


def _known_keys(location: list[str], model: Any) -> list[str]:
    for part in location:
        if part not in model.model_fields:
            continue  # a key that users name: a table
        annotation = model.model_fields[part].annotation
        model = next(
            kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")
        )
    return list(model.model_fields)
