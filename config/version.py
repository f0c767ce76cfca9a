"""The single source of the version for the console, pyproject.toml and `import bevatron`."""

VERSION = "0.1"
