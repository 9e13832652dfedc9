"""What Dynamo is told about our classes, and about optimizers. Importing this imports Dynamo."""

from impl.dynamo._installing import install, installed, uninstall
from impl.dynamo.optimizer import OptimizerVariable

__all__ = ["OptimizerVariable", "install", "installed", "uninstall"]
