"""pytest plugins of the judge, for an installed package. In a checkout, pytest's settings load them."""

pytest_plugins = ["conformance.plugin", "conformance.ranks.fixtures"]
