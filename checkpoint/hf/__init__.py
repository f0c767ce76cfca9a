"""Hugging Face folders: what a config.json says in our keys, names and shapes of tensors, both ways."""
