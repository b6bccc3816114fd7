"""Redis and Valkey."""
