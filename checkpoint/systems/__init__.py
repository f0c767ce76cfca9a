"""Checkpoints of other systems: their files are read as data, and no pickle of theirs runs."""
