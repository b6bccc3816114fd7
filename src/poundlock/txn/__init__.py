"""The operator's tools: look at transactions in doubt and resolve them."""
