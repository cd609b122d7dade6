"""What all sections of ringsync.yaml are made of: keys, paths of files, references to secrets."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

_YAML_WORDS = {"True": ("true",), "False": ("off", "false"), "None": ("null",)}
"""What YAML makes of words without quotes, and the words that somebody may have written."""


class ConfigError(ValueError):
    """The configuration is wrong: the message names the file, the key and what to do."""


class Section(BaseModel):
    """A section of the configuration: it is frozen, refuses unknown keys and converts nothing silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _words(cls, value: Any, info: ValidationInfo) -> Any:
        """Take ``off`` for the word that it is, where only words are allowed: YAML makes a truth value of it."""
        kind = cls.model_fields[info.field_name or ""].annotation
        words = get_args(kind) if get_origin(kind) is Literal and not isinstance(value, str) else ()
        return next((word for word in _YAML_WORDS.get(repr(value), ()) if word in words), value)

    def secrets(self, key: str) -> dict[str, Secret]:
        """Return the references to secrets in this section, and in those inside, by their keys.

        :param key: key of this section
        """
        found: dict[str, Secret] = {}
        for name in type(self).model_fields:
            part = getattr(self, name)
            if isinstance(part, Secret):
                found[f"{key}.{name}"] = part
            elif isinstance(part, Section):
                found |= part.secrets(f"{key}.{name}")
        return found

    def sealed(self) -> Self:
        """Return this section with its secrets, which are in no text of it: for executors, who can read none."""
        parts = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_copy(
            update={name: part.sealed() for name, part in parts.items() if isinstance(part, Section)}
        )


def absolute(path: str, info: ValidationInfo) -> str:
    """Return a path as it is from anywhere: relative ones begin in the folder that is the validation's context.

    :raises ValueError: it is empty, or means something else than it says
    """
    if not path.strip():
        raise ValueError("must not be empty: write the path of a file or folder, or leave the key out")
    if not path.isprintable():
        raise ValueError("has a character that no path has, such as a line break")
    if path.startswith("~") or re.search(r"\$\{?\w", path):
        raise ValueError("is taken as it is written: write the whole path instead of ~ and variables")
    return path if info.context is None else str(info.context / path)


Filename = Annotated[str, AfterValidator(absolute)]
"""Path of a file or folder; relative paths begin in the folder that is the validation's context, if there is one."""


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be the name of an environment variable: letters, digits and _, without $")
    return name


class Secret(Section):
    """A reference to a secret, by exactly one of the three keys."""

    env: Annotated[str, AfterValidator(_variable)] | None = None
    file: Filename | None = None
    airflow_connection: str | None = None
    _value: str | None = PrivateAttr(None)

    def sealed(self) -> Secret:
        """Return the reference with the secret itself; without it if it cannot be read: who needs it says so."""
        found = self.model_copy()
        with suppress(ConfigError):
            found._value = self.resolve("")
        return found

    @model_validator(mode="before")
    @classmethod
    def _no_plain_text(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(
                "do not write the secret itself here: write {env: NAME}, {file: PATH} or {airflow_connection: ID}"
            )
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Secret:
        if sum(value is not None for value in (self.env, self.file, self.airflow_connection)) != 1:
            raise ValueError("a secret is a reference with exactly one of the keys env, file, airflow_connection")
        return self

    def resolve(self, key: str) -> str:
        """Read the secret.

        :param key: configuration key, for the error message
        :raises ConfigError: the variable is not set, the file cannot be read, or there is not one line of text
        """
        if self._value is not None:
            return self._value
        if self.file is not None:
            try:
                # Editors on Windows begin a file with a mark, and end lines with two characters.
                text = Path(self.file).read_text("utf-8-sig")
            except OSError as error:
                raise ConfigError(f"{key}: cannot read the secret's file {self.file}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ConfigError(f"{key}: the secret's file {self.file} is not text in UTF-8") from None
            return _one_line(text, f"{key}: the secret's file {self.file}")
        variable = self.env or connection_variable(self.airflow_connection or "")
        if variable not in os.environ:
            remedy = f"the DAGs set it from the Airflow connection {self.airflow_connection}; elsewhere set it yourself"
            raise ConfigError(
                f"{key}: environment variable {variable} is not set" + (self.env is None) * f" ({remedy})"
            )
        return _one_line(os.environ[variable], f"{key}: environment variable {variable}")


def _one_line(text: str, place: str) -> str:
    lines = text.splitlines()
    if len(lines) != 1 or not lines[0]:
        raise ConfigError(f"{place} {'has several lines' if any(lines) else 'is empty'}: a secret is one line")
    return lines[0]


def connection_variable(connection_id: str) -> str:
    """Name the environment variable in which the DAGs pass an Airflow connection's password to a Spark application."""
    return "RINGSYNC_PASSWORD_" + re.sub(r"\W", "_", connection_id).upper()
