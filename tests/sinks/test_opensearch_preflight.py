"""OpenSearch: what is checked before anything starts."""

from __future__ import annotations

import base64
import re
from typing import Any

import opensearchpy
import pyarrow as pa
import pytest
from fix_opensearch import DONE, NUMBERS, branch, make_rows, read_documents, store_rows
from pyspark.sql import SparkSession

from poundlock.core.participant import Column
from poundlock.core.sparksql import row_json
from poundlock.errors import BadRow, NotAuthorised, PermanentlyRefused, Unavailable, UsageError
from poundlock.servers import opensearch
from poundlock.sinks import OpenSearch
from poundlock.sinks.opensearch.types import compare
from poundlock.sinks.opensearch.writer import bad_rows


class TestPreflight:
    COLUMNS = {"id": Column("id", "string"), "v": Column("v", "bigint")}  # noqa: RUF012

    def test_the_frame_gives_the_columns_that_the_writer_needs(self) -> None:
        plain = OpenSearch("i", url="http://localhost", id="id")
        assert list(plain.project(self.COLUMNS)) == ["id", "hash", "document"]
        versioned = OpenSearch("i", url="http://localhost", id="id", version="v")
        wanted = versioned.project(self.COLUMNS)
        assert list(wanted) == ["id", "version", "document"]
        assert "'v', v" in wanted["document"]

    def test_times_of_both_kinds_keep_their_microseconds(self) -> None:
        columns = {"id": Column("id", "string"), "at": Column("at", "timestamp_ntz")}
        wanted = OpenSearch("i", url="http://localhost", id="id").project(columns)
        assert row_json(columns) == wanted["document"]
        assert wanted["document"].count("SSSSSS") == 4  # with a zone and without, in both branches

    def test_columns_missing_from_a_strict_mapping_are_named(self, make_search: Any) -> None:
        sink = make_search({"dynamic": "strict", "properties": {"id": {"type": "keyword"}}})
        sink.project(self.COLUMNS)
        with pytest.raises(UsageError, match="column 'v' is not in the mapping, which is strict"):
            sink.preflight()

    def test_a_missing_index_is_warned_of(self, search_server: opensearch.Node) -> None:
        sink = OpenSearch("missing", url=search_server.url, id="id")
        (warning,) = sink.preflight()
        assert "does not exist" in warning

    def test_an_index_that_soon_forgets_deletes_is_warned_of(
        self, make_search: Any, search_client: Any
    ) -> None:
        assert make_search().preflight() == []  # nothing is deleted
        sink = make_search(delete="gone")
        (warning,) = sink.preflight()
        assert "60s" in warning and f"PUT {sink.index}/_settings" in warning
        for life, enough in (("90m", False), ("-1", False), ("24h", True), ("2d", True)):
            body = {"index.gc_deletes": life}
            search_client.indices.put_settings(index=sink.index, body=body)
            assert (sink.preflight() == []) == enough, life

    def test_types_are_compared_with_the_mapping(self) -> None:
        fields = {
            name: {"type": name}
            for name in ("long", "integer", "date", "boolean", "keyword", "object", "ip")
        }
        kinds = {
            "long": "boolean",
            "integer": "bigint",
            "date": "string",
            "boolean": "int",
            "keyword": "array<int>",
            "object": "string",
            "ip": "string",
            "new": "int",
        }
        wrong, doubtful = compare({"properties": fields}, kinds)
        assert [text.split("'")[1] for text in wrong] == ["long", "boolean", "object"]
        assert [text.split("'")[1] for text in doubtful] == ["integer", "date", "ip"]

    @pytest.mark.parametrize(
        ("kind", "field", "value"),
        [
            ("double", {"type": "float"}, 1e300),
            ("double", {"type": "half_float"}, 7e4),
            ("bigint", {"type": "half_float"}, 70_000),
            ("bigint", {"type": "unsigned_long"}, -1),
            ("double", {"type": "long"}, 1e30),
            ("decimal(38,0)", {"type": "long"}, 10**25),
            ("decimal(5,1)", {"type": "long", "coerce": False}, 1.5),
            ("timestamp", {"type": "date_nanos"}, "1960-01-01T00:00:00.000000Z"),
            (
                "timestamp",
                {"type": "date", "format": "epoch_millis"},
                "2024-01-01T00:00:00.000000Z",
            ),
            ("string", {"type": "keyword"}, "x" * 32_767),
            ("array<string>", {"type": "keyword"}, ["x" * 32_767]),
        ],
    )
    def test_a_type_with_values_that_the_field_refuses_is_warned_of(
        self, make_search: Any, search_client: Any, kind: str, field: Any, value: Any
    ) -> None:
        sink = make_search({"properties": {"v": field}})
        sink.project(self.COLUMNS | {"v": Column("v", kind)})
        (warning,) = sink.preflight()
        assert "column 'v'" in warning and "stops the pipeline" in warning
        with pytest.raises(opensearchpy.exceptions.RequestError):
            search_client.index(index=sink.index, body={"v": value})

    @pytest.mark.parametrize(
        ("kind", "field"),
        [
            ("smallint", {"type": "half_float"}),
            ("decimal(38,0)", {"type": "float"}),
            ("decimal(18,0)", {"type": "long"}),
            ("decimal(20,2)", {"type": "long"}),
            ("double", {"type": "double"}),
            ("timestamp", {"type": "date", "format": "epoch_millis||strict_date_optional_time"}),
            ("string", {"type": "keyword", "ignore_above": 256}),
            ("double", {"type": "long", "ignore_malformed": True}),
        ],
    )
    def test_a_type_that_fits_causes_no_warning(self, kind: str, field: Any) -> None:
        assert compare({"properties": {"v": field}}, {"v": kind}) == ([], [])

    def test_an_id_is_never_too_long_for_its_field(self) -> None:
        mapping = {"properties": {"id": {"type": "keyword"}}}
        assert compare(mapping, {"id": "string"}, id="id") == ([], [])

    @pytest.mark.parametrize(
        "name", ["_id", "_source", "_routing", "_version", "_index", "_id.x", "", ".", ".a", "a..b"]
    )
    def test_impossible_column_names_are_refused(
        self, make_search: Any, search_client: Any, name: str
    ) -> None:
        sink = make_search()
        with pytest.raises(UsageError, match=re.escape(f"column {name!r} has")):
            sink.project(self.COLUMNS | {name: Column("x", "string")})
        with pytest.raises(opensearchpy.exceptions.RequestError):
            search_client.index(index=sink.index, body={name: "x"})

    def test_unusual_column_names_are_accepted(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(delete="_id")
        odd = {name: Column("x", "string") for name in ("_type", "a.b", "c.", " ", "x._id")}
        sink.project(self.COLUMNS | odd | {"_id": Column("y", "boolean")})
        search_client.index(index=sink.index, body=dict.fromkeys(odd, "x"))

    def test_an_index_that_requires_routing_is_refused(self, make_search: Any) -> None:
        with pytest.raises(UsageError, match="requires a routing value"):
            make_search({"_routing": {"required": True}}).preflight()

    @pytest.mark.parametrize("index", ["Upper", "index-*", "i1,i2", "_all", "-x", "a b", "x" * 256])
    def test_impossible_index_names_are_refused(
        self, search_server: opensearch.Node, index: str
    ) -> None:
        for semantic in ("exactly_once", "at_least_once"):
            sink = OpenSearch(index, url=search_server.url, id="id", name="out", semantic=semantic)
            with pytest.raises(UsageError, match=r"cannot be|no index can have that name"):
                sink.preflight()

    def test_settings_that_lose_documents_are_warned_of(
        self, make_search: Any, search_client: Any
    ) -> None:
        search_client.ingest.put_pipeline(id="nothing", body={"processors": []})
        settings = {"translog.durability": "async", "final_pipeline": "nothing"}
        warnings = make_search(index_settings=settings).preflight()
        assert ["translog.durability async" in it for it in warnings] == [True, False]
        assert "index.final_pipeline nothing" in warnings[1]
        quiet = {"translog.durability": "request", "default_pipeline": "_none"}
        assert make_search(index_settings=quiet).preflight() == []

    def test_an_unreachable_server_is_reported(self) -> None:
        sink = OpenSearch("i", url="http://user:hidden@127.0.0.1:1", id="id")
        with pytest.raises(Unavailable) as raised:
            sink.preflight()
        assert "hidden" not in str(raised.value) + repr(sink) + repr(sink.client)

    def test_a_refused_password_is_reported_but_not_shown(self) -> None:
        error = opensearchpy.exceptions.AuthenticationException(401, "Unauthorized", {})
        from poundlock.sinks.opensearch.client import translate_error

        assert isinstance(translate_error(error, "looking", "out"), NotAuthorised)

    def test_a_password_with_percent_encoded_characters_is_decoded(self) -> None:
        sink = OpenSearch("i", url="http://us%40er:p%2Fw%25@127.0.0.1:1", id="id")
        (connection,) = sink.client.transport.connection_pool.connections
        expected = base64.b64encode(b"us@er:p/w%").decode()
        assert connection.headers["authorization"] == f"Basic {expected}"

    def test_an_unreadable_address_is_refused(self) -> None:
        with pytest.raises(UsageError, match="https://user:password@host"):
            OpenSearch("i", url="secret nonsense", id="id").preflight()


class TestFields:
    """What the server refuses only when it sees the document, which is after the decision."""

    @pytest.mark.parametrize(
        "columns",
        [
            {"a": "int", "a.b": "int"},
            {"a.b.c": "string", "a.b": "date"},
            {"a": "array<int>", "a.b.c": "int"},
            {"s": "struct<x:int>", "s.x.y": "int"},
            {"s": "struct<x:array<struct<`y z`:int>>>", "s.x": "boolean"},
        ],
    )
    @pytest.mark.parametrize("there", [True, False])
    def test_a_value_cannot_be_an_object_too(
        self, make_search: Any, search_client: Any, columns: Any, there: bool
    ) -> None:
        sink = make_search() if there else make_search(into=f"missing-{next(NUMBERS)}")
        sink.project({"id": Column("id", "string")} | self.columns(columns))
        with pytest.raises(UsageError, match="would be a value and an object"):
            sink.preflight()
        values = {"struct": {"x": 1}, "int": 1, "string": "x", "date": "2026-01-01", "array": [1]}
        body = {
            name: {"x": [{"y z": 1}]} if "y z" in kind else values.get(kind.partition("<")[0], True)
            for name, kind in columns.items()
        }
        with pytest.raises(opensearchpy.exceptions.RequestError):
            search_client.index(index=sink.index, body=body)

    @pytest.mark.parametrize(
        ("mapping", "columns"),
        [
            ({}, {"a.b": "int", "a.c": "int", "ab": "int"}),
            ({}, {"a": "struct<b:int>", "a.c": "int"}),
            ({"dynamic": False}, {"a": "int", "a.b": "int"}),
            (
                {"properties": {"a": {"type": "object", "enabled": False}}},
                {"a": "int", "a.b": "int"},
            ),
        ],
    )
    def test_columns_that_share_an_object_are_accepted(
        self, make_search: Any, search_client: Any, mapping: Any, columns: Any
    ) -> None:
        sink = make_search(mapping)
        sink.project({"id": Column("id", "string")} | self.columns(columns))
        assert sink.preflight() == []
        body = {name: {"b": 1} if kind != "int" else 1 for name, kind in columns.items()}
        search_client.index(index=sink.index, body=body)

    @pytest.mark.parametrize(
        ("field", "name", "kind"),
        [
            ({"type": "keyword"}, "a.b", "string"),
            ({"properties": {"b": {"type": "keyword"}}}, "a.b", "struct<c:int>"),
            ({"properties": {"b": {"type": "keyword"}}}, "a", "struct<b:struct<c:int>>"),
            ({"properties": {"b": {"type": "object"}}}, "a", "struct<b:array<int>>"),
            ({"dynamic": "strict", "properties": {}}, "a", "struct<b:int>"),
        ],
    )
    def test_fields_of_structs_are_compared_with_the_mapping(
        self, make_search: Any, field: Any, name: str, kind: str
    ) -> None:
        sink = make_search({"properties": {"a": field}})
        sink.project({"id": Column("id", "string")} | self.columns({name: kind}))
        with pytest.raises(UsageError, match=r"column 'a.b'"):
            sink.preflight()

    @pytest.mark.parametrize("limit", [None, 20])
    def test_more_fields_than_the_index_takes_are_refused(
        self, make_search: Any, search_client: Any, limit: int | None
    ) -> None:
        mapping = {
            "properties": {
                "id": {"type": "text", "fields": {"raw": {"type": "keyword"}}},
                "o": {"properties": {"x": {"type": "long"}}},
                "other": {"type": "alias", "path": "id"},
            }
        }
        settings = {} if limit is None else {"mapping.total_fields.limit": limit}
        new = (limit or 1000) - 5 - 2  # beside what is there, and s with its field
        for more in (0, 1):
            sink = make_search(mapping, index_settings=settings)
            columns = {f"c{number}": "int" for number in range(new + more)} | {"s": "struct<y:int>"}
            sink.project({"id": Column("id", "string")} | self.columns(columns))
            body = dict.fromkeys(columns, 1) | {"id": "1", "s": {"y": 1}}
            if not more:
                assert sink.preflight() == []
                search_client.index(index=sink.index, body=body)
                continue
            with pytest.raises(UsageError, match=r"total_fields\.limit is .*Raise the limit"):
                sink.preflight()
            with pytest.raises(opensearchpy.exceptions.RequestError, match="otal fields"):
                search_client.index(index=sink.index, body=body)

    def test_texts_may_need_more_fields_than_the_index_takes(self, make_search: Any) -> None:
        sink = make_search(index_settings={"mapping.total_fields.limit": 10})
        sink.project(
            {"id": Column("id", "string")} | self.columns(dict.fromkeys("abcde", "string"))
        )
        (warning,) = sink.preflight()
        assert "up to 12 fields" in warning

    def test_the_fields_of_a_missing_index_are_counted_by_its_template(
        self, make_search: Any, search_client: Any
    ) -> None:
        many = self.columns({f"c{number}": "int" for number in range(1100)})
        sink = make_search(into=f"later-{next(NUMBERS)}")
        sink.project({"id": Column("id", "string")} | many)
        with pytest.raises(UsageError, match=r"total_fields\.limit is 1000"):
            sink.preflight()
        template = {"settings": {"index.mapping.total_fields.limit": 2000}}
        body = {"index_patterns": ["later-*"], "template": template}
        search_client.indices.put_index_template(name="later", body=body)
        try:
            (warning,) = sink.preflight()
            assert "does not exist" in warning
        finally:
            search_client.indices.delete_index_template(name="later")

    def test_the_shape_of_a_variant_is_checked_before_the_decision(
        self, make_search: Any, spark: SparkSession
    ) -> None:
        texts = ["1", '"a"', '[1, "a"]', "null", '{"a": 1}', '[{"a": 1}]', '[1, {"a": 1}]']
        values = ", ".join(f"('{number}', '{text}')" for number, text in enumerate(texts))
        frame = spark.sql(f"SELECT id, parse_json(t) v FROM VALUES {values} AS t(id, t)")
        for field, bad in (({"type": "keyword"}, {4, 5, 6}), ({"type": "object"}, {0, 1, 2})):
            sink = make_search({"properties": {"v": field | {}}})
            wanted = sink.project({"id": Column("id", "string"), "v": Column("v", "variant")})
            sink.preflight()
            got = frame.selectExpr(
                *(f"{sql} AS `{name}`" for name, sql in wanted.items())
            ).collect()
            written = pa.RecordBatch.from_pylist([row.asDict() for row in got])
            with pytest.raises(BadRow, match=r"the variant v holds an? (object|value)") as raised:
                sink.begin(branch(tolerant=True)).write(written)
            assert raised.value.rows.keys() == bad
            good = [row for row in range(len(texts)) if row not in bad]
            if field["type"] == "object":
                good.remove(6)  # the first item decides
            assert sink.commit([store_rows(sink, written.take(pa.array(good)))]) == [DONE]

    def columns(self, kinds: Any) -> dict[str, Column]:
        return {name: Column(f"`{name}`", kind) for name, kind in kinds.items()}


class TestAliases:
    """A repeat must go to the same index."""

    @pytest.fixture
    def alias(self, search_client: Any) -> Any:
        def alias(*entries: Any) -> str:
            name = f"alias-{next(NUMBERS)}"
            for number, entry in enumerate(entries):
                body = {"settings": {"number_of_replicas": 0}, "aliases": {name: entry}}
                search_client.indices.create(index=f"{name}-{number}", body=body)
            return name

        return alias

    def test_an_alias_of_one_index_is_accepted_until_it_is_deleted(
        self, make_search: Any, search_client: Any, alias: Any
    ) -> None:
        sink = make_search(into=alias({}))
        assert sink.preflight() == []
        assert sink.commit([store_rows(sink, make_rows(["a"]))]) == [DONE]
        search_client.indices.delete_alias(index=f"{sink.index}-0", name=sink.index)
        receipt = store_rows(sink, make_rows(["b"]), batch=1)
        with pytest.raises(PermanentlyRefused, match="is not an alias"):
            sink.commit([receipt])
        assert not search_client.indices.exists(index=sink.index)
        search_client.indices.put_alias(index=f"{sink.index}-0", name=sink.index)
        assert sink.commit([receipt]) == [DONE]
        assert set(read_documents(search_client, sink)) == {"a", "b"}

    @pytest.mark.parametrize(
        "entries", [({"is_write_index": True},), ({"is_write_index": True}, {})]
    )
    def test_an_alias_with_a_write_index_is_not_exactly_once(
        self, make_search: Any, alias: Any, entries: Any
    ) -> None:
        index = alias(*entries)
        with pytest.raises(UsageError, match="which a rollover changes"):
            make_search(into=index).preflight()
        assert (
            len(make_search(into=index, semantic="at_least_once").preflight()) == len(entries) - 1
        )

    @pytest.mark.parametrize("entries", [({"is_write_index": False},), ({}, {})])
    def test_an_alias_without_a_write_index_is_refused(
        self, make_search: Any, alias: Any, entries: Any
    ) -> None:
        index = alias(*entries)
        for semantic in ("exactly_once", "at_least_once"):
            with pytest.raises(UsageError, match="write index"):
                make_search(into=index, semantic=semantic).preflight()

    def test_another_index_each_day_is_not_exactly_once(self, make_search: Any) -> None:
        with pytest.raises(UsageError, match="another index each day"):
            make_search(into="<day-{now/d}>").preflight()
        (warning,) = make_search(into="<day-{now/d}>", semantic="at_least_once").preflight()
        assert "does not exist" in warning


def test_nan_and_infinity_are_bad_rows(make_search: Any, spark: SparkSession) -> None:
    """Spark writes them as text, which a numeric field would refuse after the decision."""
    values = {
        "flat": ("double", "double('{}')"),
        "half": ("float", "float('{}')"),
        "array": ("array<double>", "array(1.0D, null, double('{}'))"),
        "deep": (
            "array<struct<m:map<string,float>,d:decimal(3,1),s:struct<x:double>>>",
            "array(null, named_struct('m', map('NaN', float('{}')), 'd', 1.5BD, "
            "'s', named_struct('x', 1D)))",
        ),
    }
    sink = make_search()
    columns = {name: Column(f"r.`{name}`", kind) for name, (kind, _) in values.items()}
    wanted = sink.project({"id": Column("id", "string"), "t": Column("id", "string")} | columns)
    lines: list[str] = []
    for number, word in enumerate(["1", "NaN", "Infinity", "-Infinity"]):
        for odd in values if number else ["flat"]:
            row = ", ".join(
                f"{made.format(word if name == odd else 1)} AS {name}"
                for name, (_, made) in values.items()
            )
            lines.append(f"SELECT 'NaN{len(lines)}' AS id, struct({row}) AS r")
    lines.append(f"SELECT 'NaN' AS id, CAST(null AS {_struct(values)}) AS r")
    frame = spark.sql(" UNION ALL ".join(lines))
    got = frame.selectExpr(*(f"{sql} AS {name}" for name, sql in wanted.items())).collect()
    written = pa.RecordBatch.from_pylist([row.asDict() for row in got])
    with pytest.raises(BadRow, match="NaN or infinite") as raised:
        sink.begin(branch(tolerant=True)).write(written)
    assert sorted(raised.value.rows) == list(range(1, 13))
    good = store_rows(sink, written.take(pa.array([0, 13])))
    assert sink.commit([good]) == [DONE]


def test_a_key_of_a_map_that_no_field_can_have_is_a_bad_row(
    make_search: Any, search_client: Any, spark: SparkSession
) -> None:
    """The server makes a field of each key. It refuses some only after the decision."""
    bad = ["''", "' '", "'.'", "'.a'", "'a..b'", "'a. .b'", "'a. '", "'\t'"]
    good = ["'a'", "'a.'", "'c.b'", "' a b '", "'_id'", "'é漢'", "'a\"b'"]
    rows = ", ".join(
        f"('{number}', map({key}, 1), array(named_struct('m', map({key}, 1))))"
        for number, key in enumerate([*bad, *good, "'a', 1, 'b'"])
    )
    nulls = "SELECT 'null', null, array(null)"
    frame = spark.sql(f"SELECT * FROM VALUES {rows} AS t(id, flat, deep) UNION ALL {nulls}")
    columns = {
        "flat": Column("flat", "map<string,int>"),
        "deep": Column("deep", "array<struct<m:map<string,int>>>"),
    }

    def begin(mappings: Any, used: Any) -> tuple[OpenSearch, pa.RecordBatch]:
        sink = make_search(mappings)
        wanted = sink.project({"id": Column("id", "string")} | used)
        warned = sink.preflight()
        assert len(warned) == (mappings is None)
        assert all("each key becomes a field" in it for it in warned)
        got = frame.selectExpr(*(f"{sql} AS {name}" for name, sql in wanted.items())).collect()
        return sink, pa.RecordBatch.from_pylist([row.asDict() for row in got])

    for name in columns:
        sink, written = begin(None, {name: columns[name]})
        with pytest.raises(BadRow, match="a key of a map in it is blank") as raised:
            sink.begin(branch(tolerant=True)).write(written)
        assert sorted(raised.value.rows) == list(range(len(bad)))
        rest = written.slice(len(bad))
        assert sink.commit([store_rows(sink, rest)]) == [DONE]
        for number in range(len(bad)):
            body = written.column("document")[number].as_py()
            with pytest.raises(opensearchpy.exceptions.RequestError):
                search_client.index(index=sink.index, body=body)

    for opaque in (
        {"dynamic": False},
        {"properties": {"flat": {"type": "flat_object"}}},
        {"properties": {"flat": {"type": "object", "enabled": False}}},
    ):
        sink, written = begin(opaque, {"flat": columns["flat"]})
        assert sink.commit([store_rows(sink, written)]) == [DONE]


def test_an_id_that_is_not_utf8_is_a_bad_row(make_search: Any) -> None:
    """The server refuses the whole request, and with it every other row of a decided batch."""
    sink = make_search()
    ids = [b"a", b"\xff", "é".encode(), b"\xc3", b"\xed\xa0\x80", b"\x00"]
    column = pa.array(ids, pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(ids), column.buffers())
    written = make_rows([str(number) for number in range(len(ids))]).set_column(0, "id", text)
    with pytest.raises(BadRow) as raised:
        sink.begin(branch(tolerant=True)).write(written)
    assert raised.value.rows == dict.fromkeys([1, 3, 4], "the id is not UTF-8")
    good = written.take(pa.array([0, 2, 5]))
    assert sink.commit([store_rows(sink, good)]) == [DONE]


def _struct(values: Any) -> str:
    return f"struct<{','.join(f'{name}:{kind}' for name, (kind, _) in values.items())}>"


def test_the_size_of_a_document_includes_its_id() -> None:
    written = make_rows(["a"]).set_column(2, "document", pa.array(["x" * ((100 << 20) - 100)]))
    assert "larger than 100 MiB" in bad_rows(written, any_key=False, shapes={})[0]
