"""Hugging Face folders: config.json and our keys, names and shapes of tensors, in both directions."""
