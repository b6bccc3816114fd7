"""The witness: a row for every branch that is over, written in the transaction that ends it.

Whether a branch was committed is asked by trying to write its tombstone. The key lets only one of the
two in: a tombstone that enters proves that the branch was not committed and never will be. That holds
for the very table that the branch would have written to, and for no other, and only while nobody has
emptied it. So a receipt carries that table's oid, which a table made in its place cannot have, and
what its first row says, which tells of itself and goes with the others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import Connection, errors, sql

from poundlock.core.model import Json, Namespace, Receipt
from poundlock.core.protocol import BranchState
from poundlock.errors import NotAuthorised
from poundlock.sinks.postgres.target import Target, read_id

logger = logging.getLogger("poundlock")

_LOCK = 0x706F756E646C6F63  # for all who might create the schema at once
_ITSELF = "witness"  # the row about the table; no branch is called so
_EMPTIED = "emptied"
_STATES = {"committed": BranchState.COMMITTED, "aborted": BranchState.ABORTED}


def identity(connection: Connection[Any], target: Target, *, hold: bool = False) -> str | None:
    """Return what tells the witness table from any other of this database; None: there is none.

    `hold` keeps its rows from being deleted until the transaction ends.
    """
    oid = _oid(connection, target)
    if oid is None:
        return None
    query = sql.SQL("SELECT identity FROM {} WHERE branch = %s").format(target.witness)
    if hold:
        query += sql.SQL(" FOR KEY SHARE")
    itself = connection.execute(query, [_ITSELF]).fetchone()
    return f"{oid}:{itself[0] if itself is not None else _EMPTIED}"


def _oid(connection: Connection[Any], target: Target) -> str | None:
    found = connection.execute(
        "SELECT to_regclass(%s)::oid::text", [target.witness.as_string(connection)]
    ).fetchone()
    return found[0] if found is not None else None


def hold(connection: Connection[Any], target: Target) -> str | None:
    """Return the witness table's identity, and keep the table as it is meanwhile. In a transaction."""
    try:
        with connection.transaction():
            connection.execute(
                sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(target.witness)
            )
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        return None
    return identity(connection, target, hold=True)


def is_witness(target: Target, held: str | None, receipt: Receipt) -> bool:
    """Whether the table can say how this branch ended."""
    there: Json = receipt.handle.get("witness")
    if held is not None and there in (None, held):
        return True
    logger.warning(
        "sink %s: %s.witness is %s, so that it proves nothing of branch %s. Where witness_schema= was "
        "changed, give it as it was",
        *(target.sink, target.witness_schema),
        "missing"
        if held is None
        else "not as it was when the branch was written (another, or emptied)",
        receipt.id,
    )
    return False


def missing_grant(
    connection: Connection[Any], target: Target, *, staging: bool = False
) -> str | None:
    """Return the GRANT that is lacking for the witness, and for `staging`; None if all is well."""
    schema = sql.Identifier(target.witness_schema).as_string(connection)
    # has_schema_privilege fails for a schema that does not exist; there it is the database that counts.
    role, has_schema, may_use, may_create = connection.execute(
        "SELECT quote_ident(current_user), oid IS NOT NULL, "
        "oid IS NULL OR has_schema_privilege(oid, 'USAGE'), "
        "CASE WHEN oid IS NULL THEN has_database_privilege(current_database(), 'CREATE') "
        "ELSE has_schema_privilege(oid, 'CREATE') END "
        "FROM (SELECT to_regnamespace(%s)::oid) AS s (oid)",
        [schema],
    ).fetchone() or ("", False, False, False)
    if not may_use:
        return f"GRANT CREATE, USAGE ON SCHEMA {schema} TO {role}"
    if not may_create and not has_schema:
        database = sql.Identifier(connection.info.dbname).as_string(connection)
        return f"GRANT CREATE ON DATABASE {database} TO {role}"
    if not may_create and (staging or _oid(connection, target) is None):
        return f"GRANT CREATE, USAGE ON SCHEMA {schema} TO {role}"
    table = target.witness.as_string(connection)
    if has_schema and _oid(connection, target) is not None:
        found = connection.execute(
            "SELECT bool_and(has_table_privilege(%s, word)) "
            "FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) word",
            [table],
        ).fetchone()
        if found is not None and not found[0]:
            return f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}"
    return None


def ensure(connection: Connection[Any], target: Target) -> None:
    """Create the witness's schema, table and first row where they are missing. In autocommit."""
    known = identity(connection, target)
    if known is not None and not known.endswith(_EMPTIED):
        return
    try:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            schema = sql.Identifier(target.witness_schema)
            found = connection.execute(
                "SELECT to_regnamespace(%s) IS NULL", [schema.as_string(connection)]
            ).fetchone()
            if found is not None and found[0]:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
            # IF NOT EXISTS needs the right to create, too.
            if _oid(connection, target) is None:
                connection.execute(_CREATE.format(target.witness))
            connection.execute(
                _CLAIM.format(_INSERT.format(target.witness)),
                [[_ITSELF], [""], [secrets.token_hex(8)], [0], [""], [0], ["committed"]],
            )
    except errors.InsufficientPrivilege:
        grant = missing_grant(connection, target)
        raise NotAuthorised(
            f"the witness table {target.witness_schema}.witness cannot be created: "
            f"{grant or 'the role lacks a permission'}; or have it created once by a role that may",
            sink=target.sink,
        ) from None


