"""Checkpoints on a disk: files with checksums, folders, the newest good one, writing behind training."""
