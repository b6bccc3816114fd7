"""PostgreSQL.

sink      options, checks before the start, the parts in outline
writer    the task's half: one connection, one transaction, one COPY
prepared  the driver's half of branches that the server holds (PREPARE TRANSACTION)
staged    the driver's half of branches in tables beside the target
move      staging tables, and the statements that move their rows into the target
target    the table and its options as plain values, which are sent to the tasks; the witness's SQL
catalog   the table as the database describes it
allowed   rights and connection limits of the role
types     which Spark types fit which columns
encode    Arrow columns as binary COPY; `numeric` does decimals
link      connections
errors    the server's errors, translated
inspector the database as an operator inspects it
"""
