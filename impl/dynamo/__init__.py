"""Dynamo's support of our classes and of optimizers. Importing this module imports Dynamo."""

from impl.dynamo._installing import install, installed, uninstall
from impl.dynamo.optimizer import OptimizerVariable

__all__ = ["OptimizerVariable", "install", "installed", "uninstall"]
