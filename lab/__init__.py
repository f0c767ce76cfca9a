"""What proves and measures the program, which needs none of it: proof, benchmarks, scaling experiments."""
