"""Hooks the judge into pytest where it is installed; in a checkout its settings do, for all folders."""

pytest_plugins = ["conformance.plugin", "conformance.ranks.fixtures"]
