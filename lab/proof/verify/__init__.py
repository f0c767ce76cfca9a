"""Layouts against one process, in fp64. See lab/proof/verify/command.py."""
