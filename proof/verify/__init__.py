"""Layouts against one process, in fp64. See proof/verify/command.py."""
