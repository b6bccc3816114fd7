"""One connection to MySQL or MariaDB: its address, its session, its errors in our words.

Rules of this file: the address is resolved at use and never shown; no file is ever opened because a
server asks for it; what the server says about rows is turned into our own words, for its own quote the
data.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.connections import Connection, MySQLResult
from pymysql.constants import CLIENT

from poundlock import secret
from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)

NO_SUCH_TABLE, DUPLICATE, LOCK_TIMEOUT, DEADLOCK = 1146, 1062, 1205, 1213
XA_UNKNOWN, XA_ROLLED_BACK, XA_DUPLICATE = 1397, 1402, 1440
NO_RIGHT = 1227
_NO_DEFAULT = 1364

_REFUSED = {1044, 1045, 1095, 1142, 1143, NO_RIGHT, 1370, 1401, 1410, 1698}
_AWAY = {1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1317, 1927, 1969}
_AWAY |= {3024, 3169}
_AWAY |= {2000, 2002, 2003, 2006, 2013, 2014, 2027, 2055}
_STRANGER = {1045, 1698}  # of those refused: user or password
_CROWDED = {1040, 1203, 1226}  # as many connections as the server allows, or allows the account
GONE = {1049, NO_SUCH_TABLE}  # the table, or its database
_UNKNOWN_NAME = {1046, *GONE}
_CONTENDED = {LOCK_TIMEOUT, DEADLOCK, 1020}

# What the server finds wrong with a row, in words that do not quote the row.
_WRONG = {
    1048: "is null, but the column is NOT NULL",
    1062: "has a value that is already there, under a unique key",
    1153: "is larger than the server's max_allowed_packet",
    1216: "refers to a row that is not there (foreign key)",
    1263: "is null, but the column is NOT NULL",
    1264: "is out of the column's range",
    1265: "does not fit the column's type",
    1292: "is not a value of the column's type",
    1301: "is larger than the server's max_allowed_packet",
    1366: "has characters that the column cannot hold",
    1406: "is too long",
    1451: "is still referred to by rows of another table (foreign key)",
    1452: "refers to a row that is not there (foreign key)",
    1526: "belongs to no partition of the table",
    1644: "was refused by a trigger",
    1690: "is out of the column's range",
    3140: "is not valid JSON",
    3819: "violates a CHECK constraint",
    4025: "violates a CHECK constraint",
    4161: "is not a value of the column's type",
}
# At the end of a message only: what stands before it may be data.
_COLUMN = re.compile(r"column (?:`[^`]*`\.)*[`']?(?:\w+\.)*([^`'\s]+)[`']?(?: at row \d+)?\.?\s*$")
_ROW = re.compile(r"at row (\d+)\s*$")
# Several numbers have the system's own beside them, for any of its calls may fail by a full disk.
_DISK_FULL = {1021, 1114, 3675}
_NO_SPACE = re.compile(r"(?:errno|errcode|error):? 28\b", re.IGNORECASE)

_MODE = (
    "STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
)
# What a server's own settings may be otherwise. Without the checks MariaDB takes rows by a shorter way,
# on which a batch that breaks a unique key is lost whole, and no word said. Longer sort keys: strings
# are put in order by so many bytes; see `writer.LONGEST_ORDER`.
_SESSION = (
    f"sql_mode='{_MODE}', time_zone='+00:00', net_read_timeout=600, wait_timeout=28800, "
    "unique_checks=1, foreign_key_checks=1, sql_safe_updates=0, sql_auto_is_null=0, "
    "sql_select_limit=18446744073709551615, completion_type=0, max_sort_length=32768"
)
_OF_MARIADB = (
    "check_constraint_checks=1, max_statement_time=0, idle_transaction_timeout=0, "
    "idle_write_transaction_timeout=0, idle_readonly_transaction_timeout=0, max_error_count=1024, "
    "sort_buffer_size=2097152"
)
_OF_MYSQL = (
    "max_execution_time=0"  # it tells of 1024 errors by itself, and lets few accounts say so
)
_CHUNK = 1 << 19  # of a load; less than any server's max_allowed_packet should be

# MariaDB's protocol: two commands, the bit of those that are MySQL, and those for bulks.
_PREPARE, _BULK_EXECUTE = 0x16, 0xFA
_MYSQL, _BULKS, _WITH_TYPES = 1, 1 << 2, 128


class Link(Connection):
    """A pymysql connection that answers LOAD DATA LOCAL from memory, and never from a file."""

    payload: memoryview | None = None
    bulks = False  # the server takes rows in bulk, and was told that we send them so
    _greeting: bytes | None = None
    _introduces = False

    @property
    def is_mariadb(self) -> bool:
        return "MariaDB" in self.get_server_info()

    def prepare(self, statement: str) -> int:
        """Have a statement prepared by the server; return its number, good for this connection."""
        driver: Any = self  # not all of its parts are typed
        driver._execute_command(_PREPARE, statement)
        answer: Any = self._read_packet()
        answer.advance(1)
        number, columns, parameters = (
            answer.read_uint32(),
            answer.read_uint16(),
            answer.read_uint16(),
        )
        for count in (parameters, columns):
            for _ in range(count + 1 if count else 0):  # what they are, and the end of that
                self._read_packet()
        return number

    def execute_bulk(self, statement: int, types: bytes, values: Iterable[memoryview]) -> int:
        """Execute a prepared statement for many rows; return how many it affected."""
        head = struct.pack("<IH", statement, _WITH_TYPES)
        driver: Any = self
        driver._execute_command(_BULK_EXECUTE, b"".join((head, types, *values)))
        return self._read_query_result()

    # MariaDB's extensions, of which the driver knows nothing: a server that has them clears the bit of
    # MySQL and says which in bytes that MySQL has no use for. A client answers alike.

    def _get_server_information(self) -> None:
        driver: Any = self
        read = driver._read_packet

        def keep(*arguments: Any) -> Any:
            packet = read(*arguments)
            self._greeting = packet.get_all_data()
            return packet

        driver._read_packet = keep
        try:
            super()._get_server_information()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            del driver._read_packet

    def _request_authentication(self) -> None:
        self._introduces = _offers_bulks(self._greeting or b"")
        try:
            super()._request_authentication()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            self._introduces = False

    def write_packet(self, payload: Any) -> None:
        if self._introduces and payload[9:32] == bytes(23):
            (flags,) = struct.unpack_from("<I", payload)
            told = struct.pack("<I", flags & ~_MYSQL)
            payload = told + payload[4:28] + struct.pack("<I", _BULKS) + payload[32:]
            self.bulks = True
        super().write_packet(payload)

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        """Where nothing is asked for, the driver encrypts if the server can, and verifies nothing.

        It would read the machine's certificates for that all the same, for every connection.
        """
        if sslp:
            return super()._create_ssl_ctx(sslp)  # pyright: ignore[reportAttributeAccessIssue]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def _read_query_result(self, unbuffered: bool = False) -> int:
        self._result = None
        result = _Result(self)
        result.read()
        self._result = result
        if result.server_status is not None:
            self.server_status = result.server_status
        return result.affected_rows  # pyright: ignore[reportReturnType]

    def patience(self, seconds: float) -> None:
        """Set how long an answer may take."""
        self._read_timeout: Any = seconds

    @property
    def warnings(self) -> int:
        """How many the last statement raised."""
        return self._result.warning_count if self._result is not None else 0


def _offers_bulks(greeting: bytes) -> bool:
    """Read off a server's first packet whether it takes rows in bulk."""
    after_version = greeting.find(b"\0", 1) + 1
    found = greeting[after_version : after_version + 31]
    if len(found) < 31:
        return False
    (capabilities,) = struct.unpack_from("<H", found, 13)
    (extended,) = struct.unpack_from("<I", found, 27)
    return not capabilities & _MYSQL and bool(extended & _BULKS)


