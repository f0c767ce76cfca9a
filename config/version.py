"""The version, in one place: the console, pyproject.toml and `import bevatron` take it from here."""

VERSION = "0.1"
