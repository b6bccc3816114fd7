"""What the Redis sink is made of: how rows are packed, moved and witnessed, and how errors are told."""
