"""What the SQL sinks share: written once, for every dialect."""
