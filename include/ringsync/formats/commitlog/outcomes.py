"""What can become of a record; the kernels return these codes where they otherwise return addresses."""

FULL, UNKNOWN_TABLE, UNKNOWN_COLUMN, MALFORMED, TOO_LARGE, DECODED = range(1, 7)
"""``FULL``: it does not fit into what is left of the batch, which is handed on, and the record begun again;
``TOO_LARGE``: it would not fit into the largest one either."""

LAST_CODE = DECODED

REASONS = {
    UNKNOWN_TABLE: "of a table that is not in the schema",
    UNKNOWN_COLUMN: "names a column that its table does not have in the schema",
    TOO_LARGE: "its change rows would need more memory than a batch may have",
    MALFORMED: "cannot be decoded by the schema, though its checksum is right: is the schema of that day?",
}
"""For people: what is wrong with a record."""
