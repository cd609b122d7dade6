"""The parser of the statements in a CQL text that describe tables. Types stay text here.

The texts of Cassandra 4.0, 4.1 and 5.0 come from schema/TableMetadata.appendCqlTo, schema/ColumnMetadata,
schema/ViewMetadata and db/SchemaCQLHelper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from ringsync.cql.identifiers import printable
from ringsync.cql.tokens import Token, Tokens
from ringsync.schema.table import SchemaError

DEEPEST_TYPE = 50
"""The deepest nesting of types; the limit keeps a damaged text from exhausting the stack."""

_NO_TABLES = {
    "CREATE": ("keyspace", "schema", "function", "aggregate", "index", "custom", "trigger", "role", "user"),
    "ALTER": ("keyspace", "schema", "role", "user", "materialized"),
}
"""Words after CREATE and ALTER in statements that say nothing about tables."""
_UNFINISHED = {'"': "quoted name", "'": "string", "$$": "string", "/*": "comment"}


@dataclass(frozen=True)
class ColumnText:
    """A column of a table or a field of a type; ``start`` is the token of its name."""

    start: Token
    name: str
    type_text: str
    static: bool = False


@dataclass
class TableText:
    """A table or a materialised view; ``start`` is the token of its name.

    :ivar columns: columns by name; empty for a view
    :ivar partition_key: names of columns, in order; ``clustering`` likewise
    :ivar descending: by clustering column: whether its order is DESC
    :ivar table_id: 32 hexadecimal digits; empty: the text does not have it
    :ivar dropped: dropped columns and the time of the drop (µs), by name
    :ivar base: keyspace and name of a view's table
    :ivar selected: columns that a view selects; None: all
    """

    start: Token
    keyspace: str
    name: str
    columns: dict[str, ColumnText] = field(default_factory=dict)
    partition_key: list[str] = field(default_factory=list)
    clustering: list[str] = field(default_factory=list)
    descending: dict[str, bool] = field(default_factory=dict)
    table_id: str = ""
    compact: bool = False
    dropped: dict[str, tuple[ColumnText, int]] = field(default_factory=dict)
    base: tuple[str, str] | None = None
    selected: list[str] | None = None

    @property
    def full_name(self) -> str:
        return f"{printable(self.keyspace)}.{printable(self.name)}"


class Statements(Tokens):
    """A reader of a text's statements and their content. Of two statements about one thing the later counts.

    :param source_name: name of the file, for messages
    :ivar user_types: name token and fields, by keyspace and type name
    :ivar tables: tables by id, or by keyspace and name if the text has no id
    :ivar newest: the last table or view that was created with a name, by keyspace and name
    :raises SchemaError: a statement is none of those that DESCRIBE and snapshots write, or a string, quoted name or
        comment has no end
    """

    skipped = ("space", "hidden", "comment")

    def __init__(self, text: str, source_name: str) -> None:
        super().__init__(text, source_name, SchemaError)
        for token in self._tokens:
            for opening, what in _UNFINISHED.items() if token.kind == "sign" else ():
                if text.startswith(opening, token.offset):
                    self.error(f"this {what} never ends", token)
        self.keyspace: str | None = None
        self.user_types: dict[str, dict[str, tuple[Token, list[ColumnText]]]] = {}
        self.tables: dict[tuple[str, ...], TableText] = {}
        self.newest: dict[tuple[str, str], TableText] = {}
        while self.next.kind != "end":
            self.statement()

    def skip_until(self, *words: str) -> None:
        """Skip all tokens before the first of these keywords or signs outside brackets, or before the end.

        :raises SchemaError: a bracket is not closed
        """
        opened: list[Token] = []
        while opened or not (self.next.kind in ("name", "sign") and self.next.value in words):
            token = self.take()
            if token.kind == "end":
                if opened:
                    self.error(f"this {opened[-1].text} is never closed", opened[-1])
                return
            if token.kind == "sign" and token.text in "([{":
                opened.append(token)
            elif token.kind == "sign" and token.text in ")]}" and opened:
                opened.pop()

    def fail(self, expected: str) -> NoReturn:
        """Raise an error that says what was expected instead of the next token."""
        text = self.next.text or "the end"
        self.error(f"expected {expected}, found {text if len(text) < 60 else text[:60] + '…'}", self.next)

    def error(self, problem: str, token: Token) -> NoReturn:
        """Raise an error that says what is wrong with a token."""
        before = self.text[: token.offset]
        line, column = before.count("\n") + 1, token.offset - (before.rfind("\n") + 1) + 1
        raise SchemaError(f"{self._what}:{line}:{column}: {problem}")

    def statement(self) -> None:
        """Read one statement and its semicolon; the last one may lack it."""
        if self.accept("create"):
            self.accept("or", "replace")
            self.create()
        elif self.accept("alter"):
            if self.accept("table"):
                self.alter_table()
            else:
                self.pass_over("ALTER", "TABLE (DESCRIBE and snapshots write every change of a type into its CREATE)")
        elif self.accept("use"):
            self.keyspace = self.name("a keyspace")
        elif self.next.value in ("grant", "revoke") and self.next.kind == "name":
            self.skip_until(";")
        elif self.next.text != ";":
            self.fail("a statement that DESCRIBE or a snapshot writes: CREATE …, ALTER TABLE … or USE")
        if self.next.kind != "end":
            self.expect(";")

    def create(self) -> None:
        if self.accept("table") or self.accept("columnfamily"):
            self.create_table()
        elif self.accept("type"):
            self.create_type()
        elif self.accept("materialized", "view"):
            self.create_view()
        else:
            self.pass_over("CREATE", "TABLE, TYPE, MATERIALIZED VIEW, KEYSPACE, INDEX, FUNCTION, …")

    def pass_over(self, verb: str, expected: str) -> None:
        token = self.next
        if token.kind != "name" or token.value not in _NO_TABLES[verb]:
            self.fail(f"after {verb}: {expected}")
        self.skip_until(";")

    def qualified_name(self, what: str) -> tuple[str, str]:
        """Read ``keyspace.name``, or a name after USE."""
        start = self.next
        name = self.name(what)
        if self.accept("."):
            return name, self.name(what)
        if self.keyspace is None:
            self.error(
                f"{what} without its keyspace: write the keyspace before {start.text} and a dot, "
                "or USE and the keyspace before the statement",
                start,
            )
        return self.keyspace, name

    def create_type(self) -> None:
        self.accept("if", "not", "exists")
        start = self.next
        keyspace, name = self.qualified_name("a type's name")
        self.expect("(")
        fields = self.listed(lambda: self.field(keyspace))
        self.expect(")")
        self.user_types.setdefault(keyspace, {})[name] = (start, fields)

    def create_table(self) -> None:
        self.accept("if", "not", "exists")
        table = TableText(self.next, *self.qualified_name("a table's name"))
        self.expect("(")
        while True:
            if self.accept("primary", "key"):
                self.primary_key(table)
            else:
                self.column(table)
            if self.accept(")"):
                break
            # Some patch versions of Cassandra omit the comma between dropped columns.
            if not self.accept(",") and not self.next.is_name:
                self.fail("a comma or )")
        if self.accept("with"):
            self.options(table)
        self.keep(table)

    def create_view(self) -> None:
        self.accept("if", "not", "exists")
        view = TableText(self.next, *self.qualified_name("a view's name"))
        self.expect("as", "select")
        if not self.accept("*"):
            view.selected = self.names()
        self.expect("from")
        view.base = self.qualified_name("a table's name")
        self.skip_until("primary", ";")
        self.expect("primary", "key")
        self.primary_key(view)
        if self.accept("with"):
            self.options(view)
        self.keep(view)

    def keep(self, table: TableText) -> None:
        if not table.partition_key:
            self.error(f"{table.full_name} has no PRIMARY KEY", table.start)
        for name in () if table.base else (*table.partition_key, *table.clustering):
            if name not in table.columns:
                self.error(f"{table.full_name} has no column {name}, which its PRIMARY KEY names", table.start)
        self.tables[(table.table_id,) if table.table_id else (table.keyspace, table.name)] = table
        self.newest[table.keyspace, table.name] = table

    def names(self) -> list[str]:
        return self.listed(lambda: self.name("a column's name"))

    def primary_key(self, table: TableText) -> None:
        """Read the columns after PRIMARY KEY: ``((a, b), c, d)``."""
        if table.partition_key:
            self.error(f"{table.full_name} has a second PRIMARY KEY", self.next)
        self.expect("(")
        if self.accept("("):
            table.partition_key = self.names()
            self.expect(")")
        else:
            table.partition_key = [self.name("a column's name")]
        if self.accept(","):
            table.clustering = self.names()
        self.expect(")")

    def field(self, keyspace: str) -> ColumnText:
        start = self.next
        return ColumnText(start, self.name("a name"), self.type_text(keyspace))

    def column(self, table: TableText) -> None:
        """Read ``name type [STATIC] [MASKED WITH …] [PRIMARY KEY]``."""
        column = self.field(table.keyspace)
        static = self.accept("static")
        if self.accept("masked", "with") and not self.accept("default"):
            self.function_call()
        if self.accept("primary", "key"):
            if table.partition_key:
                self.error(f"{table.full_name} has a second PRIMARY KEY", column.start)
            table.partition_key = [column.name]
        if column.name in table.columns:
            self.error(f"{table.full_name} has two columns {column.name}", column.start)
        table.columns[column.name] = ColumnText(column.start, column.name, column.type_text, static)

    def function_call(self) -> None:
        self.name("a function's name")
        if self.accept("."):
            self.name("a function's name")
        self.expect("(")
        self.skip_until(")")
        self.expect(")")

    def type_text(self, keyspace: str) -> str:
        """Read a type as text for ``parse_type``: without the keyspace of user-defined types."""
        parts = []
        depth = 0
        while True:
            parts.append(self.type_word(keyspace, inside=depth > 0))
            if self.accept("<"):
                parts.append("<")
                depth += 1
                if depth > DEEPEST_TYPE:
                    self.error(f"types are nested more than {DEEPEST_TYPE} deep", self.next)
                continue
            while depth and self.accept(">"):
                parts.append(">")
                depth -= 1
            if not depth:
                return "".join(parts)
            self.expect(",")
            parts.append(", ")

    def type_word(self, keyspace: str, inside: bool) -> str:
        """Read a type's name, a class in quotes or, inside a type, a vector's dimension."""
        token = self.next
        dimension = inside and token.kind == "number" and len(token.text) < 10
        if not (token.is_name or token.kind == "string" or dimension):
            self.fail("a type")
        self.take()
        if token.is_name and self.accept("."):
            if token.value != keyspace:
                self.error(f"a type of keyspace {token.text} cannot be used in keyspace {printable(keyspace)}", token)
            token = self.next
            self.name("a type's name")
        return f"'{token.value}'" if token.kind == "string" else token.text

    def options(self, table: TableText) -> None:
        """Read the options after WITH."""
        while True:
            if self.accept("compact", "storage"):
                table.compact = True
            elif self.accept("clustering", "order", "by"):
                self.clustering_order(table)
            elif self.accept("id", "="):
                table.table_id = self.table_id()
            else:
                self.name("an option")
                self.expect("=")
                self.skip_until("and", ";")
            if not self.accept("and"):
                return

    def clustering_order(self, table: TableText) -> None:
        self.expect("(")
        self.listed(lambda: self.column_order(table))
        self.expect(")")

    def column_order(self, table: TableText) -> None:
        start = self.next
        name = self.name("a clustering column")
        if name not in table.clustering and not table.compact:
            self.error(f"{name} is no clustering column of {table.full_name}", start)
        table.descending[name] = self.accept("desc")
        if not table.descending[name]:
            self.accept("asc")

    def table_id(self) -> str:
        token = self.next
        digits = token.value.replace("-", "").lower()
        if token.kind not in ("uuid", "string") or len(digits) != 32 or set(digits) - set("0123456789abcdef"):
            self.fail("a table's id such as 5a1c395e-b41f-11e5-9f22-ba0be0483c18")
        self.take()
        return digits

    def alter_table(self) -> None:
        self.accept("if", "exists")
        start = self.next
        keyspace, name = self.qualified_name("a table's name")
        table = self.newest.get((keyspace, name))
        if table is None:
            self.error(f"there is no CREATE TABLE of {printable(keyspace)}.{printable(name)} before this", start)
        if self.accept("drop"):
            self.drop_columns(table)
        elif self.accept("add"):
            self.add_columns(table)
        elif self.accept("with"):
            self.options(table)
        else:
            self.fail("ADD, DROP or WITH (DESCRIBE and snapshots write every other change into CREATE TABLE)")

    def drop_columns(self, table: TableText) -> None:
        self.accept("if", "exists")
        start = self.next
        parenthesised = self.accept("(")
        names = self.names()
        if parenthesised:
            self.expect(")")
        if not self.accept("using", "timestamp"):
            self.fail("USING TIMESTAMP and the µs of the drop, as DESCRIBE … WITH INTERNALS and snapshots write it")
        dropped_at = self.timestamp()
        for name in names:
            if name not in table.columns or name in (*table.partition_key, *table.clustering):
                self.error(f"{table.full_name} has no static or regular column {name}", start)
            table.dropped[name] = (table.columns.pop(name), dropped_at)

    def timestamp(self) -> int:
        digits = self.next.text.removeprefix("-")
        if not digits.isdecimal() or len(digits) > 19 or int(digits) >= 1 << 63:
            self.fail("a timestamp in µs")
        return int(self.take().text)

    def add_columns(self, table: TableText) -> None:
        self.accept("if", "not", "exists")
        parenthesised = self.accept("(")
        self.listed(lambda: self.column(table))
        if parenthesised:
            self.expect(")")
