"""Proof, benchmarks and scaling experiments, which import the program and are never imported by it."""
