"""OpenSearch: one node, on the loopback.

    with opensearch.running() as server:      # private, ended on exit
        server.url
        server.kill(); server.start()

`up` keeps one that outlives the program. The jars are pinned. There is no password: the security
plugin is not among them. Started by root, it runs as `nobody`.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable
from poundlock.jvm import jars, java
from poundlock.servers import base, demote
from poundlock.servers import node as node_module
from poundlock.servers.node import Node, private

NAME = "opensearch"
_NODE = "1"

_JVM = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    "-XX:+ExitOnOutOfMemoryError",  # rather dead than half alive
    "-Dlog4j2.StatusLogger.level=OFF",
    "-Dlog4j2.disable.jmx=true",
)

# The runner's own main looks for a free port between the one that it is given and 9299, and fails
# without a word if that is none. Compiled when it starts, by Janino: a Java without a compiler will do.
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

    @property
    def nodes(self) -> Sequence[str]:
        return [_NODE]

    @property
    def port_names(self) -> Sequence[str]:
        return ["client", "transport"]

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    @property
    def stop_timeout(self) -> float:
        return base.STOP_TIMEOUT

    def url(self, ports: Mapping[str, int]) -> str:
        return f"http://127.0.0.1:{ports['client']}"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        jars.paths("opensearch-server")  # fetched before anything is made
        config = _own(home) / "config"
        config.mkdir(parents=True, exist_ok=True)
        settings = {
            "network.host": "127.0.0.1",
            "transport.port": str(ports["transport"]),
            "discovery.type": "single-node",
            # A full disk of the machine is not what is on trial.
            "cluster.routing.allocation.disk.threshold_enabled": "false",
            **self.settings,
        }
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
        (config / "opensearch.yml").write_text(text)
        (config / "log4j2.properties").write_text(_LOGGING)
        (_own(home) / "Launch.java").write_text(_LAUNCH)
        (_own(home) / "port").write_text(str(ports["client"]))
        demote.hand_over(_own(home))

    def command(self, home: Path, node: str) -> list[str]:
        own = _own(home)
        port = int((own / "port").read_text())
        files = jars.paths("opensearch-server")
        archive = java.ClassArchive.of(files, jars.cache().with_name("classes"))
        # The archive is written at the end, and below root's home only root may write.
        shared = archive.flags(record=os.geteuid() != 0)
        return demote.demoted(
            [
                *(str(java.executable()), *_JVM, *shared),
                *(f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m", f"-Djava.io.tmpdir={own}"),
                *("-cp", os.pathsep.join(str(file) for file in files)),
                *("org.codehaus.janino.SimpleCompiler", str(own / "Launch.java"), "Launch"),
                *("-basePath", str(own), "-confPath", str(own / "config"), "-numOfNode", "1"),
                *("-baseHttpPort", str(port - 1), "-clusterName", "poundlock"),
                *("-moduleTypes", "org.opensearch.transport.Netty4Plugin"),
            ]
        )

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Ready is a node that is its cluster's manager and has recovered every index."""
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
    """A private server; see `node.private`. `settings` are OpenSearch's own, and go before ours."""
    server = OpenSearchServer(settings or {}, heap_mb)
    return private(lambda home, owner: Node(server, home, owner), NAME, directory)


def up(directory: Path | str | None = None) -> Node:
    """Start the server that outlives the program, or find it running; see `base.home_of`."""
    node = Node(OpenSearchServer(), base.home_of(NAME, directory))
    node.up()
    return node


down, status = partial(node_module.down, NAME), partial(node_module.status, NAME)


def _own(home: Path) -> Path:
    """The directory that belongs to the server's user."""
    return home / "node"
