"""Dynamo finds the class that tracks optimizers by what it derives from, so this one derives from torch's."""

from torch._dynamo.variables import optimizer


class OptimizerVariable(optimizer.OptimizerVariable):
    pass
