"""References to secrets, and the base class of all sections of the configuration."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class ConfigError(ValueError):
    """The configuration is wrong: the message names the file, the key and what to do."""


class Section(BaseModel):
    """A section of the configuration: it is frozen, refuses unknown keys and converts nothing silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Secret(Section):
    """A reference to a secret, by exactly one of the three keys."""

    env: str | None = None
    file: str | None = None
    airflow_connection: str | None = None

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
        :raises ConfigError: the variable is not set, or the file cannot be read
        """
        if self.file is not None:
            try:
                return Path(self.file).read_text().rstrip("\n")
            except OSError as error:
                raise ConfigError(f"{key}: cannot read the secret's file {self.file}: {error.strerror}") from None
        variable = self.env or connection_variable(self.airflow_connection or "")
        if variable not in os.environ:
            remedy = f"the DAGs set it from the Airflow connection {self.airflow_connection}; elsewhere set it yourself"
            raise ConfigError(
                f"{key}: environment variable {variable} is not set" + (self.env is None) * f" ({remedy})"
            )
        return os.environ[variable]


def connection_variable(connection_id: str) -> str:
    """Name the environment variable in which the DAGs pass an Airflow connection's password to a Spark application."""
    return "RINGSYNC_PASSWORD_" + re.sub(r"\W", "_", connection_id).upper()