class _Result(MySQLResult):
    def _read_load_local_packet(self, first_packet: Any) -> None:
        """Send what we hold, whatever file the server named; nothing, where we hold nothing."""
        link: Any = self.connection
        payload, link.payload = link.payload, None
        if payload is not None:
            for start in range(0, len(payload), _CHUNK):
                link.write_packet(payload[start : start + _CHUNK])
        link.write_packet(b"")
        answer = link._read_packet()
        if payload is None:
            raise Rejected("the server asked for a file of this machine, and got none")
        if not answer.is_ok_packet():
            raise Unavailable("the server broke off while it was sent rows")
        self._read_ok_packet(answer)  # pyright: ignore[reportAttributeAccessIssue]


def connect_arguments(url: str) -> dict[str, Any]:
    """Read an address: mysql://user:password@host:port/database?ssl_ca=/path."""
    resolved = secret.resolve("url", url)
    try:
        parts = urlsplit(resolved)
        port = parts.port or 3306
    except ValueError:
        raise UsageError(
            "url= cannot be read as an address: see to its port and brackets"
        ) from None
    if parts.scheme not in ("mysql", "mariadb") or not parts.hostname:
        raise UsageError(
            "url= must have the form mysql://user:password@host:port/database, or name where that is "
            "to be found: env:NAME or file:PATH"
        )
    options = dict(parse_qsl(parts.query))
    known = {"ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_identity", "connect_timeout"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"url= has unknown options {', '.join(unknown)}; known: {sorted(known)}")
    arguments: dict[str, Any] = {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")) or None,
    }
    arguments |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    if "ssl_verify_identity" in options:
        arguments["ssl_verify_identity"] = options["ssl_verify_identity"].lower() != "false"
    arguments["connect_timeout"] = int(options.get("connect_timeout", "10"))
    return arguments


