"""Connections to MySQL and MariaDB.

Rules of this file: the address is resolved when it is used, and never shown; no file is opened because
a server requests it; no server gets a password by asking for it, see `tls`.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.connections import Connection, MySQLResult
from pymysql.constants import CLIENT

from poundlock import secret
from poundlock.errors import Rejected, Unavailable, UsageError
from poundlock.sinks.mysql.errors import MYSQL, NO_DEFAULT, ROW_NUMBER, reason_of
from poundlock.sinks.mysql.tls import OPTIONS, Tls, refused_certificate
from poundlock.sinks.sql.dialect import Dialect

_MODE = (
    "STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
)
# The server may have other defaults. Without the checks MariaDB inserts rows in a faster way, which
# silently loses a whole batch that violates a unique key. max_sort_length is the number of bytes by
# which strings are sorted; see `writer.LONGEST_ORDER`.
_SESSION = (
    f"sql_mode='{_MODE}', time_zone='+00:00', net_read_timeout=600, "
    "unique_checks=1, foreign_key_checks=1, sql_safe_updates=0, sql_auto_is_null=0, "
    "sql_select_limit=18446744073709551615, completion_type=0, max_sort_length=32768"
)
_OF_MARIADB = (
    "check_constraint_checks=1, max_statement_time=0, idle_transaction_timeout=0, "
    "idle_write_transaction_timeout=0, idle_readonly_transaction_timeout=0, max_error_count=1024, "
    "sort_buffer_size=2097152"
)
# MySQL lists 1024 errors by default, and few accounts may change that.
_OF_MYSQL = "max_execution_time=0"
IDLE_S = 60
_CHUNK = 1 << 19  # bytes of a load in one packet: below any sensible max_allowed_packet

_QUOTED = re.compile("`(?:[^`]|``)*`")

# MariaDB's protocol: two commands, the bit that says MySQL, and the bits for bulks.
_PREPARE, _BULK_EXECUTE = 0x16, 0xFA
_MYSQL, _BULKS, _WITH_TYPES = 1, 1 << 2, 128


class Link(Connection):
    """A pymysql connection that answers LOAD DATA LOCAL from memory, and never from a file."""

    dialect: Dialect = MYSQL
    payload: memoryview | None = None
    bulks = False  # server and client have agreed to send rows in bulk
    _greeting: bytes | None = None
    _introduces = False

    def __init__(self, *, tls: Tls, **arguments: Any):
        self._tls = tls
        context = tls.context()
        super().__init__(ssl=context, ssl_disabled=context is None, **arguments)

    @property
    def tls(self) -> Tls:
        return self._tls

    @property
    def encrypted(self) -> bool:
        driver: Any = self
        return isinstance(driver._sock, ssl.SSLSocket)

    @property
    def is_mariadb(self) -> bool:
        return "MariaDB" in self.get_server_info()

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self.cursor() as cursor:
            cursor.execute(*_formatted(statement, values))
            return list(cursor.fetchall())

    run_alone = run

    def change(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement. Return how many rows it affected."""
        with self.cursor() as cursor:
            return cursor.execute(*_formatted(statement, values))

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        self.run("START TRANSACTION")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):
                self.run("ROLLBACK")
            raise

    @contextlib.contextmanager
    def brief_transaction(self) -> Generator[None]:
        self.run("SET @before = @@innodb_lock_wait_timeout")
        self.run("SET SESSION innodb_lock_wait_timeout = 1")
        try:
            with self.transaction():
                yield
        finally:
            if self.open:
                self.run("SET SESSION innodb_lock_wait_timeout = @before")

    def prepare(self, statement: str) -> int:
        """Prepare a statement on the server. Return its number, valid on this connection only."""
        driver: Any = self  # not all of its parts are typed
        driver._execute_command(_PREPARE, statement)
        answer: Any = self._read_packet()
        answer.advance(1)
        number = answer.read_uint32()
        columns, parameters = answer.read_uint16(), answer.read_uint16()
        for count in (parameters, columns):
            for _ in range(count + 1 if count else 0):  # their descriptions, and an end marker
                self._read_packet()
        return number

    def execute_bulk(self, statement: int, types: bytes, values: Iterable[memoryview]) -> int:
        """Execute a prepared statement for many rows; return how many it affected."""
        head = struct.pack("<IH", statement, _WITH_TYPES)
        driver: Any = self
        driver._execute_command(_BULK_EXECUTE, b"".join((head, types, *values)))
        return self._read_query_result()

    # The driver does not know MariaDB's extensions. A server that has them clears the MySQL bit, and
    # lists them in bytes that MySQL leaves empty. The client answers in the same way.

    def _get_server_information(self) -> None:
        with self._watched(self._keep_greeting):
            super()._get_server_information()  # pyright: ignore[reportAttributeAccessIssue]

    def _keep_greeting(self, packet: bytes) -> None:
        self._greeting = packet

    @contextlib.contextmanager
    def _watched(self, see: Callable[[bytes], None]) -> Generator[None]:
        """Show every packet that is read to `see`, before the driver acts on it."""
        driver: Any = self
        read = driver._read_packet

        def read_and_show(*arguments: Any) -> Any:
            packet = read(*arguments)
            see(packet.get_all_data())
            return packet

        driver._read_packet = read_and_show
        try:
            yield
        finally:
            del driver._read_packet

    def _request_authentication(self) -> None:
        driver: Any = self
        offered = bool(driver.server_capabilities & CLIENT.SSL)
        self._tls.check_offer(offered)
        self._tls.check_greeting(driver._auth_plugin_name)
        if not offered:  # PREFERRED: go on without
            driver.ssl, driver._ssl_required = False, False
            driver.client_flag &= ~CLIENT.SSL
        self._introduces = _offers_bulks(self._greeting or b"")
        try:
            with self._watched(self._tls.check_demand):
                super()._request_authentication()  # pyright: ignore[reportAttributeAccessIssue]
            return
        except ssl.SSLCertVerificationError as error:
            problem = refused_certificate(error, self._tls)
        finally:
            self._introduces = False
        raise problem

    def write_packet(self, payload: Any) -> None:
        if self._introduces and payload[9:32] == bytes(23):
            (flags,) = struct.unpack_from("<I", payload)
            told = struct.pack("<I", flags & ~_MYSQL)
            payload = told + payload[4:28] + struct.pack("<I", _BULKS) + payload[32:]
            self.bulks = True
        super().write_packet(payload)

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
        """The number of warnings of the last statement."""
        return self._result.warning_count if self._result is not None else 0


