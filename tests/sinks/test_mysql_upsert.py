"""MySQL and MariaDB: rows that replace others by key."""

from __future__ import annotations

from contextlib import closing

import pytest
from fix_mysql import (
    DONE,
    LOST,
    OPEN,
    OURS,
    PARTITIONED,
    UPSERTS,
    Place,
    get_refusal,
    prepare,
    stage_of,
)

from mysqld import IS_MARIADB
from poundlock.core.model import Receipt
from poundlock.core.participant import Column
from poundlock.errors import BadRow, InDoubt, UsageError
from poundlock.sinks.mysql.move import DELETE, ORDER


class TestUpsert:
    @pytest.fixture
    def keyed(self, place: Place) -> Place:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, word VARCHAR(9) NOT NULL, n INT)")
        place.ask("INSERT INTO t VALUES (1, 'old', 1), (2, 'old', 2), (3, 'old', 3)")
        return place

    @UPSERTS
    def test_an_upsert_replaces_and_inserts(self, keyed: Place, mode: str) -> None:
        sink = keyed.sink(key="id", **PARTITIONED[mode == "xa"])
        receipts = [
            prepare(sink, {"id": [1, 4], "word": ["new", "new"]}, task=0),
            prepare(sink, {"id": [2], "word": ["new"]}, task=1),
        ]
        assert sink.check(receipts) == [None, None]
        assert keyed.rows(what="word") == [("old",)] * 3
        assert sink.commit(receipts) == [DONE, DONE]
        # A column that the frame does not have keeps its value.
        assert keyed.rows() == [(1, "new", 1), (2, "new", 2), (3, "old", 3), (4, "new", None)]

    @UPSERTS
    def test_an_upsert_deletes_by_a_flag(self, keyed: Place, mode: str) -> None:
        sink = keyed.sink(key="id", delete="gone", **PARTITIONED[mode == "xa"])
        sink.known = None
        assert sink.project(
            {
                "id": Column("id", "int"),
                "word": Column("word", "string"),
                "gone": Column("gone", "boolean"),
            }
        ) == {"id": "id", "word": "word", DELETE: "gone"}
        sink.preflight()
        rows = {"id": [1, 2, 9], "word": [None, "new", None], DELETE: [True, None, True]}
        receipt = prepare(sink, rows)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert keyed.rows() == [(2, "new", 2), (3, "old", 3)]
        error = get_refusal(sink, {"id": [1, 5], "word": ["x", None], DELETE: [True, False]})
        assert isinstance(error, BadRow) and set(error.rows) == {1}

    def test_the_row_with_the_highest_order_wins_over_all_tasks(self, keyed: Place) -> None:
        sink = keyed.sink(key="id", order_by="at", delete="gone")
        first = {
            "id": [1, 1, 2],
            "word": ["b", "a", "x"],
            ORDER: [2, 1, 5],
            "at": [2, 1, 5],
            DELETE: [False, False, False],
        }
        second = {
            "id": [1, 2],
            "word": ["c", None],
            ORDER: [3, 6],
            "at": [3, 6],
            DELETE: [False, True],
        }
        receipts = [prepare(sink, first, task=0), prepare(sink, second, task=1)]
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE, DONE]
        assert keyed.rows() == [(1, "c", 1), (3, "old", 3)]

    def test_a_batch_with_a_lost_branch_is_replayed_whole(self, keyed: Place) -> None:
        """The last row of a key can be found only among all rows of the batch."""
        sink = keyed.sink(key="id", order_by="n", delete="gone")
        older = {"id": [1, 2], "word": ["a", "a"], "n": [0, 1], DELETE: [False, False]}
        newer = {"id": [1, 3], "word": [None, "c"], "n": [1, 2], DELETE: [True, False]}
        tasks = [rows | {ORDER: rows["n"]} for rows in (older, newer)]

        def attempt(number: int) -> list[Receipt]:
            return [
                prepare(sink, tasks[task], task, task_attempt=10 * number + task, attempt=number)
                for task in range(2)
            ]

        first = attempt(1)
        assert sink.check(first) == [None, None]
        keyed.ask(f"DROP TABLE {stage_of(first[0])}")
        assert sink.commit(first) == sink.commit(first) == [LOST, LOST]
        assert keyed.rows(what="word") == [("old",)] * 3 and keyed.leftovers() == []
        second = attempt(2)
        with sink.connections.lend() as link:  # the driver proved one aborted, and then died
            assert sink.witness.settle(link, second[1].id) is LOST
        assert keyed.sink(key="id", order_by="n", delete="gone").commit(second) == [LOST, LOST]
        third = attempt(3)
        assert sink.commit(third) == [DONE, DONE]
        # Rows of earlier batches are replaced, even those with a higher order.
        assert keyed.rows() == [(2, "a", 1), (3, "c", 2)]

    def test_a_batch_is_not_aborted_while_another_driver_moves_it(self, keyed: Place) -> None:
        sink = keyed.sink(key="id")
        receipts = [prepare(sink, {"id": [n], "word": ["new"]}, task=n) for n in range(2)]
        keyed.ask(f"DROP TABLE {stage_of(receipts[0])}")
        with closing(sink.connect()) as other:
            other.run("START TRANSACTION")
            sink.witness.insert(other, [receipts[1].id])
            assert sink.commit(receipts) == [OPEN, OPEN]
        assert sink.commit(receipts) == [LOST, LOST]

    def test_a_branch_is_not_moved_after_the_rest_of_its_batch(self, keyed: Place) -> None:
        sink = keyed.sink(key="id", order_by="n")
        rows = {"id": [1], "word": ["new"], "n": [9], ORDER: [9]}
        first, rest = (prepare(sink, rows, task=task) for task in range(2))
        assert sink.commit([first]) == [DONE]
        with pytest.raises(InDoubt, match="moved before it"):
            sink.commit([first, rest])
        assert keyed.rows()[0] == (1, "new", 9)
        assert sink.abort(sink.find(OURS)) == [LOST]
        after = prepare(sink, rows | {"word": ["next"], "n": [0], ORDER: [0]}, batch=1)
        assert sink.commit([after]) == [DONE] and keyed.rows()[0] == (1, "next", 0)

    def test_contradictions_are_refused_before_the_decision(self, keyed: Place) -> None:
        sink = keyed.sink(key="id")
        receipts = [
            prepare(sink, {"id": [1], "word": ["a"]}, task=0),
            prepare(sink, {"id": [1], "word": ["b"]}, task=1),
        ]
        assert all("order_by=" in str(reason) for reason in sink.check(receipts))
        assert sink.abort(sink.find(OURS)) == [LOST, LOST]
        ordered = keyed.sink(key="id", order_by="n")
        rows = {"id": [1, 1], "word": ["a", "b"], "n": [7, 7], ORDER: [7, 7]}
        receipt = prepare(ordered, rows, batch=1)
        assert "neither wins" in str(ordered.check([receipt])[0])
        assert ordered.abort(ordered.find(OURS)) == [LOST]
        # Two equal rows do not contradict each other.
        rows |= {"word": ["a", "a"]}
        receipt = prepare(ordered, rows, batch=2)
        assert ordered.check([receipt]) == [None] and ordered.commit([receipt]) == [DONE]
        assert keyed.rows()[0] == (1, "a", 7)
        if IS_MARIADB:
            partitioned = keyed.sink(key="id", **PARTITIONED[True])
            get_refusal(partitioned, {"id": [1, 1], "word": ["a", "b"]})

    def test_rows_whose_keys_only_the_collation_equates_contradict(self, place: Place) -> None:
        """The task number must not decide which of them wins."""
        place.ask(
            "CREATE TABLE t (id INT PRIMARY KEY, ts INT, v VARCHAR(9), j JSON) "
            "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        )
        sink = place.sink(key="id", order_by="ts")
        for batch, (left, right) in enumerate((("abc", "ABC"), ("abc", "abc "), ("é", "e"))):
            receipts = [
                prepare(
                    sink,
                    {"id": [1], "ts": [5], ORDER: [5], "v": [word], "j": ["{}"]},
                    task=task,
                    batch=batch,
                )
                for task, word in enumerate((left, right))
            ]
            assert all("neither wins" in str(reason) for reason in sink.check(receipts))
            assert sink.abort(sink.find(OURS)) == [LOST, LOST]
        same = {"id": [1], "ts": [5], ORDER: [5], "v": ["é"], "j": ['{"a": 1}']}
        receipts = [prepare(sink, same, task=task, batch=9) for task in range(2)]
        assert sink.check(receipts) == [None, None] and sink.commit(receipts) == [DONE, DONE]

    @pytest.mark.parametrize("partitioned", [False, True])
    def test_keys_that_only_the_collation_equates_are_refused(
        self, place: Place, partitioned: bool
    ) -> None:
        """The table has room for one of them."""
        place.ask(
            "CREATE TABLE t (id VARCHAR(9) PRIMARY KEY, ts INT) "
            "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        )
        sink = place.sink(key="id", order_by="ts", **PARTITIONED[partitioned and IS_MARIADB])
        for batch, keys in enumerate((["a", "A"], ["a", "a "], ["a", "ä"])):
            rows = {"id": keys, "ts": [1, 2], ORDER: [1, 2]}
            if partitioned and IS_MARIADB:
                assert "calls equal" in str(get_refusal(sink, rows))
                continue
            receipt = prepare(sink, rows, batch=batch)
            assert "calls equal, so only one of the rows" in str(sink.check([receipt])[0])
            assert sink.abort(sink.find(OURS)) == [LOST]
        rows = {"id": ["a", "b", "a"], "ts": [1, 2, 3], ORDER: [1, 2, 3]}
        receipt = prepare(sink, rows, batch=9)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [("a", 3), ("b", 2)]

    @pytest.mark.parametrize("own", [True, False])
    def test_long_strings_are_ordered_by_their_full_length(self, place: Place, own: bool) -> None:
        place.ask(f"CREATE TABLE t (id INT PRIMARY KEY, v INT{', o TEXT' if own else ''})")
        sink = place.sink(key="id", order_by="O", look=False)  # in another case than in the frame
        frame = {"id": "int", "v": "int", "o": "string"}
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        sink.preflight()
        long = ["\U0001d11e" * 999 + end for end in "213"]
        rows = {"id": [1, 1, 1], "v": [2, 1, 3], "o": long, ORDER: long}
        receipt = prepare(sink, rows)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows(what="id, v") == [(1, 3)]
        rows |= {ORDER: [f"{long[0]}x", *long[1:]], "o": [f"{long[0]}x", *long[1:]]}
        error = get_refusal(sink, rows)
        assert isinstance(error, BadRow) and set(error.rows) == {0}
        assert "column O is longer than 1000" in str(error)

    def test_bytes_can_be_ordered_and_structs_cannot(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
        sink = place.sink(key="id", order_by="o")
        receipt = prepare(sink, {"id": [1, 1], "v": [2, 1], ORDER: [b"\xff", b"\x7f"]})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, 2)]
        with pytest.raises(UsageError, match=r"'o' for order_by= is struct.* no order"):
            sink.project({"id": Column("id", "int"), "o": Column("o", "struct<a:int>")})

    def test_another_unique_key_is_never_mistaken_for_the_key(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, mail VARCHAR(9) UNIQUE, n INT)")
        place.ask("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)")
        sink = place.sink(key="id")
        receipt = prepare(sink, {"id": [3], "mail": ["b"], "n": [9]})
        assert "unique key" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]
        receipt = prepare(sink, {"id": [1, 3], "mail": ["z", "c"], "n": [8, 9]}, batch=1)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, "z", 8), (2, "b", 2), (3, "c", 9)]

    def test_a_null_in_the_key_is_a_bad_row(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT, b INT, UNIQUE (a))")
        error = get_refusal(place.sink(key="a"), {"a": [1, None], "b": [1, 2]})
        assert isinstance(error, BadRow) and set(error.rows) == {1}
