"""A plain optimizer and a captured one over equal parameters, and what can happen to both."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from impl.optim import capture

SHAPES = ((3,), (2, 3), (3,))
MATRICES = ((3, 2), (2, 3), (3, 2))
# Learning rates of fused ones are exact in float32, in which a graph reads them.
ADAM_OPTIONS = {"lr": 0.125, "weight_decay": 0.01, "betas": (0.8, 0.9)}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam fused": ("Adam", {"fused": True, **ADAM_OPTIONS}),
    "AdamW fused": ("AdamW", {"fused": True, **ADAM_OPTIONS}),
    "AdamW fused amsgrad": ("AdamW", {"fused": True, "amsgrad": True, "maximize": True, **ADAM_OPTIONS}),
    "SGD fused": ("SGD", {"fused": True, "lr": 0.125, "weight_decay": 0.01}),
    "SGD fused momentum": ("SGD", {"fused": True, "lr": 0.125, "momentum": 0.9, "nesterov": True}),
    "Adagrad fused": ("Adagrad", {"fused": True, "lr": 0.125, "lr_decay": 0.01, "weight_decay": 0.01}),
    "Adam fused tensor lr": ("Adam", {"fused": True, "lr": torch.tensor(0.1)}),
}
LISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam foreach": ("Adam", {"foreach": True, **ADAM_OPTIONS}),
    "AdamW": ("AdamW", ADAM_OPTIONS),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True, **ADAM_OPTIONS}),
    "SGD foreach": ("SGD", {"foreach": True, "lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1}),
    "Adagrad foreach": ("Adagrad", {"foreach": True, "lr": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 0.1, "weight_decay": 0.1}),
    "Adadelta foreach": ("Adadelta", {"foreach": True}),
    "Adafactor": ("Adafactor", {"lr": 0.1}),
    "Adafactor foreach": ("Adafactor", {"foreach": True}),
    "Adamax": ("Adamax", {"lr": 0.1}),
    "Adamax foreach": ("Adamax", {"foreach": True, "weight_decay": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1, "t0": 2.0}),
    "ASGD foreach": ("ASGD", {"foreach": True, "t0": 2.0}),
    "Muon": ("Muon", {"lr": 0.1}),
    "NAdam": ("NAdam", {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "NAdam foreach": ("NAdam", {"foreach": True}),
    "RAdam": ("RAdam", {"lr": 0.1}),
    "RAdam foreach": ("RAdam", {"foreach": True}),
    "RMSprop": ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "RMSprop foreach": ("RMSprop", {"foreach": True}),
    "Rprop": ("Rprop", {"lr": 0.1}),
    "Rprop foreach": ("Rprop", {"foreach": True}),
}
EAGER: dict[str, tuple[str, dict[str, Any]]] = {
    "LBFGS": ("LBFGS", {"lr": 0.1, "max_iter": 3}),
    "SparseAdam": ("SparseAdam", {"lr": 0.1}),
}
KINDS = FUSED | LISTED | EAGER


class Side:
    """Parameters and their optimizer, one of the two that are compared."""

    def __init__(
        self,
        kind: str,
        *,
        captured: bool,
        groups: int = 1,
        dtypes: Iterable[torch.dtype] = (torch.float32,),
        device: str = "cpu",
        graph: bool | None = None,
    ) -> None:
        self.name, options = KINDS[kind]
        self.captured = captured
        self.device, self.graph = device, graph
        self.dtypes = list(dtypes)
        self.shapes = MATRICES if self.name == "Muon" else SHAPES
        shapes = [shape for _ in self.dtypes for shape in self.shapes]
        kinds = [dtype for dtype in self.dtypes for _ in self.shapes]
        self.params = [
            new_parameter(i, shape, dtype, device)
            for i, (shape, dtype) in enumerate(zip(shapes, kinds, strict=True))
        ]
        parts = [self.params[i::groups] for i in range(groups)]
        optimizer_class: Callable[..., Optimizer] = getattr(torch.optim, self.name)
        self.optimizer = optimizer_class([{"params": part} for part in parts], **copy.deepcopy(options))
        self.scheduler: Any = None
        self.saved: Any = None
        self.log: list[Any] = []
        self._capture()

    def _capture(self) -> None:
        if self.captured:
            with warnings.catch_warnings():
                # Eager optimizers warn. test_captured_reasons checks these warnings.
                warnings.filterwarnings("ignore", "nothing is captured")
                assert capture(self.optimizer, graph=self.graph) is self.optimizer

    def goes_on_with(self, optimizer: Optimizer) -> None:
        """A copy of the optimizer, with its own copies of the parameters, takes its place."""
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.scheduler = None
        self._capture()

    def seen(self) -> Any:
        """All that a user can see: values of parameters, gradients and state, and the groups."""
        optimizer = self.optimizer
        return snapshot(
            {
                "params": [(param, param.grad) for param in self.params],
                "state": list(optimizer.state.values()),
                "state_dict": {} if self.name == "LBFGS" else optimizer.state_dict(),
                "defaults": optimizer.defaults,
                "step was called": getattr(optimizer, "_opt_called", None),
                "log": self.log,
            }
        )

    def did(self, event: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        # Otherwise only one of the two sides gets a warning that torch gives once in a process.
        torch.set_warn_always(True)
        try:
            outcome = observe(lambda: snapshot(event(self, *args, **kwargs)))
        finally:
            torch.set_warn_always(False)
        return dataclasses.replace(outcome, watched=self.seen())


class CapturedTwins:
    """Both sides; `do` makes something happen to both and compares all there is."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.plain, self.captured = (Side(kind, captured=captured, **options) for captured in (False, True))

    @classmethod
    def of(cls, plain: Side, captured: Side) -> CapturedTwins:
        twins = cls.__new__(cls)
        twins.plain, twins.captured = plain, captured
        return twins

    def do(self, event: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        expected, actual = (side.did(event, *args, **kwargs) for side in (self.plain, self.captured))
        assert_same_outcome(expected, actual)
        return expected


def new_parameter(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))


