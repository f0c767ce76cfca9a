"""Checkpoints on disk: checksummed files, folders, the newest good checkpoint, background saves."""
