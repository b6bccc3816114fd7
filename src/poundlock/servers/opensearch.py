"""OpenSearch: one node that listens on the loopback interface only.

    with opensearch.running() as server:      # private, ends with the block
        server.url
        server.kill(); server.start()

The jars are pinned. There is no password, because the security plugin is not among them.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable
from poundlock.jvm import jars
from poundlock.servers import base, demote, programs, rooms
from poundlock.servers.node import Node, lasting, private

NAME = "opensearch"

_JVM = ("-Dlog4j2.StatusLogger.level=OFF", "-Dlog4j2.disable.jmx=true")

# The runner's own main searches for a free port between the given one and 9299, and fails silently if
# there is none. Janino compiles this class at the start, so a Java without a compiler is enough.
_LAUNCH = """
import org.codelibs.opensearch.runner.OpenSearchRunner;

public class Launch {
    public static void main(String[] arguments) throws Exception {
        final OpenSearchRunner runner = new OpenSearchRunner();
        runner.setMaxHttpPort(-1);
        Runtime.getRuntime().addShutdownHook(new Thread() {
            public void run() {
                try {
                    runner.close();
                } catch (Exception error) {
                    error.printStackTrace();
                }
            }
        });
        try {
            runner.build(arguments);
        } catch (Throwable error) {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
        while (!runner.isClosed()) {
            Thread.sleep(1000);
        }
    }
}
"""

_LOGGING = """status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


@dataclass(frozen=True)
class OpenSearchServer:
    """What to run; see `base.Server`."""

    settings: Mapping[str, str] = field(default_factory=dict)
    heap_mb: int = 512

    name = NAME
    nodes = ("1",)
    port_names = ("client", "transport")
    stop_timeout = base.STOP_TIMEOUT

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def url(self, ports: Mapping[str, int]) -> str:
        return f"http://127.0.0.1:{ports['client']}"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        jars.paths("opensearch-server")  # fetch them before creating anything
        rooms.hand_over(_own(home))
        config = _own(home) / "config"
        config.mkdir(exist_ok=True)
        settings = {
            "network.host": "127.0.0.1",
            "transport.port": str(ports["transport"]),
            "discovery.type": "single-node",
            # The server must also work if the machine's disk is nearly full.
            "cluster.routing.allocation.disk.threshold_enabled": "false",
            **self.settings,
        }
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
        base.write_private(config / "opensearch.yml", text)
        base.write_private(config / "log4j2.properties", _LOGGING)
        base.write_private(_own(home) / "Launch.java", _LAUNCH)
        base.write_private(home / "port", str(ports["client"]))
        rooms.hand_over(_own(home))

    def command(self, home: Path, node: str) -> list[str]:
        own = _own(home).resolve()
        port = int((home / "port").read_text())
        flags = (f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m", f"-Djava.io.tmpdir={own}")
        return demote.demoted(
            [
                *programs.java_command("opensearch-server", *_JVM, *flags, record=True),
                *("org.codehaus.janino.SimpleCompiler", str(own / "Launch.java"), "Launch"),
                *("-basePath", str(own), "-confPath", str(own / "config"), "-numOfNode", "1"),
                *("-baseHttpPort", str(port - 1), "-clusterName", "poundlock"),
                *("-moduleTypes", "org.opensearch.transport.Netty4Plugin"),
            ]
        )

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Check that the node manages its cluster and has recovered every index."""
        address = f"{self.url(ports)}/_cluster/health"
        with urllib.request.urlopen(address, timeout=5) as answer:
            health = json.load(answer)
        if health["status"] == "red" or health["initializing_shards"]:
            raise Unavailable(f"the node answers, but its indices are {health['status']}")


def running(
    directory: Path | str | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    heap_mb: int = 512,
) -> AbstractContextManager[Node]:
    """Run a private server; see `node.private`. `settings` of OpenSearch override ours."""
    server = OpenSearchServer(settings or {}, heap_mb)
    return private(Node, server, directory)


def up(directory: Path | str | None = None) -> Node:
    """Start the server that outlives the program, if it is not running; see `base.home_of`."""
    return lasting(Node, OpenSearchServer(), directory)


def _own(home: Path) -> Path:
    """Return the directory that belongs to the server's user."""
    return home / "node"
