"""MySQL and MariaDB: how branches end, in both modes, and what proves it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fix_mysql import (
    BOTH,
    DONE,
    LOST,
    OPEN,
    OURS,
    Place,
    batch_of,
    begin,
    prepare,
    send_by,
    stage_of,
)

from mysqld import IS_MARIADB
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.protocol import BranchState
from poundlock.errors import BadRow, InDoubt, Rejected
from poundlock.servers import mariadb
from poundlock.sinks import MySQL
from poundlock.sinks.mysql.link import Link
from poundlock.sinks.mysql.prepared import PreparedBranches, xid_of
from poundlock.sinks.mysql.staged import StagedBranches
from poundlock.sinks.sql.naming import id_of
from poundlock.sinks.sql.receipts import witness_of
from poundlock.sinks.sql.witness import Witness


class TestEndings:
    @pytest.fixture
    def plain(self, place: Place) -> Place:
        place.ask("CREATE TABLE t (x INT)")
        return place

    def test_a_branch_with_a_live_connection_is_open(self, plain: Place) -> None:
        """MariaDB then refuses it to others with the error of a finished branch."""
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        close, writer._close = writer._close, lambda: None
        made = writer.prepare()
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(1, 0), made.handle)
        if IS_MARIADB:
            assert sink.commit([receipt]) == [OPEN]
            assert sink.abort(sink.find(OURS)) == [OPEN]
            close()
        assert sink.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_a_vanished_task_does_not_keep_its_branch(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lost machine does not close its connections. The server closes them soon."""
        from poundlock.sinks.mysql import writer as module

        monkeypatch.setattr(module, "_DETACH_S", 1)
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        writer._close = lambda: None
        made = writer.prepare()
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(1, 0), made.handle)
        states = [sink.commit([receipt]) for _ in range(3)]
        assert states[-1] == [DONE] and plain.rows() == [(1,)]

    def test_a_crash_leaves_the_witness_locked(
        self, plain: Place, mysql_server: mariadb.MariaDB
    ) -> None:
        """Otherwise a tombstone would prove that a prepared branch was aborted."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        sink.close()
        mysql_server.kill()
        mysql_server.start()
        with sink.connections.lend() as link:
            assert sink.witness.settle(link, receipt.id, witness_of(receipt)[1]) is OPEN
        assert sink.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_a_crash_after_other_tasks_loses_nothing(
        self, plain: Place, mysql_server: mariadb.MariaDB
    ) -> None:
        """With XIDs of several formats, MySQL rolls prepared branches back at its next start."""
        sink = plain.sink(mode="xa")
        for batch, tasks in enumerate((1, 1, 3)):
            done = [prepare(sink, {"x": [batch]}, task, batch=batch) for task in range(tasks)]
            assert sink.commit(done) == [DONE] * tasks
        last = [prepare(sink, {"x": [9]}, task, batch=9) for task in range(4)]
        assert [row[0] for row in plain.ask("XA RECOVER")] == [1] * 4
        sink.close()
        mysql_server.kill()
        mysql_server.start()
        assert sink.check(last) == [None] * 4
        assert sink.commit(last) == [DONE] * 4 and len(plain.rows()) == 9

    def test_an_unprepared_branch_is_open_until_its_connection_ends(self, plain: Place) -> None:
        """A tombstone proves nothing while the witness row is only locked."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        assert sink.abort(sink.find(OURS)) == [LOST]
        writer: Any = begin(sink, 1)
        writer.write(batch_of({"x": [1]}))
        writer._sender.arrive()
        sink.witness.insert(writer._link, [writer._id])
        other = Receipt(sink.name, writer._id, 1, Fingerprint(1, 0), receipt.handle)
        assert sink.commit([other]) == [OPEN]
        writer.abort()
        assert sink.commit([other]) == [LOST]

    def test_an_aborted_task_reports_no_bad_row(self, plain: Place) -> None:
        """The error is not about its rows."""
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        with sink.connections.lend() as link:
            assert sink.witness.settle(link, writer._id) is LOST
        with pytest.raises(Rejected, match="was aborted by the driver") as caught:
            writer.prepare()
        assert not isinstance(caught.value, BadRow)
        writer.abort()

    def test_a_rollback_that_did_not_happen_is_noticed(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server says OK but keeps the branch. A statement without effect imitates this."""
        sink = plain.sink(mode="xa")
        prepare(sink, {"x": [1]})
        strays = sink.find(OURS)

        run = Link.run

        def ask(link: Any, statement: str, values: Sequence[Any] = ()) -> Any:
            return run(link, "DO 0" if "XA ROLLBACK" in statement else statement, values)

        with monkeypatch.context() as patched:
            patched.setattr(Link, "run", ask)
            assert sink.abort(strays) == [OPEN]
        assert sink.abort(strays) == [LOST]

    def test_a_commit_that_did_not_happen_is_noticed(
        self, place: Place, mysql_server: mariadb.MariaDB, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """MariaDB says OK but commits nothing while the branch's connection is being closed."""
        place.ask("CREATE TABLE t (b LONGBLOB)")
        sink = place.sink(mode="xa")
        send_by(sink, "load")
        monkeypatch.setattr(PreparedBranches, "_wait_until_closed", lambda *_: None)
        for batch in range(8):  # the server needs time to free large rows
            receipt = prepare(sink, {"b": [b"x" * (30 << 20)]}, batch=batch)
            try:
                state = sink.commit([receipt])
            except InDoubt:
                mysql_server.kill()
                mysql_server.start()
                state = sink.commit([receipt])
            assert state == [DONE]
            assert place.ask("SELECT COUNT(*) FROM t") == [(batch + 1,)]

    def test_an_ok_without_a_witness_proves_nothing(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        monkeypatch.setattr(Witness, "states", lambda *_: {})
        with pytest.raises(InDoubt, match="restart the server"):
            sink.commit([receipt])

    @BOTH
    def test_a_missing_witness_leaves_the_outcome_unknown(self, plain: Place, mode: str) -> None:
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        plain.ask("DROP TABLE poundlock_witness")
        assert plain.sink(mode=mode).commit([receipt]) == [BranchState.NO_WITNESS]

    @BOTH
    @pytest.mark.parametrize(
        "emptied",
        [
            ["DELETE FROM poundlock_witness"],
            ["TRUNCATE poundlock_witness"],
            [
                "CREATE TABLE w LIKE poundlock_witness",
                "DROP TABLE poundlock_witness",
                "RENAME TABLE w TO poundlock_witness",
            ],
        ],
        ids=["delete", "truncate", "like"],
    )
    def test_an_emptied_witness_proves_nothing(
        self, plain: Place, mode: str, emptied: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A tombstone could enter it for a committed batch."""
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        for statement in emptied:
            plain.ask(statement)
        assert sink.commit([receipt]) == sink.commit([receipt]) == [BranchState.NO_WITNESS]
        assert plain.ask("SELECT * FROM poundlock_witness") == []
        # This writes a new row into it, which proves nothing either.
        after = prepare(sink, {"x": [2]}, task=1)
        caplog.clear()
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]
        assert "was emptied" in caplog.text and receipt.id in caplog.text
        assert sink.check([after]) == [None] and sink.commit([after]) == [DONE]
        assert plain.rows() == [(1,), (2,)]

    @BOTH
    def test_the_check_reports_a_witness_that_was_emptied(self, plain: Place, mode: str) -> None:
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        plain.ask("DELETE FROM poundlock_witness WHERE branch = 'witness'")
        assert sink.check([receipt]) == ["its witness table has since been dropped or emptied"]
        assert sink.abort(sink.find(OURS)) == [LOST]

    @BOTH
    def test_pruning_keeps_the_identity_of_the_witness(self, plain: Place, mode: str) -> None:
        sink = plain.sink(mode=mode)
        for batch in range(3):
            assert sink.commit([prepare(sink, {"x": [batch]}, batch=batch)]) == [DONE]
        before = plain.ask("SELECT identity FROM poundlock_witness WHERE branch = 'witness'")
        sink.prune(OURS, 9)
        assert plain.ask("SELECT COUNT(*) FROM poundlock_witness") == [(2,)]
        receipt = prepare(sink, {"x": [9]}, batch=9)
        assert receipt.handle["witness"] == [plain.database, before[0][0]]
        assert sink.commit([receipt]) == [DONE]

    def test_the_ok_of_a_server_without_the_witness_proves_nothing(self, plain: Place) -> None:
        """Its OK to a commit proves nothing, and there is no other evidence."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        plain.ask(f"CREATE DATABASE {plain.database}_empty")
        _, known = receipt.handle["witness"]  # type: ignore[misc]
        handle = {**receipt.handle, "witness": [f"{plain.database}_empty", known]}
        elsewhere = Receipt(sink.name, receipt.id, 0, receipt.fingerprint, handle)
        assert sink.commit([elsewhere]) == [BranchState.NO_WITNESS]
        assert sink.commit([receipt]) == [DONE]

    @BOTH
    def test_another_witness_proves_nothing(
        self, plain: Place, mode: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A server that never had the branch must not report it as lost."""
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        plain.ask("DROP TABLE poundlock_witness")
        other = prepare(sink, {"x": [2]}, task=1)
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]
        assert "was replaced" in caplog.text and receipt.id in caplog.text
        assert sink.commit([other]) == [DONE] and plain.rows() == [(1,), (2,)]

    def test_a_branch_is_ended_where_it_was_staged(self, plain: Place) -> None:
        """The receipt says where its witness and rows are, although new branches use another place."""
        other = f"{plain.database}_aside"
        plain.ask(f"CREATE DATABASE {other}")
        before = plain.sink(mode="staged", witness_database=other)
        receipts = [prepare(before, {"x": [task]}, task=task) for task in range(2)]
        now = plain.sink(mode="staged")
        assert now.check(receipts) == [None, None]
        mixed = [*receipts, prepare(now, {"x": [2]}, task=2)]
        assert now.commit(mixed) == [DONE] * 3
        assert before.commit(mixed) == [DONE] * 3
        assert plain.rows() == [(0,), (1,), (2,)]
        assert plain.ask(f"SHOW TABLES IN {other}") == [("poundlock_witness",)]
        assert plain.ask(f"SELECT COUNT(*) FROM {other}.poundlock_witness") == [(3,)]

    @pytest.mark.parametrize("mode", ["xa", "staged"])
    def test_a_database_may_have_any_name(self, plain: Place, mode: str) -> None:
        plain.database = f"100%s %(x)s %%_{plain.database}"
        plain.ask(f"CREATE DATABASE `{plain.database}`", database=None)
        plain.ask("CREATE TABLE t (x INT)")
        sink = plain.sink(mode=mode)
        receipts = [prepare(sink, {"x": [task]}, task=task) for task in range(2)]
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE] * 2
        assert sink.commit(receipts) == [DONE] * 2
        lost = prepare(sink, {"x": [2]}, task=2)
        strays = sink.find(OURS)
        assert len(strays) == 1 and sink.abort(strays) == [LOST]
        assert sink.commit([lost]) == [LOST]
        sink.prune(OURS, 10)
        assert plain.rows() == [(0,), (1,)] and plain.leftovers() == []

    def test_a_leftover_staging_table_is_not_open_and_is_pruned(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The driver died after the move and before it dropped the staging tables."""
        sink = plain.sink(mode="staged")
        receipt = prepare(sink, {"x": [1]})
        with monkeypatch.context() as patched:
            patched.setattr(StagedBranches, "_drop_stage", lambda *_: None)
            assert sink.commit([receipt]) == [DONE]
        assert plain.leftovers()
        later = plain.sink(mode="staged")
        assert later.find(OURS) == []
        later.prune(OURS, 0)
        assert plain.leftovers() == []
        assert later.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_two_drivers_move_each_row_once(self, plain: Place) -> None:
        one, two = plain.sink(mode="staged"), plain.sink(mode="staged")
        receipts = [prepare(one, {"x": list(range(500))}, task=task) for task in range(4)]
        ends: list[list[BranchState]] = []

        def commit(sink: MySQL) -> None:
            states = sink.commit(receipts)
            while OPEN in states:
                states = sink.commit(receipts)
            ends.append(states)

        threads = [threading.Thread(target=commit, args=(sink,)) for sink in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends == [[DONE] * 4] * 2
        assert plain.ask("SELECT COUNT(*) FROM t") == [(2000,)]

    def test_a_batch_without_one_of_its_staging_tables_is_lost_whole(self, plain: Place) -> None:
        sink = plain.sink(mode="staged")
        receipts = [prepare(sink, {"x": [task]}, task=task) for task in range(2)]
        plain.ask(f"DROP TABLE {stage_of(receipts[0])}")
        assert sink.check(receipts) == ["its staging table is missing", None]
        assert sink.commit(receipts) == [LOST, LOST]
        assert plain.rows() == []
        again = [prepare(sink, {"x": [task]}, task=task, attempt=2) for task in range(2)]
        assert sink.commit(again) == [DONE, DONE]
        assert plain.rows() == [(0,), (1,)]

    @pytest.mark.parametrize("key", [None, "x"])
    def test_a_branch_with_a_changed_staging_table_is_lost(
        self, place: Place, key: str | None
    ) -> None:
        place.ask("CREATE TABLE t (x INT PRIMARY KEY)")
        sink = place.sink(mode="staged", key=key)
        receipt = prepare(sink, {"x": [1, 2, 3]})
        assert sink.check([receipt]) == [None]
        place.ask(f"DELETE FROM {stage_of(receipt)} WHERE x = 2")
        assert sink.commit([receipt]) == sink.commit([receipt]) == [LOST]
        assert place.rows() == [] and place.leftovers() == []
        again = prepare(sink, {"x": [1, 2, 3]}, attempt=2)
        assert sink.commit([again]) == [DONE] and place.rows() == [(1,), (2,), (3,)]

    def test_branches_of_both_modes_are_committed_in_either_mode(self, plain: Place) -> None:
        xa, staged = plain.sink(mode="xa"), plain.sink(mode="staged")
        receipts = [prepare(xa, {"x": [1]}, task=0), prepare(staged, {"x": [2]}, task=1)]
        assert len(xa.find(OURS)) == len(staged.find(OURS)) == 2
        assert xa.check(receipts) == [None, None]
        assert staged.commit(receipts) == [DONE, DONE]
        assert plain.rows() == [(1,), (2,)]

    def test_pruning_keeps_the_newest_generation(self, plain: Place) -> None:
        sink = plain.sink()
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        sink.prune(OURS, 100)
        assert sink.newest_generation(OURS) == 1

    def test_the_longest_xid_fits(self) -> None:
        branch = Branch(Transaction(OURS, 9999, 10**8, 99), "s" * 63, 10**5, 10**8)
        name = xid_of(id_of(branch))
        assert len(name.gtrid) <= 64 and len(name.bqual) <= 64