def connect(url: str, *, sink: str, lock_timeout: float, answer_timeout: float = 300.0) -> Link:
    """Open a connection with a session that neither rounds nor cuts off nor waits for ever.

    Whatever the server has set for others. READ COMMITTED: less is locked, and nothing here reads
    twice. UTC: timestamps are stored as they are. `answer_timeout` ends the wait for a server that
    keeps its connections and says nothing.
    """
    seconds = max(1, round(lock_timeout))
    with said(sink):
        link = Link(
            **connect_arguments(url),
            charset="utf8mb4",
            autocommit=True,
            local_infile=True,
            client_flag=CLIENT.FOUND_ROWS,
            read_timeout=answer_timeout,
            write_timeout=answer_timeout,
        )
        try:
            run(
                link,
                f"SET SESSION {_SESSION}, {_OF_MARIADB if link.is_mariadb else _OF_MYSQL}, "
                f"innodb_lock_wait_timeout={seconds}, lock_wait_timeout={seconds}",
            )
            run(link, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        except BaseException:
            drop(link)
            raise
    return link


def run(link: Link, statement: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Execute a statement; return its rows."""
    with link.cursor() as cursor:
        cursor.execute(statement, arguments or None)
        return list(cursor.fetchall())


def changed(link: Link, statement: str, arguments: Sequence[Any] = ()) -> int:
    """Execute a statement; return how many rows it affected."""
    with link.cursor() as cursor:
        return cursor.execute(statement, arguments or None)


def connection_limits(link: Link) -> dict[str, int]:
    """Return how many connections the account may have at most, by what says so."""
    [found] = run(link, "SELECT @@GLOBAL.max_connections, @@SESSION.max_user_connections")
    names = ("the server's max_connections", "the account's max_user_connections")
    return {name: int(most) for name, most in zip(names, found, strict=True) if int(most)}


def drop(link: Link | None) -> None:
    """Close a connection, whatever state it is in."""
    if link is not None:
        with contextlib.suppress(Exception):
            link.close()


def code_of(error: BaseException) -> int:
    """The server's number of an error, 0 if it has none."""
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


@contextlib.contextmanager
def said(sink: str) -> Iterator[None]:
    """Raise what the driver raises as an error of ours, named by what is to be done."""
    try:
        yield
    except PoundlockError:
        raise
    except (pymysql.err.Error, OSError, EOFError, RuntimeError) as error:
        told(error, sink)


def told(error: BaseException, sink: str) -> NoReturn:
    code = code_of(error)
    if code in _STRANGER:
        raise NotAuthorised(
            f"the server refuses the connection ({_text(error)}). Check user and password in url=",
            sink=sink,
        ) from error
    if code in _REFUSED:
        raise NotAuthorised(f"the server refuses ({_text(error)}). Grant it, or use another account",
                            sink=sink) from error  # fmt: skip
    if code in _UNKNOWN_NAME:
        raise UsageError(f"the server says: {_text(error)}", sink=sink) from error
    if code in _CONTENDED:
        raise Rejected(
            f"rows or tables are locked by another transaction (error {code}). Another writer of the "
            "same keys, or a branch of an earlier attempt, holds them; the batch is tried again. Where "
            "two tasks write one key, that does not help: use mode='staged', or partition the frame by "
            "the key",
            sink=sink,
        ) from None
    if code == _NO_DEFAULT:
        raise _lacking(str(error.args[-1]), sink) from None
    if reason := fault(error):
        raise BadRow(reason, sink=sink) from None
    if code in _DISK_FULL or _NO_SPACE.search(str(error.args[-1] if error.args else "")):
        raise Unavailable(
            f"the server's disk is full, or the table's space is at its limit (error {code}). Nothing "
            "is lost: make room there, and the batch can be run again",
            sink=sink,
        ) from None
    if code in _CROWDED:
        raise Unavailable(
            f"the server has no connection left, or the account is at a limit ({_text(error)}). Raise "
            "max_connections, or that limit, or let fewer tasks run at once",
            sink=sink,
        ) from error
    if code in _AWAY or not code:
        raise Unavailable(f"the server cannot be reached ({_text(error)})", sink=sink) from error
    raise Rejected(
        f"the server says: error {code}, {_shape(str(error.args[-1]))}", sink=sink
    ) from None


def ends_all(error: BaseException) -> bool:
    """Whether an error is the end of the connection, or of the transaction."""
    code = code_of(error)
    return not code or code in _AWAY or code in _CONTENDED


def fault(error: BaseException) -> str | None:
    """Say what an error finds wrong with a row; None if it is about something else."""
    code = code_of(error)
    return _reason(code, str(error.args[-1])) if code in _WRONG else None


def wrong_rows(link: Link) -> dict[int, str]:
    """Read the warnings of the last statement: row of the statement, from 0, to what is wrong.

    Those that name no row are under -1.
    """
    found: dict[int, str] = {}
    for _level, code, message in run(link, "SHOW WARNINGS"):
        if code == _NO_DEFAULT:  # no row's fault
            raise pymysql.err.OperationalError(code, message)
        at = _ROW.search(message)
        found.setdefault(int(at[1]) - 1 if at else -1, _reason(int(code), message))
    return found


def _reason(code: int, message: str) -> str:
    column = _COLUMN.search(message)
    words = _WRONG.get(code, f"was refused (error {code})")
    return f"column {column[1]} {words}" if column else f"a row {words}"


def _lacking(message: str, sink: str) -> Rejected:
    """Return the error for a column that no row has."""
    column = re.search(r"'([^']*)'", message)
    return Rejected(
        f"column {column[1] if column else '?'} of the table is NOT NULL without a default, and the "
        "frame has no such column. Was it added since the pipeline started? Give it a default, or add "
        "it to the frame",
        sink=sink,
    )


def _text(error: BaseException) -> str:
    """Errors of connections and rights quote no rows."""
    return f"error {code_of(error)}: {error.args[-1]}" if error.args else type(error).__name__


def _shape(message: str) -> str:
    """Leave the quoted parts out: they may be data."""
    return re.sub(r"'[^']*'", "'...'", message)
