"""Values on their way through a pipeline: what arrives is what went in, or the row is a bad row.

Each is read back by a client that is not ours.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from fix_mysql import Place
from fix_postgres import Database
from pyspark.sql import DataFrame, SparkSession

import oracle
import poundlock as lock
import trial
from poundlock.errors import BadRow
from poundlock.sinks import Files, Kafka, OpenSearch, Postgres, Redis, TwoPhase

UTC = dt.timezone.utc
BERLIN = "Europe/Berlin"
# Before 1893, Berlin was 53 minutes and 28 seconds ahead of Greenwich.
OLD = dt.datetime(1850, 1, 1, 0, 0, 0, 1, UTC)
OLD_TEXT = "1850-01-01T00:53:28.000001+00:53:28"
MOMENTS = {
    OLD: OLD_TEXT,
    dt.datetime(1, 1, 2, tzinfo=UTC): "0001-01-02T00:53:28.000000+00:53:28",
    dt.datetime(2026, 10, 25, 0, 30, tzinfo=UTC): "2026-10-25T02:30:00.000000+02:00",
    dt.datetime(2026, 10, 25, 1, 30, tzinfo=UTC): "2026-10-25T02:30:00.000000+01:00",
}
BROKEN = ["CAST(X'FF' AS STRING)", "CAST(X'61EDA08062' AS STRING)"]  # a surrogate, in the second
# Ways to have a text in a row: its expression, and what the dead letter says of it.
SHAPES = {
    "plain": ("{}", "base64:/w=="),
    "array": ("array('a', {})", ["a", "base64:/w=="]),
    "struct": ("named_struct('odd, `name`:x', {})", {"odd, `name`:x": "base64:/w=="}),
    "value": ("map('k', {})", {"k": "base64:/w=="}),
    "key": ("map({}, 1)", {"�": 1}),
    "deep": ("array(null, map('k', named_struct('t', {})))", [None, {"k": {"t": "base64:/w=="}}]),
}


@pytest.fixture
def berlin(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", BERLIN)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", before)


def numbered(spark: SparkSession, place: Path, count: int) -> DataFrame:
    rows = [(number,) for number in range(count)]
    return lock.from_collection(spark, rows, "n int", directory=place / "given")


def play(frame: DataFrame, place: Path, sink: Any, **route: Any) -> None:
    name = f"values-{uuid.uuid4().hex[:8]}"  # Kafka remembers those of other tests
    made = lock.pipeline(frame, name=name, checkpoint_location=str(place / "checkpoint"))
    trial.finish(made.to(sink, **route))


def moments(spark: SparkSession, place: Path) -> DataFrame:
    """Return a stream of rows with an id and a time of each type."""
    micros = [
        (moment - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(0, 0, 1)
        for moment in MOMENTS
    ]
    chosen = f"timestamp_micros(array({', '.join(f'{it}L' for it in micros)})[n])"
    return numbered(spark, place, len(micros)).selectExpr(
        "CAST(n AS STRING) id",
        f"{chosen} t",
        f"array({chosen}) a",
        f"CAST({chosen} AS TIMESTAMP_NTZ) w",
    )


class TestTimes:
    @pytest.mark.parametrize("format", ["json", "csv"])
    def test_files_of_text(self, berlin: SparkSession, tmp_path: Path, format: str) -> None:
        frame = moments(berlin, tmp_path).select("id", "t")
        play(frame, tmp_path, Files(tmp_path / "out", format=format))
        texts = "".join(path.read_text() for path in (tmp_path / "out").glob(f"*.{format}"))
        assert all(text in texts for text in MOMENTS.values())
        read = (
            berlin.read.format(format).schema("id STRING, t TIMESTAMP").load(str(tmp_path / "out"))
        )
        found = read.selectExpr("unix_micros(t) m").collect()
        wanted = frame_micros()
        assert sorted(row.m for row in found) == sorted(wanted)

    def test_json_in_kafka_and_its_key(
        self, berlin: SparkSession, kafka: oracle.Kafka, tmp_path: Path
    ) -> None:
        topic = kafka.create()
        frame = moments(berlin, tmp_path).select("t", "w")
        out = Kafka(topic, bootstrap_servers=kafka.servers, key="t", value="json", name="out")
        play(frame, tmp_path, out)
        rows = kafka.rows(topic)
        assert len(rows) == len(MOMENTS)
        for row in rows:
            read = json.loads(row.value or b"")
            assert (row.key or b"").decode() == read["t"]
            assert MOMENTS[dt.datetime.fromisoformat(read["t"]).astimezone(UTC)] == read["t"]
            assert read["t"].startswith(read["w"])

    def test_redis(
        self, berlin: SparkSession, redis_server: Any, redis_client: Any, tmp_path: Path
    ) -> None:
        play(
            moments(berlin, tmp_path),
            tmp_path,
            Redis(key="id", url=redis_server.address, name="out"),
        )
        found = [redis_client.hgetall(str(number)) for number in range(len(MOMENTS))]
        texts = list(MOMENTS.values())
        assert [row["t"] for row in found] == texts
        assert [json.loads(row["a"]) for row in found] == [[text] for text in texts]
        assert [row["w"] for row in found] == [text[:26] for text in texts]  # with all six digits

    def test_opensearch(
        self, berlin: SparkSession, make_search: Any, search_client: Any, tmp_path: Path
    ) -> None:
        sink: OpenSearch = make_search(
            {"properties": {"t": {"type": "date"}, "a": {"type": "date"}}}
        )
        play(moments(berlin, tmp_path), tmp_path, sink)
        search_client.indices.refresh(index=sink.index)
        hits = search_client.search(
            index=sink.index, body={"docvalue_fields": [{"field": "t", "format": "epoch_millis"}]}
        )["hits"]["hits"]
        assert len(hits) == len(MOMENTS)
        for hit in hits:
            moment = dt.datetime.fromisoformat(hit["_source"]["t"]).astimezone(UTC)
            assert moment in MOMENTS
            millis = (moment - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(milliseconds=1)
            assert hit["fields"]["t"] == [str(millis)]

    def test_json_in_databases(
        self, berlin: SparkSession, db: Database, place: Place, tmp_path: Path
    ) -> None:
        db("CREATE TABLE t (id text, a jsonb)")
        place.ask("CREATE TABLE t (id VARCHAR(9), a TEXT)")
        frame = moments(berlin, tmp_path).select("id", "a")
        made = lock.pipeline(frame, name="values", checkpoint_location=str(tmp_path / "checkpoint"))
        made = made.to(Postgres("t", dsn=db.dsn, name="pg")).to(
            place.sink("t", name="my", look=False)
        )
        trial.finish(made)
        wanted = [[text] for text in MOMENTS.values()]
        assert [row[0] for row in db("SELECT a FROM t ORDER BY id")] == wanted
        assert [json.loads(row[0]) for row in place.ask("SELECT a FROM t ORDER BY id")] == wanted

    def test_years_of_five_digits(self, berlin: SparkSession, tmp_path: Path) -> None:
        far = "timestamp_micros(9223372036854775807L - n)"
        frame = numbered(berlin, tmp_path, 1).selectExpr("n", f"{far} t")
        play(frame, tmp_path, Files(tmp_path / "out", format="json"))
        read = berlin.read.schema("t TIMESTAMP").json(str(tmp_path / "out"))
        assert read.selectExpr("unix_micros(t) m").collect() == [(2**63 - 1,)]


def frame_micros() -> list[int]:
    return [(it - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(0, 0, 1) for it in MOMENTS]


def test_a_kafka_timestamp_before_1970_is_a_bad_row(
    spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path
) -> None:
    topic = kafka.create()
    times = "timestamp_millis(array(-1L, 0L, 1L, null)[n])"
    frame = numbered(spark, tmp_path, 4).selectExpr("CAST(n AS STRING) value", f"{times} timestamp")
    out = Kafka(topic, bootstrap_servers=kafka.servers, name="out")
    with pytest.raises(BadRow, match="2 rows have timestamps in or before") as raised:
        play(frame, tmp_path / "a", out)
    assert raised.value.sink == "out"
    play(frame, tmp_path, out, on_bad_row="skip")
    assert sorted(row.value or b"" for row in kafka.rows(topic)) == [b"2", b"3"]


def test_a_kafka_header_without_a_key_is_a_bad_row(
    spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path
) -> None:
    topic = kafka.create()
    key = f"array('', 'é', null, {BROKEN[0]})[n % 4]"
    header = f"named_struct('key', {key}, 'value', X'00')"
    many = "named_struct('key', 'a', 'value', null)"
    no_struct = f"IF(n = 4, null, {header})"
    made = f"CASE WHEN n = 5 THEN null WHEN n = 6 THEN array() ELSE array({many}, {no_struct}) END"
    kind = "array<struct<key: string, value: binary>>"
    frame = numbered(spark, tmp_path, 7).selectExpr(
        "CAST(n AS STRING) value", f"CAST({made} AS {kind}) headers"
    )
    out = Kafka(topic, bootstrap_servers=kafka.servers, name="out")
    with pytest.raises(BadRow, match="header whose key is null or not UTF-8") as raised:
        play(frame, tmp_path / "a", out)
    assert raised.value.sink == "out"
    play(frame, tmp_path, out, on_bad_row="skip")
    assert sorted(row.value or b"" for row in kafka.rows(topic)) == [b"0", b"1", b"5", b"6"]


class TestTextThatIsNotUtf8:
    """Each sink keeps the bytes, or the row is a bad row that names the sink and the column."""

    def frame(
        self, spark: SparkSession, place: Path, made: str, broken: str = BROKEN[0]
    ) -> DataFrame:
        """Return two rows, of which the second has such a text in column x."""
        text = f"IF(n = 1, {broken}, 'é')"
        return numbered(spark, place, 2).selectExpr(
            "CAST(n AS STRING) id", f"{made.format(text)} x"
        )

    def refuse(self, spark: SparkSession, place: Path, sink: Any, made: str, says: Any) -> None:
        """Check that the sink refuses the row, and takes the other one without it."""
        with pytest.raises(BadRow, match="column x is not UTF-8") as raised:
            play(self.frame(spark, place, made, BROKEN[1]), place / "first", sink)
        assert raised.value.sink == sink.name
        dead = Files(place / "dead", format="json", name="dead")
        play(self.frame(spark, place, made), place / "second", sink, on_bad_row=dead)
        (letter,) = spark.read.json(str(place / "dead")).collect()
        assert letter["sink"] == sink.name and "column x is not UTF-8" in letter["error"]
        row = json.loads(letter["row"])
        assert says in held(row), row

    @pytest.mark.parametrize("shape", SHAPES)
    def test_files_of_json(self, spark: SparkSession, tmp_path: Path, shape: str) -> None:
        made, says = SHAPES[shape]
        self.refuse(spark, tmp_path, Files(tmp_path / "out", format="json"), made, says)
        (row,) = spark.read.json(str(tmp_path / "out")).collect()
        assert row["id"] == "0"

    def test_files_of_csv(self, spark: SparkSession, tmp_path: Path) -> None:
        frame = self.frame(spark, tmp_path, "{}")
        dead = Files(tmp_path / "dead", name="dead")
        play(frame, tmp_path, Files(tmp_path / "out", format="csv"), on_bad_row=dead)
        (letter,) = spark.read.parquet(str(tmp_path / "dead")).collect()
        assert "column x is not UTF-8" in letter["error"]
        assert json.loads(letter["row"]) == {"line": "1,base64:/w=="}
        assert [tuple(row) for row in spark.read.csv(str(tmp_path / "out")).collect()] == [
            ("0", "é")
        ]

    @pytest.mark.parametrize("shape", ["plain", "deep"])
    def test_parquet_keeps_the_bytes(self, spark: SparkSession, tmp_path: Path, shape: str) -> None:
        frame = self.frame(spark, tmp_path, SHAPES[shape][0])
        play(frame, tmp_path, Files(tmp_path / "out"))
        inner = {"plain": "x", "deep": "x[1]['k'].t"}[shape]
        read = spark.read.parquet(str(tmp_path / "out")).selectExpr("id", f"hex({inner}) h")
        assert {tuple(row) for row in read.collect()} == {("0", "C3A9"), ("1", "FF")}

    def test_kafka(self, spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path) -> None:
        raw, topic = kafka.create(), kafka.create()
        play(
            self.frame(spark, tmp_path, "{}"),
            tmp_path,
            Kafka(raw, bootstrap_servers=kafka.servers, key="x", value="x", name="raw"),
        )
        assert {(row.key, row.value) for row in kafka.rows(raw)} == {
            ("é".encode(), "é".encode()),
            (b"\xff", b"\xff"),
        }
        out = Kafka(topic, bootstrap_servers=kafka.servers, key="id", value="json", name="out")
        self.refuse(spark, tmp_path / "json", out, *SHAPES["plain"])
        assert [json.loads(row.value or b"") for row in kafka.rows(topic)] == [
            {"id": "0", "x": "é"}
        ]

    def test_redis(
        self, spark: SparkSession, redis_server: Any, redis_client: Any, tmp_path: Path
    ) -> None:
        frame = self.frame(spark, tmp_path, "{}")
        url = redis_server.address
        play(frame, tmp_path, Redis(hash="raw", field="x", value="x", url=url, name="raw"))
        client = redis.Redis.from_url(url)
        assert client.hgetall("raw") == {b"\xff": b"\xff", "é".encode(): "é".encode()}
        for shape, value in (("array", "x"), ("plain", "json")):
            sink = Redis(hash=shape, field="id", value=value, url=url, name="out")
            self.refuse(spark, tmp_path / shape, sink, *SHAPES[shape])
            assert list(client.hgetall(shape)) == [b"0"]

    @pytest.mark.parametrize("shape", ["plain", "struct"])
    def test_opensearch(
        self, spark: SparkSession, make_search: Any, search_client: Any, tmp_path: Path, shape: str
    ) -> None:
        sink: OpenSearch = make_search()
        with pytest.raises(BadRow, match="column x is not UTF-8"):
            play(self.frame(spark, tmp_path, SHAPES[shape][0]), tmp_path / "a", sink)
        frame = self.frame(spark, tmp_path / "b", SHAPES[shape][0])
        play(frame, tmp_path / "b", sink, on_bad_row="skip")
        search_client.indices.refresh(index=sink.index)
        hits = search_client.search(index=sink.index)["hits"]["hits"]
        assert [hit["_id"] for hit in hits] == ["0"]

    @pytest.mark.parametrize("shape", ["plain", "array"])
    def test_databases(
        self, spark: SparkSession, db: Database, place: Place, tmp_path: Path, shape: str
    ) -> None:
        db("CREATE TABLE t (id text, x text); CREATE TABLE u (id text, x text)")
        place.ask("CREATE TABLE t (id VARCHAR(9), x TEXT)")
        my = place.sink(name="my", look=False)
        any_ = TwoPhase(psycopg.connect, "u", dsn=db.dsn, name="any")
        for sink in (Postgres("t", dsn=db.dsn, name="pg"), my, any_):
            self.refuse(spark, tmp_path / sink.name, sink, *SHAPES[shape])
        text = {"plain": "é", "array": '["a","é"]'}[shape]
        assert (
            db("SELECT * FROM u")
            == db("SELECT * FROM t")
            == place.ask("SELECT * FROM t")
            == [("0", text)]
        )


def held(row: dict[str, Any]) -> list[Any]:
    """Return what the row of a dead letter says of x, as a value or in the JSON of its row."""
    said = [row.get("x"), row.get("value")]
    said += [json.loads(it) for it in said if isinstance(it, str) and it[:1] in ("[", "{")]
    return said + [it["x"] for it in said if isinstance(it, dict) and "x" in it]


class TestFiles:
    def test_a_partition_by_time_tells_all_instants_apart(
        self, berlin: SparkSession, tmp_path: Path
    ) -> None:
        """The clock shows 02:30 twice, and a directory's name has no zone."""
        seconds = [1_792_888_200, 1_792_891_800, 1_792_900_000, -2]  # the first two are such
        given = f"timestamp_seconds(array({', '.join(map(str, seconds))})[n]) t"
        frame = numbered(berlin, tmp_path, 4).selectExpr("n", given)
        with pytest.raises(BadRow, match="the clocks of Europe/Berlin show its t") as raised:
            play(frame, tmp_path / "a", Files(tmp_path / "a" / "out", partition_by="t"))
        assert raised.value.sink == "out"
        sink = Files(tmp_path / "out", partition_by="t")
        play(frame, tmp_path, sink, on_bad_row=Files(tmp_path / "dead"))
        read = berlin.read.schema("n INT, t TIMESTAMP").parquet(str(tmp_path / "out"))
        found = {row.n: row.s for row in read.selectExpr("n", "unix_seconds(t) s").collect()}
        (letter,) = berlin.read.parquet(str(tmp_path / "dead")).collect()
        assert json.loads(letter["row"]) == {"n": 1, "t": "2026-10-25T02:30:00.000000+01:00"}
        assert found == {0: seconds[0], 2: seconds[2], 3: seconds[3]}

    @pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__"])
    def test_a_partition_that_reads_as_null_is_a_bad_row(
        self, spark: SparkSession, tmp_path: Path, text: str
    ) -> None:
        frame = numbered(spark, tmp_path, 3).selectExpr("n", f"array('{text}', 'a', null)[n] day")
        with pytest.raises(BadRow, match=r"its day is .*, which is read as null"):
            play(frame, tmp_path / "a", Files(tmp_path / "a" / "out", partition_by="day"))
        play(frame, tmp_path, Files(tmp_path / "out", partition_by="day"), on_bad_row="skip")
        read = spark.read.parquet(str(tmp_path / "out"))
        assert {tuple(row) for row in read.collect()} == {(1, "a"), (2, None)}

    @pytest.mark.parametrize("made", ["{}", "array({})", "map('k', {})", "named_struct('s', {})"])
    def test_null_structs_with_fields_that_are_not_null(
        self, spark: SparkSession, tmp_path: Path, made: str
    ) -> None:
        """Spark's own sink takes them."""
        struct = "IF(n = 0, null, named_struct('x', 7, 'm', map('a', named_struct('y', 'b'))))"
        frame = numbered(spark, tmp_path, 2).selectExpr("n", f"{made.format(struct)} s")
        play(frame, tmp_path, Files(tmp_path / "out"))
        read = spark.read.parquet(str(tmp_path / "out"))
        wanted = (
            spark.range(2)
            .selectExpr("CAST(id AS INT) n")
            .selectExpr("n", f"{made.format(struct)} s")
        )
        assert sorted(read.collect()) == sorted(wanted.collect())
