"""What can become of a record; the kernels return these codes where they otherwise return addresses."""

FULL, UNKNOWN_TABLE, UNKNOWN_COLUMN, MALFORMED, DECODED = range(1, 6)
"""``FULL``: it does not fit into what is left of the batch, which is handed on, and the record begun again."""

LAST_CODE = DECODED

REASONS = {
    UNKNOWN_TABLE: "of a table that is not in the schema",
    UNKNOWN_COLUMN: "names a column that its table does not have in the schema",
    MALFORMED: "cannot be decoded by the schema, though its checksum is right: is the schema of that day?",
}
"""For people: what is wrong with a record."""
