"""MySQL and MariaDB from below: connections, rows as text, tables as they are, branches, moves.

link       a connection: address, session, errors in our words, LOAD DATA from memory
text       Arrow columns as the text that LOAD DATA reads
target     the target table as the server describes it, compared with the frame
branches   names, `XA RECOVER`, the witness table
move       staged rows into the target, by one transaction
"""
