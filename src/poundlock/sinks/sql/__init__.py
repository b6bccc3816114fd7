"""What the sinks of SQL databases share. No module here imports a database's driver.

naming       the id of a branch: its pipeline, sink, batch, attempt and task
dialect      what differs between systems, and the connection that the modules here use
witness      the table that proves how a branch ended
receipts     what a receipt of an SQL sink holds
staging      what staged branches have in common
branches     the base class of SQL sinks, and the dispatch of branches by mode
connections  the check of how many connections a sink opens

To add a system (SQL Server, Db2, ...), add a folder beside `postgres/` with these parts: a `Dialect`;
a connection with the methods of `dialect.Link`; the CREATE TABLE statement of the witness; a writer,
which encodes Arrow rows; an `SqlSink`; and `PreparedBranches`, `StagedBranches` or both. The witness,
the receipts and the dispatch by mode are used as they are. `twophase/` is the smallest example of
prepared branches, and `postgres/` of staged ones.
"""
