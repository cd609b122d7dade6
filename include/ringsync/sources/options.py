"""The options of a Spark data source, which Spark passes on without a look, and rows in a form that Spark takes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import pyarrow as pa


class OptionError(ValueError):
    """An option of a data source is missing or wrong; the message names it."""


def checked(
    source: str, given: Mapping[str, object], known: Sequence[str], choices: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the options of a data source; Spark does not tell upper case from lower case in their names.

    :param known: names of all options
    :param choices: values that an option may have, if it may not have any
    :raises OptionError: an option is unknown, or has another value
    """
    options = {name.lower(): str(value) for name, value in given.items()}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise OptionError(f"{source} has no option {name}; {hint}")
        if value not in choices.get(name, (value,)):
            raise OptionError(f"option {name} of {source} is {' or '.join(choices[name])}, not {value!r}")
    return options


def for_spark(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with the types of :func:`schema_for_spark`."""
    return rows.cast(schema_for_spark(rows.schema))


def schema_for_spark(schema: pa.Schema) -> pa.Schema:
    """Replace binary types of fixed length, which Spark does not have."""
    return pa.schema(
        [field.with_type(pa.binary()) if pa.types.is_fixed_size_binary(field.type) else field for field in schema]
    )
