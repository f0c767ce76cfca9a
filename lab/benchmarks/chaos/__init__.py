"""Random seeded faults in real runs of train.py: python -m scripts.bench chaos (docs/faults.md)."""