def _formatted(statement: str, values: Sequence[Any]) -> tuple[str, Sequence[Any] | None]:
    """Return a statement for the driver, which formats it only if there are values.

    A quoted name may contain a percent sign, and is no place for a value.
    """
    if not values:
        return statement, None
    return _QUOTED.sub(lambda name: name[0].replace("%", "%%"), statement), values


def _offers_bulks(greeting: bytes) -> bool:
    """Whether a server takes rows in bulk, according to its first packet."""
    after_version = greeting.find(b"\0", 1) + 1
    found = greeting[after_version : after_version + 31]
    if len(found) < 31:
        return False
    (capabilities,) = struct.unpack_from("<H", found, 13)
    (extended,) = struct.unpack_from("<I", found, 27)
    return not capabilities & _MYSQL and bool(extended & _BULKS)


class _Result(MySQLResult):
    def _read_load_local_packet(self, first_packet: Any) -> None:
        """Send the payload, whatever file the server named. Send nothing if there is none."""
        link: Any = self.connection
        payload, link.payload = link.payload, None
        if payload is not None:
            for start in range(0, len(payload), _CHUNK):
                link.write_packet(payload[start : start + _CHUNK])
        link.write_packet(b"")
        answer = link._read_packet()
        if payload is None:
            raise Rejected("the server asked for a file of this machine, and was refused")
        if not answer.is_ok_packet():
            raise Unavailable("the server ended the transfer while rows were being sent to it")
        self._read_ok_packet(answer)  # pyright: ignore[reportAttributeAccessIssue]


