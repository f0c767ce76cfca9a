"""Checkpoints of other systems: files are read as data, and none of their pickles is executed."""
