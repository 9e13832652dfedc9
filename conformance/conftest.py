"""Hooks the judge into pytest."""

pytest_plugins = ["conformance.plugin", "conformance.ranks.fixtures"]
