"""MySQL and MariaDB.

sink      options, checks before the start, the parts in outline
writer    the task's half: one connection, one branch; `sender` sends its rows
prepared  the driver's half of branches that the server holds (XA); their names
staged    the driver's half of branches in tables beside the target
move      staging tables, and the statements that move their rows into the target
witness   the witness tables that receipts name
target    the table as the server describes it, compared with the frame; quoting of names
text      Arrow columns as the text that LOAD DATA reads; `bulk` as MariaDB's binary protocol
link      connections; LOAD DATA from memory
errors    the server's errors, translated
inspector the server as an operator inspects it
"""
