"""Scaling experiments: a ladder of models, the laws that their losses follow, and predictions from these."""
