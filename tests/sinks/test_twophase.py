"""Two-phase drivers of PEP 249: two real ones with a real PostgreSQL."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import pickle
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import like_oracle
import psycopg
import psycopg2
import pyarrow as pa
import pytest

from poundlock.compliance import empty, fill, small_disk
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Stray, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState
from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.servers import demote, postgres
from poundlock.sinks import TwoPhase
from poundlock.sinks.sql.naming import id_of
from poundlock.sinks.sql.witness import Witness
from poundlock.sinks.twophase.link import Link, _parts, number
from poundlock.spark.pipeline.site import SparkSite

DONE, LOST, OPEN = BranchState.COMMITTED, BranchState.ABORTED, BranchState.PREPARED
UNKNOWN = BranchState.NO_WITNESS
OURS = Namespace.new("trial", 1_700_000_000, 7)
HANG_UP = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node() -> Iterator[postgres.Node]:
    with postgres.running() as running:
        yield running


@pytest.fixture(params=[psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def connect(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.fixture
def execute(node: postgres.Node) -> Iterator[Callable[[str], list[Any]]]:
    with psycopg.connect(node.dsn(), autocommit=True) as connection:

        def run(statement: str) -> list[Any]:
            done = connection.execute(statement)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

        yield run
        # A branch that a failed test left open would block the other tests.
        run(HANG_UP)
        for (gid,) in run("SELECT gid FROM pg_prepared_xacts"):
            run(f"ROLLBACK PREPARED '{gid}'")
        run("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def branch(sink: TwoPhase, task: int = 0, **options: Any) -> Branch:
    attempt = options.pop("task_attempt", task)
    transaction = Transaction(OURS, 1, options.pop("batch", 0), 1)
    return Branch(transaction, sink.name, task, attempt, **options)


def make_sink(connect: Callable[..., Any], dsn: str, table: str = "t", **options: Any) -> TwoPhase:
    sink = TwoPhase(connect, table, dsn=dsn, setup=["SET lock_timeout = '500ms'"], **options)
    sink.preflight()
    return sink


def prepare(sink: TwoPhase, rows: pa.RecordBatch, task: int = 0, **options: Any) -> Receipt:
    writer = pickle.loads(pickle.dumps(sink)).begin(branch(sink, task, **options))
    try:
        writer.write(rows)
        done = writer.prepare()
    except BaseException:
        writer.abort()
        raise
    assert done is not None
    return Receipt(sink.name, done.id, task, Fingerprint(len(rows), 0), done.handle)


def rows(*numbers: int | None, word: str | None = "a") -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"k": pa.array(numbers, pa.int32()), "v": pa.array([word] * len(numbers), pa.string())}
    )


def test_every_type_arrives_unchanged(node: postgres.Node, connect: Any, execute: Any) -> None:
    execute("CREATE TABLE t (b bool, n int8, f float8, d numeric, s text, y bytea, day date, "
            "at timestamptz, wall timestamp, doc jsonb)")  # fmt: skip
    values = [True, 2**63 - 1, 0.1, decimal.Decimal("-1.10"), "ä?%s", b"\0\xff", dt.date(1, 1, 1),
              dt.datetime(2024, 2, 29, 1, 2, 3, 4, dt.timezone.utc),
              dt.datetime(9999, 12, 31, 23, 59, 59, 999999), '{"a": 1}']  # fmt: skip
    types = [pa.bool_(), pa.int64(), pa.float64(), pa.decimal128(10, 2), pa.string(), pa.binary(),
             pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.string()]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(
        [pa.array([value, None], kind) for value, kind in zip(values, types, strict=True)],
        ["b", "n", "f", "d", "s", "y", "day", "at", "wall", "doc"],
    )
    sink = make_sink(connect, node.dsn())
    receipt = prepare(sink, batch)
    assert execute("SELECT * FROM t") == []
    assert sink.check([receipt]) == [None]
    assert sink.commit([receipt]) == [DONE]
    assert execute("SELECT * FROM t") == [(*values[:-1], {"a": 1}), (None,) * 10]


def test_bad_rows_leave_no_branch_and_show_no_data(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int NOT NULL UNIQUE, v varchar(9) CHECK (v <> 'hidden'))")
    sink = make_sink(connect, node.dsn())
    for bad in (rows(None), rows(1, 1), rows(1, word="much too long"), rows(1, word="hidden")):
        with pytest.raises(BadRow) as caught:
            prepare(sink, bad)
        text = str(caught.value)
        assert "hidden" not in text and "long" not in text and caught.value.__cause__ is None
    assert execute("SELECT * FROM pg_prepared_xacts") == []
    writer = sink.begin(branch(sink, tolerant=True))
    writer.write(rows(1, 2))
    with pytest.raises(BadRow):
        writer.write(rows(3, 1))
    writer.write(rows(4))
    done = writer.prepare()
    assert done is not None
    assert sink.commit([Receipt("t", done.id, 0, Fingerprint(3, 0))]) == [DONE]
    assert execute("SELECT k FROM t ORDER BY k") == [(1,), (2,), (4,)]


def test_a_value_that_the_driver_cannot_convert_is_a_bad_row(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    writer = sink.begin(branch(sink, tolerant=True))
    writer.write(rows(1))
    good, bad = rows(2).to_pylist(), rows(3, word="hidden\0").to_pylist()
    with pytest.raises(BadRow, match="refuses a row") as caught:
        writer.write(pa.RecordBatch.from_pylist(good + bad, rows().schema))
    assert "hidden" not in str(caught.value) and caught.value.__cause__ is None
    writer.write(rows(4))
    done = writer.prepare()
    assert done is not None
    assert sink.commit([Receipt("t", done.id, 0, Fingerprint(2, 0))]) == [DONE]
    assert execute("SELECT k FROM t ORDER BY k") == [(1,), (4,)]


def test_the_frame_must_fit(node: postgres.Node, connect: Any, execute: Any) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = TwoPhase(connect, "t", dsn=node.dsn(), columns={"a": "k", "b": "v", "c": "w"})
    with pytest.raises(UsageError, match="no column b, c"):
        sink.project({"a": Column("a", "int")})
    wanted = sink.project(
        {"a": Column("a", "int"), "b": Column("b", "array<int>"), "c": Column("c", "int")}
    )
    assert list(wanted) == ["k", "v", "w"] and wanted["v"].startswith("to_json(b")
    assert wanted["v"].count("ss.SSSSSS") == 2  # timestamps inside it keep their microseconds
    with pytest.raises(UsageError, match="has no column w"):
        sink.preflight()
    with pytest.raises(UsageError, match="cannot be read"):
        make_sink(connect, node.dsn(), "nowhere")


def test_a_retry_does_not_wait_for_its_own_task(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
    sink = make_sink(connect, node.dsn())
    first, other = prepare(sink, rows(1)), prepare(sink, rows(2), 1)
    with pytest.raises(Rejected, match=r"55P03"):
        prepare(sink, rows(1), 2)
    again = prepare(sink, rows(1), 0, task_attempt=5, retry=1)
    assert sink.commit([first, other, again]) == [LOST, DONE, DONE]


def test_a_speculative_attempt_rolls_nothing_back(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
    sink = make_sink(connect, node.dsn())
    conf = {"spark.speculation": "True"}
    context = SimpleNamespace(defaultParallelism=2, getConf=lambda: conf)
    sink.attach(SparkSite(cast(Any, SimpleNamespace(sparkContext=context)), ""))
    assert any("spark.speculation" in warning for warning in sink.preflight())
    decided = prepare(sink, rows(1))
    with pytest.raises(Rejected, match=r"55P03"):
        prepare(sink, rows(1), 0, task_attempt=5, retry=1)
    assert sink.commit([decided]) == [DONE]


def test_a_zombie_cannot_prepare_an_aborted_branch(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    zombie = sink.begin(branch(sink))
    zombie.write(rows(1))
    receipt = Receipt("t", str(id_of(branch(sink))), 0, Fingerprint(1, 0))
    assert sink.commit([receipt]) == [LOST]
    with pytest.raises(Rejected, match="aborted by the driver"):
        zombie.prepare()
    assert execute("SELECT * FROM pg_prepared_xacts") == []


def test_another_witness_table_proves_nothing(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    receipt, other = prepare(sink, rows(1)), prepare(sink, rows(2), 1)
    assert sink.commit([receipt]) == [DONE]
    elsewhere = make_sink(connect, node.dsn(), witness_table="elsewhere")
    execute("CREATE TABLE elsewhere (LIKE poundlock_witness INCLUDING ALL)")
    assert elsewhere.commit([receipt, other]) == [UNKNOWN, UNKNOWN]
    assert sink.commit([receipt, other]) == [DONE, DONE]  # the original witness is unchanged
    execute("DROP TABLE poundlock_witness")
    assert sink.commit([receipt]) == [UNKNOWN]
    assert sink.check([receipt]) == ["its witness table has since been dropped or emptied"]
    assert execute("SELECT to_regclass('poundlock_witness')") == [(None,)]
    stray = Stray("t", receipt.id, 1, "prepared")
    assert sink.abort([stray]) == [LOST]  # no decision names it, so a new witness is enough
    assert sink.commit([receipt]) == [UNKNOWN]
    assert execute("SELECT k FROM t") == [(1,), (2,)]


def test_an_emptied_witness_proves_nothing(
    node: postgres.Node, connect: Any, execute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    receipt = prepare(sink, rows(1))
    assert sink.commit([receipt]) == [DONE]
    execute("TRUNCATE poundlock_witness")
    assert sink.commit([receipt]) == [UNKNOWN]
    # The same if it is emptied after the sink looked at it.
    monkeypatch.setattr(Witness, "recognises", lambda *_: True)
    assert sink.commit([receipt]) == [UNKNOWN]
    assert execute("SELECT * FROM poundlock_witness") == []


def test_rows_that_a_trigger_omits_are_noticed(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    execute("CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN IF NEW.k % 2 = 0 THEN RETURN NULL; END IF; RETURN NEW; END'")  # fmt: skip
    execute("CREATE TRIGGER odd BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION odd()")
    sink = make_sink(connect, node.dsn(), rows_at_once=2)
    assert sink.commit([prepare(sink, rows(1, 3, 5, 7, 9))]) == [DONE]
    with pytest.raises(Rejected, match="2 rows were sent, but the database accepted 1"):
        prepare(sink, rows(1, 3, 4, 5), 1)
    assert execute("SELECT count(*) FROM t") == [(5,)]


def test_a_time_limit_of_the_account_is_reported(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = TwoPhase(connect, "t", dsn=node.dsn(), setup=["SET statement_timeout = '500ms'"])
    receipt = prepare(sink, rows(1))
    assert sink.commit([receipt]) == [DONE]
    with lock_table(node, "poundlock_witness"):
        assert sink.commit([receipt]) == [BranchState.UNREACHABLE]
    assert sink.commit([receipt]) == [DONE]
    with (
        lock_table(node, "t"),
        pytest.raises(Rejected, match="statement_timeout, which setup= can"),
    ):
        prepare(sink, rows(2), 1)


def test_the_newest_generation_is_never_pruned(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink, other = make_sink(connect, node.dsn()), make_sink(connect, node.dsn(), name="other")
    sink.prune(OURS, 5)  # there is no witness yet
    receipts = [prepare(sink, rows(task), task) for task in range(3)]
    receipts.append(prepare(sink, rows(9), batch=7))
    assert sink.commit(receipts) == [DONE] * 4
    assert other.commit([prepare(other, rows(1))]) == [DONE]
    count = "SELECT count(*) FROM poundlock_witness WHERE sink = '{}'"
    other.prune(OURS, 5)
    assert execute(count.format("other")) == [(1,)] and execute(count.format("t")) == [(4,)]
    sink.prune(OURS, 5)
    assert execute("SELECT 1 FROM poundlock_witness WHERE batch = 7") == [(1,)]
    assert execute(count.format("t"))[0][0] <= 2
    sink.prune(OURS, 100)
    assert execute(count.format("t")) == [(1,)] and sink.newest_generation(OURS) == 1


@contextmanager
def lock_table(node: postgres.Node, table: str) -> Iterator[None]:
    with psycopg.connect(node.dsn()) as connection:
        connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")  # type: ignore[arg-type]
        yield


def test_a_locked_witness_is_not_reported_as_missing(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    receipt = prepare(sink, rows(1))
    assert sink.commit([receipt]) == [DONE]
    with lock_table(node, "poundlock_witness"):
        assert sink.commit([receipt]) == [BranchState.UNREACHABLE]
        assert sink.abort([Stray("t", receipt.id, 1, "prepared")]) == [BranchState.UNREACHABLE]
        for ask in (
            lambda: sink.check([receipt]),
            lambda: sink.newest_generation(OURS),
            lambda: sink.prune(OURS, 5),
            lambda: prepare(sink, rows(2), 1),
        ):
            with pytest.raises(Unavailable, match=r"poundlock_witness. cannot be read now"):
                ask()
    assert sink.commit([receipt]) == [DONE] and sink.newest_generation(OURS) == 1


def test_a_missing_right_to_the_witness_is_named(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute(
        "CREATE TABLE t (k int, v text); CREATE TABLE poundlock_witness (branch text, identity text)"
    )
    execute(
        "CREATE ROLE other LOGIN; GRANT ALL ON t TO other; GRANT USAGE ON SCHEMA public TO other"
    )
    try:
        sink = TwoPhase(connect, "t", dsn=node.dsn(), setup=["SET ROLE other"])
        sink.preflight()
        with pytest.raises(UsageError, match=r"cannot be read .*42501.*grant SELECT, INSERT"):
            sink.begin(branch(sink))
    finally:
        execute("DROP OWNED BY other; DROP ROLE other")


def test_a_lost_connection_leaves_nothing(node: postgres.Node, connect: Any, execute: Any) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    writer = sink.begin(branch(sink))
    writer.write(rows(1))
    execute(HANG_UP)
    with pytest.raises(Unavailable):
        writer.write(rows(2))
    writer.abort()
    assert execute("SELECT * FROM t") == [] and sink.find(OURS) == []


def test_secrets_are_not_shown(connect: Any) -> None:
    sink = TwoPhase(connect, "t", dsn="postgresql://u:hidden@127.0.0.1:1/x")
    assert "hidden" not in repr(sink)
    for dsn in (
        "postgresql://u:hidden@127.0.0.1:1/x",
        "hidden nonsense",
        "postgresql://u:p@hidden@127.0.0.1:1/x",  # parsed as the host
        "postgresql://localhost:hidden/p@127.0.0.1:1/x",  # parsed as the port
    ):
        with pytest.raises(PoundlockError) as caught:
            TwoPhase(connect, "t", dsn=dsn).preflight()
        assert "hidden" not in str(caught.value) and caught.value.__cause__ is None
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        sink.preflight()


def test_a_driver_without_two_phases_is_refused() -> None:
    with pytest.raises(UsageError, match="has no two-phase commit"):
        TwoPhase(partial(sqlite3.connect, ":memory:"), "t").preflight()


def test_a_server_without_prepared_transactions_is_refused(connect: Any) -> None:
    with postgres.running(max_prepared_transactions=0) as plain:
        with psycopg.connect(plain.dsn()) as connection:
            connection.execute("CREATE TABLE t (k int)")
        with pytest.raises(UsageError, match="switch two-phase commit on"):
            make_sink(connect, plain.dsn())


def test_a_pipeline_can_start_while_open_branches_fill_the_server(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    """One of them is ours, left by a crash. Only a start can end it."""
    execute("CREATE TABLE t (k int, v text)")
    receipt = prepare(make_sink(connect, node.dsn()), rows(1))
    for other in range(postgres.PostgresServer().max_prepared_transactions - 1):
        execute(f"BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'other {other}'")
    again = TwoPhase(connect, "t", dsn=node.dsn())
    assert any("max_prepared_transactions" in warning for warning in again.preflight())
    assert again.commit([receipt]) == [DONE]
    assert not any("max_prepared_transactions" in warning for warning in again.preflight())


def test_no_room_for_the_witness_is_not_reported_as_a_missing_right(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    with small_disk(2) as disk:
        demote.hand_over(disk / "space")
        execute(f"CREATE TABLESPACE small LOCATION '{disk / 'space'}'")
        execute("ALTER DATABASE poundlock SET default_tablespace = small")
        fill(disk)
        try:
            with pytest.raises(Unavailable, match="disk is full"):
                prepare(sink, rows(1))
            empty(disk)
            assert sink.commit([prepare(sink, rows(1))]) == [DONE]
        finally:
            execute("ALTER DATABASE poundlock RESET default_tablespace")
            execute("DROP TABLE IF EXISTS poundlock_witness")
            execute("DROP TABLESPACE small")


def test_weaker_semantics_write_without_a_branch(
    node: postgres.Node, connect: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn(), semantic="at_least_once")
    writer = sink.begin(branch(sink))
    writer.write(rows(1))
    assert writer.prepare() is None
    assert execute("SELECT k FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("style", "expected", "given"),
    [
        ("qmark", "a ? %", (1,)),
        ("format", "a %s %%", (1,)),
        ("numeric", "a :1 %", (1,)),
        ("named", "a :v0 %", {"v0": 1}),
        ("pyformat", "a %(v0)s %%", {"v0": 1}),
    ],
)
def test_every_paramstyle_is_supported(style: str, expected: str, given: Any) -> None:
    link = Link.__new__(Link)
    link._style = style
    assert link._spelled("a ? %") == expected
    assert link._given([1]) == given


def test_recovered_branch_names_of_every_driver_are_read() -> None:
    assert _parts((1, 3, 2, b"abcde")) == (1, "abc", "de")
    # A foreign name, split in the middle of a character.
    assert _parts((1, 2, 2, b"\xffabc")) == (1, "\ufffda", "bc")
    assert _parts((1, "abc", "de")) == (1, "abc", "de")
    # As in the source of python-oracledb: bytes from RAW columns, in a named tuple.
    oracle = namedtuple("Xid", ["format_id", "global_transaction_id", "branch_qualifier"])
    assert _parts(oracle(1, b"abc", b"de")) == (1, "abc", "de")
    assert _parts(psycopg.Xid.from_string("another's")) is None


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(like_oracle, "__name__", "oracledb")
    return like_oracle.connect


def test_a_branch_can_be_written_with_a_driver_like_oracles(
    node: postgres.Node, oracle: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int UNIQUE, v varchar(9))")
    sink = make_sink(oracle, node.dsn())
    assert execute("SELECT * FROM pg_prepared_xacts") == []
    writer = sink.begin(branch(sink, tolerant=True))
    writer.write(rows(1, 2))
    with pytest.raises(BadRow, match=r"IntegrityError .ORA-00001."):
        writer.write(rows(3, 1))
    with pytest.raises(BadRow, match=r"DatabaseError .ORA-12899."):
        writer.write(rows(3, word="much too long"))
    writer.write(rows(4))
    done = writer.prepare()
    assert done is not None
    [stray] = sink.find(OURS)
    assert stray.id == done.id and sink.newest_generation(OURS) == 1
    receipt = Receipt("t", done.id, 0, Fingerprint(3, 0), done.handle)
    assert sink.check([receipt]) == [None]
    assert sink.commit([receipt]) == [DONE]
    assert execute("SELECT k FROM t ORDER BY k") == [(1,), (2,), (4,)]
    with pytest.raises(Rejected, match=r"two tasks write the same key.*ORA-02049"):
        prepare(sink, rows(5), 1), prepare(sink, rows(5), 2)
    again = prepare(sink, rows(5), 1, task_attempt=9, retry=1)
    assert sink.commit([again, again]) == [DONE, DONE]
    sink.prune(OURS, 5)


def test_a_locked_witness_is_recognised_with_a_driver_like_oracles(
    node: postgres.Node, oracle: Any, execute: Any
) -> None:
    """Its error for a held lock has no class of its own, only a number."""
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(oracle, node.dsn())
    receipt = prepare(sink, rows(1))
    assert sink.witness.settle(sink.link(), str(id_of(branch(sink)))) is OPEN
    assert sink.commit([receipt]) == [DONE]


def test_errors_of_a_driver_like_oracles_are_translated(
    node: postgres.Node, oracle: Any, execute: Any
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(oracle, node.dsn())
    with pytest.raises(UsageError, match=r"cannot be read .DatabaseError .ORA-00942."):
        make_sink(oracle, node.dsn(), "nowhere")
    writer = sink.begin(branch(sink))
    execute(HANG_UP)
    with pytest.raises(Unavailable, match=r"connection was lost: DatabaseError \[DPY-4011\]"):
        writer.write(rows(1))
    writer.abort()
    with pytest.raises(Unavailable, match="cannot be reached"):
        make_sink(oracle, "postgresql://u:hidden@127.0.0.1:1/x")


@pytest.mark.parametrize(
    ("code", "expected"),
    [("ORA-01017", NotAuthorised), ("ORA-00020", Unavailable), ("DPY-4011", Unavailable),
     ("DPY-4018", UsageError)],
)  # fmt: skip
def test_a_connection_that_oracle_refuses_is_reported(
    code: str, expected: type[PoundlockError]
) -> None:
    def refuse() -> None:
        raise like_oracle.DatabaseError(like_oracle._Error(code, "no"))

    with pytest.raises(expected, match=code) as caught:
        TwoPhase(refuse, "t").preflight()
    assert type(caught.value) is expected


def test_a_missing_right_to_list_branches_is_named(
    node: postgres.Node, oracle: Any, execute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise like_oracle.DatabaseError(like_oracle._Error("ORA-00942", "no such view"))

    execute("CREATE TABLE t (k int, v text)")
    monkeypatch.setattr(like_oracle.Connection, "tpc_recover", refuse)
    with pytest.raises(UsageError, match=r"ORA-00942.*DBA_PENDING_TRANSACTIONS"):
        make_sink(oracle, node.dsn())


def test_a_branch_that_the_database_does_not_hold_is_rejected(
    node: postgres.Node, oracle: Any, execute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(oracle, node.dsn())
    monkeypatch.setattr(like_oracle.Connection, "tpc_prepare", lambda _: False)
    with pytest.raises(Rejected, match="holds no branch"):
        prepare(sink, rows(1))


def test_savepoints_are_released(node: postgres.Node, connect: Any, execute: Any) -> None:
    """PostgreSQL nests savepoints of one name. Beyond 64 levels every session slows down."""
    execute("CREATE TABLE t (k int, v text)")
    sink = make_sink(connect, node.dsn())
    writer: Any = sink.begin(branch(sink, tolerant=True))
    for key in range(3):
        writer.write(rows(key))
    with pytest.raises(psycopg.Error if connect is psycopg.connect else psycopg2.Error):
        writer._link.run("ROLLBACK TO SAVEPOINT poundlock_rows")
    writer.abort()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (like_oracle.DatabaseError(like_oracle._Error("ORA-00942", "")), "ORA-00942"),
        (like_oracle.DatabaseError(like_oracle._Error("DPY-4011", "")), "DPY-4011"),
        (Exception(SimpleNamespace(code=942, message="ORA-00942: ...")), "ORA-00942"),  # cx_Oracle
        (Exception({"S": "ERROR", "C": "42P01"}), "42P01"),  # pg8000
        (Exception(1146, "no such table"), 1146),
        (Exception("text"), None),
        (Exception(), None),
    ],
)
def test_the_error_number_of_every_driver_is_read(error: Exception, expected: Any) -> None:
    assert number(error) == expected
