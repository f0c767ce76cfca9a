"""Random seeded faults in real runs of train.py: python -m scripts.bench chaos (lab/docs/faults.md)."""