def connect_arguments(url: str) -> dict[str, Any]:
    """Read an address: mysql://user:password@host:port/database?ssl_ca=/path."""
    resolved = secret.resolve("url", url)
    if secret.is_cut(resolved):
        raise UsageError(
            "url= cannot be read: percent-encode / as %2F, ? as %3F, # as %23 and @ as %40 in a "
            "password"
        )
    try:
        parts = urlsplit(resolved)
        port = parts.port or 3306
    except ValueError:
        raise UsageError("url= cannot be read as an address: check its port and brackets") from None
    if parts.scheme not in ("mysql", "mariadb") or not parts.hostname:
        raise UsageError(
            "url= must have the form mysql://user:password@host:port/database, or refer to a "
            "URL of that form with env:NAME or file:PATH"
        )
    # An empty option must not be dropped: an empty ssl_ca would verify nothing.
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    known = {*OPTIONS, "connect_timeout"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"url= has unknown options {', '.join(unknown)}; known: {sorted(known)}")
    if len(options) < len(pairs):
        raise UsageError("url= has an option twice: give each option once")
    patience = options.get("connect_timeout", "10")
    if not patience.isdecimal() or not int(patience):
        raise UsageError(
            "connect_timeout= in url= is not a number of seconds: give one, such as 10"
        )
    return {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username or ""),
        # In bytes, because the driver knows only the letters of latin1.
        "password": unquote(parts.password or "").encode(),
        "database": unquote(parts.path.lstrip("/")) or None,
        "tls": Tls.read(options),
        "connect_timeout": int(patience),
    }


def connect(
    url: str, *, sink: str, lock_timeout: float, answer_timeout: float = 300.0, idle: int = 28_800
) -> Link:
    """Open a connection whose session does not round, truncate, or wait forever.

    READ COMMITTED locks less, and no transaction here reads twice. UTC keeps timestamps unchanged.
    `answer_timeout` ends the wait for a server that does not answer. After `idle` seconds without a
    statement the server closes the connection, and releases its locks.
    """
    seconds = max(1, round(lock_timeout))
    with MYSQL.translated_errors(sink):
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
            link.run(
                f"SET SESSION {_SESSION}, {_OF_MARIADB if link.is_mariadb else _OF_MYSQL}, "
                f"innodb_lock_wait_timeout={seconds}, lock_wait_timeout={seconds}, "
                f"wait_timeout={idle}"
            )
            link.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        except BaseException:
            drop(link)
            raise
    return link


def connection_limits(link: Link) -> dict[str, int]:
    """Return the limits on the account's connections, by the name of the setting."""
    [found] = link.run("SELECT @@GLOBAL.max_connections, @@SESSION.max_user_connections")
    names = ("the server's max_connections", "the account's max_user_connections")
    return {name: int(most) for name, most in zip(names, found, strict=True) if int(most)}


def drop(link: Link | None) -> None:
    """Close a connection, whatever state it is in."""
    if link is not None:
        with contextlib.suppress(Exception):
            link.close()


def wrong_rows(link: Link) -> dict[int, str]:
    """Return what the last statement's warnings say is wrong, by the row's number from 0.

    Warnings that name no row are under -1.
    """
    found: dict[int, str] = {}
    for _level, code, message in link.run("SHOW WARNINGS"):
        if code == NO_DEFAULT:  # not caused by a row
            raise pymysql.err.OperationalError(code, message)
        at = ROW_NUMBER.search(message)
        found.setdefault(int(at[1]) - 1 if at else -1, reason_of(int(code), message))
    return found


class Connections:
    """The driver's connections: opened when needed, and dropped when they fail."""

    answer_s = 60.0  # how long an answer may take

    def __init__(self, connect: Callable[[float, int], Link], sink: str):
        self._connect, self._sink = connect, sink
        self._links: list[Link] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, (self._connect, self._sink)

    @contextlib.contextmanager
    def lend(self, answer_timeout: float | None = None) -> Generator[Link]:
        """Lend a connection, and translate the driver's errors."""
        seconds = answer_timeout or self.answer_s
        with self._lock:
            link = self._links.pop() if self._links else None
        if link is not None:
            link.patience(seconds)  # not that of the last user
            try:
                link.ping(reconnect=False)
            except (pymysql.err.Error, OSError):
                drop(link)
                link = None
        # The driver sends one statement after the other: one that was stopped must not hold locks.
        link = link or self._connect(seconds, IDLE_S)
        try:
            with MYSQL.translated_errors(self._sink):
                yield link
        except BaseException:
            drop(link)
            raise
        with self._lock:
            self._links.append(link)

    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            drop(link)