def snapshot(value: Any) -> Any:
    """Return a copy without shared memory, so that step counters in one buffer equal separate counters."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return [dense.tolist(), str(value.dtype), str(value.layout), str(value.device), value.requires_grad]
    if isinstance(value, dict):
        return {
            key if not isinstance(key, torch.Tensor) else "a tensor": snapshot(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(snapshot, value)]
    return value


# Events: actions of a user on one side.


def give_gradients(side: Side, seed: int = 0, missing: tuple[int, ...] = (), sparse: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for place, param in enumerate(side.params):
        grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        grad = grad.to_sparse() if sparse or side.name == "SparseAdam" else grad
        param.grad = None if place in missing else grad


def refill_gradients(side: Side, seed: int = 0) -> None:
    """New values where the gradients lie, as a backward leaves them that found them zeroed."""
    before = [param.grad for param in side.params]
    give_gradients(side, seed)
    for param, gradient in zip(side.params, before, strict=True):
        if gradient is not None and not (gradient.is_sparse or gradient.is_inference()):
            assert param.grad is not None
            param.grad = gradient.copy_(param.grad)


def settled_iteration(side: Side, seed: int = 0) -> Any:
    refill_gradients(side, seed)
    return step(side)


def step(side: Side) -> Any:
    if side.name == "LBFGS":
        return side.optimizer.step(loss_of(side))
    return side.optimizer.step()


def step_with_closure(side: Side, scale: float = 1.0, fails: bool = False) -> Any:
    return side.optimizer.step(loss_of(side, scale, fails))


def loss_of(side: Side, scale: float = 1.0, fails: bool = False) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        if fails:
            raise ArithmeticError("the closure failed")
        side.optimizer.zero_grad()
        loss = torch.stack([param.abs().square().sum().float() for param in side.params]).sum() * scale
        loss.backward()
        return loss.detach()

    return closure


def iteration(side: Side, seed: int = 0, missing: tuple[int, ...] = ()) -> Any:
    side.optimizer.zero_grad()
    give_gradients(side, seed, missing)
    return step(side)


def zero_grad(side: Side, set_to_none: bool = True) -> None:
    side.optimizer.zero_grad(set_to_none=set_to_none)


def add_to_gradients(side: Side) -> None:
    for param in side.params:
        if param.grad is not None:
            param.grad.add_(1)


def share_a_gradient(side: Side) -> None:
    """Two parameters of one shape, one tensor: as tied weights that were untied leave it."""
    shared = torch.ones_like(side.params[0])
    for param in side.params:
        if (param.shape, param.dtype) == (shared.shape, shared.dtype):
            param.grad = shared
    step(side)


def set_values(side: Side, group: int = 0, **values: Any) -> None:
    for name, value in values.items():
        if name in side.optimizer.param_groups[group]:
            side.optimizer.param_groups[group][name] = value


def schedule(side: Side) -> None:
    side.scheduler = lr_scheduler.StepLR(side.optimizer, step_size=1, gamma=0.5)


def schedule_step(side: Side) -> None:
    if side.scheduler is not None:
        side.scheduler.step()


def add_group(side: Side, seed: int = 7) -> None:
    added = [
        new_parameter(seed + i, shape, torch.float32, side.device) for i, shape in enumerate(side.shapes[:2])
    ]
    side.params += added
    side.optimizer.add_param_group({"params": added, "lr": 1 / 64})


def drop_last_group(side: Side) -> None:
    if len(side.optimizer.param_groups) > 1:
        for param in side.optimizer.param_groups.pop()["params"]:
            side.optimizer.state.pop(param, None)


def move_parameter_to_last_group(side: Side) -> None:
    groups = side.optimizer.param_groups
    groups[-1]["params"].append(groups[0]["params"].pop(0))


def save(side: Side) -> None:
    side.saved = copy.deepcopy(side.optimizer.state_dict())


def load(side: Side, through_file: bool = False) -> None:
    """Load the saved state, or the present state if none was saved."""
    saved = side.optimizer.state_dict() if side.saved is None else side.saved
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file)
    side.optimizer.load_state_dict(saved)


def clear_state(side: Side) -> None:
    side.optimizer.state.clear()


def forget_one_state(side: Side) -> None:
    side.optimizer.state.pop(side.params[0], None)


def swap_states(side: Side) -> None:
    """The first and the last parameter of one shape are given each other's dictionaries."""
    state = side.optimizer.state
    for first, second in itertools.combinations(state, 2):
        if side.name != "LBFGS" and first.shape == second.shape:
            state[first], state[second] = state[second], state[first]
            return