_CREATE = sql.SQL("""
CREATE TABLE IF NOT EXISTS {} (
    branch text PRIMARY KEY,
    pipeline text NOT NULL,
    identity text NOT NULL,
    generation bigint NOT NULL,
    sink text NOT NULL,
    batch bigint NOT NULL,
    state text NOT NULL CHECK (state IN ('committed', 'aborted')),
    at timestamptz NOT NULL DEFAULT now()
)""")
_CLAIM = sql.SQL("{} ON CONFLICT (branch) DO NOTHING RETURNING branch")
_INSERT = sql.SQL("""
INSERT INTO {} (branch, pipeline, identity, generation, sink, batch, state)
SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[],
                     %s::text[])
""")


def _columns(branches: Sequence[str], state: str) -> list[list[Any]]:
    rows = []
    for branch in branches:
        parsed = read_id(branch)
        assert parsed is not None, branch
        name = parsed[0]
        space = name.namespace
        rows.append(
            (branch, space.pipeline, space.identity, name.generation, name.sink, name.batch, state)
        )
    return [list(column) for column in zip(*rows, strict=True)]


def insert(connection: Connection[Any], target: Target, branch: str) -> None:
    """Write the witness that this branch was committed, as a part of it."""
    connection.execute(_INSERT.format(target.witness), _columns([branch], "committed"))


def claim(
    connection: Connection[Any], target: Target, branches: Sequence[str], state: str
) -> dict[str, BranchState | None]:
    """Write a witness for each branch that has none. Return what those say that had one.

    None: the witness is the one just written. Waits for whoever is about to end the branch.
    """
    if not branches:
        return {}
    # In one order for all, or two who claim the same would wait for each other.
    ordered = sorted(branches)
    written = connection.execute(
        _CLAIM.format(_INSERT.format(target.witness)),
        _columns(ordered, state),
    ).fetchall()
    mine = {row[0] for row in written}
    said = states(connection, target, [branch for branch in ordered if branch not in mine])
    return {
        branch: None if branch in mine else said.get(branch, BranchState.NO_WITNESS)
        for branch in branches
    }


def states(
    connection: Connection[Any], target: Target, branches: Sequence[str]
) -> Mapping[str, BranchState]:
    """Return what the witnesses of these branches say, as far as there are any."""
    if _oid(connection, target) is None:
        return {}
    found = connection.execute(
        sql.SQL("SELECT branch, state FROM {} WHERE branch = ANY (%s)").format(target.witness),
        [list(branches)],
    ).fetchall()
    return {branch: _STATES[state] for branch, state in found}


def set_aborted(connection: Connection[Any], target: Target, branches: Sequence[str]) -> None:
    """Turn claims of this very transaction into tombstones."""
    connection.execute(
        sql.SQL("UPDATE {} SET state = 'aborted' WHERE branch = ANY (%s)").format(target.witness),
        [list(branches)],
    )


def settle(
    connection: Connection[Any], target: Target, branch: str, receipt: Receipt | None = None
) -> BranchState:
    """Prove how a branch ended that is no longer open: by its tombstone. In autocommit.

    Without a receipt, no decision names the branch; then a new table will do.
    """
    if receipt is None:
        ensure(connection, target)
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [target.wait])
            if receipt is not None:
                held = hold(connection, target)
                if not is_witness(target, held, receipt):
                    return proven(connection, target, held, [branch])[0]
            said = claim(connection, target, [branch], "aborted")[branch]
    except errors.LockNotAvailable:
        return BranchState.PREPARED  # whoever holds its witness has not ended it
    return BranchState.ABORTED if said is None else said


def proven(
    connection: Connection[Any], target: Target, held: str | None, branches: Sequence[str]
) -> list[BranchState]:
    """Say what a table proves that is not their witness: nothing but what it says was committed."""
    said = states(connection, target, branches) if held is not None else {}
    committed = BranchState.COMMITTED
    return [
        committed if said.get(branch) is committed else BranchState.NO_WITNESS
        for branch in branches
    ]


def newest_generation(connection: Connection[Any], target: Target, namespace: Namespace) -> int:
    if _oid(connection, target) is None:
        return 0
    found = connection.execute(
        sql.SQL(
            "SELECT coalesce(max(generation), 0) FROM {} WHERE pipeline = %s AND identity = %s"
        ).format(target.witness),
        [namespace.pipeline, namespace.identity],
    ).fetchone()
    return int(found[0]) if found else 0


def prune(
    connection: Connection[Any],
    target: Target,
    namespace: Namespace,
    floor: int,
    keep: Sequence[str],
) -> None:
    """Forget the batches below `floor`, but never the newest generation, and no branch of `keep`."""
    if _oid(connection, target) is None:
        return
    connection.execute(
        sql.SQL(
            "DELETE FROM {0} WHERE pipeline = %(p)s AND identity = %(i)s AND sink = %(s)s "
            "AND batch < %(floor)s AND branch <> ALL (%(keep)s) AND branch <> (SELECT branch FROM {0} "
            "WHERE pipeline = %(p)s AND identity = %(i)s ORDER BY generation DESC, batch DESC LIMIT 1)"
        ).format(target.witness),
        {
            "p": namespace.pipeline,
            "i": namespace.identity,
            "s": target.sink,
            "floor": floor,
            "keep": list(keep),
        },
    )
