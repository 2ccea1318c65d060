"""The version of this tree; pyproject.toml reads it from here."""

VERSION = "0.1.0"