def edit_states(side: Side, how: str) -> None:
    """Each tensor in the state of the first parameter: changed in place, replaced, or given other memory."""
    if side.name == "LBFGS":
        return
    states = side.optimizer.state.get(side.params[0], {})
    for name, value in list(states.items()):
        if isinstance(value, torch.Tensor):
            other = value + 2
            if how == "in place":
                value.copy_(other)
            elif how == "replaced":
                states[name] = other
            else:
                value.data = other


def count_by_numbers(side: Side) -> None:
    """Store step counters as numbers, like states of old torch versions. torch rejects them."""
    for states in side.optimizer.state.values():
        if isinstance(states.get("step"), torch.Tensor):
            states["step"] = states["step"].item()


def move_parameters(side: Side) -> None:
    """Move the parameters' memory, but keep the objects, like sharding between steps."""
    for param in side.params:
        param.data = param.data.clone().mul_(2)


def change_dtype(side: Side, dtype: torch.dtype = torch.float64) -> None:
    """Change the dtype like `module.to(dtype)`. The optimizer state keeps its dtype."""
    for param in side.params:
        param.data = param.data.to(dtype)
        if param.grad is not None:
            param.grad.data = param.grad.data.to(dtype)


def hook_steps(side: Side) -> None:
    log = side.log
    side.optimizer.register_step_pre_hook(lambda opt, args, kwargs: log.append(("before", len(args))))
    side.optimizer.register_step_post_hook(
        lambda opt, args, kwargs: log.append(("after", snapshot(opt.param_groups[0]["params"])))
    )


def scaled(side: Side, inf: bool = False, unscaled: bool = False) -> Any:
    """Step with the attributes that a scaler sets on an optimizer that unscales itself."""
    if not getattr(side.optimizer, "_step_supports_amp_scaling", False):
        return None
    optimizer: Any = side.optimizer
    optimizer.grad_scale = None if unscaled else torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(float(inf))
    try:
        return optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def go_on_with_a_copy(side: Side, how: str) -> None:
    copied: Any = (
        copy.deepcopy(side.optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(side.optimizer))
    )
    assert not isinstance(vars(copied).get("_init_group"), type(vars(side.optimizer).get("_init_group", 0)))
    side.goes_on_with(copied)


def in_inference_mode(side: Side) -> Any:
    with torch.inference_mode():
        give_gradients(side, 5)
        return step(side)
