"""`overlapped_step` with parameters on the host, compared bit for bit with `fused_step` after the backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from conformance.distributed.fsdp.scenes.scene import Scene, raise_in_backward, tried
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins
from conformance.judge.clauses import clause
from conformance.judge.sandbox import seeding

LAYOUTS = ("fully_shard", "original", "flat", "no_shard")
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: AdamW(params, lr=0.125, weight_decay=0.25),
    "amsgrad": lambda params: AdamW(params, lr=0.125, amsgrad=True),
    "momentum": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "adagrad": lambda params: Adagrad(params, lr=0.125),
}
# A step clips far below the norm of a unit or slightly below the norm of all, or has inf in the gradients of one rank,
# or runs two backwards, or changes the gradients after the backward.
GOOD, CLIPPED, BARELY, INF, TWICE = "good", "clipped", "barely clipped", "inf", "twice"
HALVED, UNSCALED = "halved", "unscaled"
PLANS: dict[str, Sequence[str]] = {
    "good": [GOOD] * 3,
    "clipped": [GOOD, GOOD, CLIPPED, CLIPPED, GOOD, GOOD],
    "barely": [GOOD, GOOD, BARELY, GOOD, GOOD],
    "inf": [GOOD, GOOD, INF, GOOD, GOOD],
    "twice": [GOOD, GOOD, TWICE, GOOD],
    "changed": [GOOD, GOOD, HALVED, GOOD, UNSCALED, GOOD],
}
SCALERS = ["amp.GradScaler", "distributed.fsdp.ShardedGradScaler"]
# Afterwards the program may change parameters.
HALVED_PARAMS, FROZEN, EVALUATED, LOADED, ROUNDED, HOOKED, ALIASED = (
    "halved",
    "biases frozen and halved",
    "evaluated with others",
    "loaded",
    "rounded",
    "halved by a hook after each step",
    "halved through tensors with version counters of their own",
)


def offloaded(scene: Scene, layout: str, param_dtype: torch.dtype | None) -> nn.Module:
    """Return a model with parameters on the host, sharded by `layout`."""
    seeding.seed_all()
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))
    if layout == "fully_shard":
        options = {
            "mesh": scene.rank.mesh(scene.rank.world_size),
            "offload_policy": scene.api.CPUOffloadPolicy(),
            "mp_policy": scene.api.MixedPrecisionPolicy(param_dtype=param_dtype),
        }
        for layer in (model[0], model[2], model[4], model):
            scene.api.fully_shard(layer, **options)
        return model
    return scene.wrap(
        model,
        strategy="NO_SHARD" if layout == "no_shard" else "FULL_SHARD",
        units=[nn.Linear],
        use_orig_params=layout == "original",
        cpu_offload=scene.api.CPUOffload(offload_params=True),
        mixed_precision=scene.api.MixedPrecision(param_dtype=param_dtype),
    )


def inputs(scene: Scene, step: int, number: int = 0) -> torch.Tensor:
    seed = 100 * step + 10 * number + scene.rank.rank
    return torch.randn(4, 5, generator=seeding.generator(seed)).to(scene.rank.device)


class Run:
    """A sharded model, its optimizer and its scaler."""

    def __init__(
        self,
        scene: Scene,
        layout: str,
        optimizer: str,
        scaler: str,
        enabled: bool = True,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self.scene, self.layout, self.model = scene, layout, offloaded(scene, layout, param_dtype)
        self.optimizer: Optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = scene.library.find(scaler)(
            scene.rank.device.type, init_scale=1024.0, growth_interval=2, enabled=enabled
        )

    def loss(self, step: int, number: int = 0) -> torch.Tensor:
        return self.scaler.scale(self.model(inputs(self.scene, step, number)).square().mean())

    def backward(self, step: int, outcome: str, loss: torch.Tensor | None) -> None:
        loss = self.loss(step) if loss is None else loss
        (loss * math.inf if outcome == INF and self.scene.rank.rank == 0 else loss).backward()
        if outcome == TWICE:
            self.loss(step, 1).backward()
        elif outcome == HALVED:
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        elif outcome == UNSCALED:
            self.scaler.unscale_(self.optimizer)

    def is_native(self) -> bool:
        """Return whether the C library made the last step. Without it nothing is updated early."""
        return any(param.backend == "native" for param in self.scaler.explain(self.optimizer).parameters)

    def state(self) -> dict[str, str]:
        """Return all bits of this rank's parameters and states."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        tensors: dict[str, Any] = dict(self.model.named_parameters())
        for param, state in self.optimizer.state.items():
            tensors |= {f"{key} of {names[id(param)]}": value for key, value in state.items()}
        own = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}
        return {name: str(tensor.detach().tolist()) for name, tensor in own.items()}

    def change_params(self, change: str) -> list[float]:
        """Change the parameters, or evaluate with others for a while. Return the outputs of the evaluation."""
        if change == HALVED_PARAMS:
            self._halve_params()
        elif change == HOOKED:
            self.optimizer.register_step_post_hook(lambda *_: self._halve_params())
        elif change == ALIASED:
            self._halve_aliases()
        elif change == ROUNDED:
            self.model.to(torch.float16)
            self.model.to(torch.float32)
        elif change == FROZEN:
            for name, param in self.model.named_parameters():
                if name.endswith("bias"):
                    param.requires_grad_(False).mul_(0.5)
        elif change == LOADED:
            self.model.load_state_dict({key: value * 2 for key, value in self.model.state_dict().items()})
        elif change == EVALUATED:
            # A write to `.data` does not change the version of the tensor.
            shards = [getattr(param, "_local_tensor", param).data for param in self.model.parameters()]
            torch._foreach_mul_(shards, 2)
            with torch.no_grad():
                outputs = self.model(inputs(self.scene, 0))
            torch._foreach_mul_(shards, 0.5)
            return outputs.flatten().tolist()
        return []

    def _halve_params(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.5)

    def _halve_aliases(self) -> None:
        if self.layout == "fully_shard":
            for shard in self.model.state_dict().values():
                shard.to_local().mul_(0.5)
            return
        with self.scene.fsdp.summon_full_params(self.model):
            for param in self.model.parameters():
                param.data.mul_(0.5)


def train(
    scene: Scene, *, layout: str, optimizer: str, scaler: str, plan: Sequence[str], enabled: bool = True
) -> Any:
    """Train with `fused_step` and with `overlapped_step`.

    Return for each step the results of both, and the numbers of elements that were updated early and again. Return
    also whether updates can be early.
    """
    count = plan.index(BARELY) + 1 if BARELY in plan else 0
    norms = [norm for norm, *_ in _steps(Run(scene, layout, optimizer, scaler, enabled), [GOOD] * count, 0.0)]
    limit = 0.9999 * norms[-1] if norms else 0.0
    plain = _steps(Run(scene, layout, optimizer, scaler, enabled), plan, limit)
    run = Run(scene, layout, optimizer, scaler, enabled)
    overlapped = _steps(run, plan, limit, overlaps=True)
    return plain, overlapped, run.is_native()


def _steps(run: Run, plan: Sequence[str], limit: float, *, overlaps: bool = False) -> list[Any]:
    results: list[Any] = []
    for step, outcome in enumerate(plan):
        max_norm = {CLIPPED: 1e-4, BARELY: limit}.get(outcome, (math.inf, 1e300)[step % 2])
        run.optimizer.zero_grad()
        # The first loss is scaled inside the region.
        loss = run.loss(step) if step else None
        numels: tuple[int, int] = (0, 0)
        if overlaps:
            with run.scaler.overlapped_step(run.optimizer, max_norm) as result:
                run.backward(step, outcome, loss)
            norm, numels = result.norm, (result.early_numel, result.repeated_numel)
        else:
            run.backward(step, outcome, loss)
            norm = run.scaler.fused_step(run.optimizer, max_norm)
        results.append((norm.item(), run.scaler.get_scale(), run.state(), numels))
    return results


def elements(run_state: dict[str, str]) -> int:
    return sum(value.count(",") + (value != "[]") for name, value in run_state.items() if " of " not in name)


def assert_same_bits(report: Any) -> None:
    plain, overlapped, _ = report
    for step, (expected, actual) in enumerate(zip(plain, overlapped, strict=True)):
        assert repr(actual[:2]) == repr(expected[:2]), f"norm and scale after step {step}"
        assert actual[2] == expected[2], f"parameters and states after step {step}"


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.as_fused_step")
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(name, marks=FULL_PROFILE) for name in OPTIMIZERS if name != "adamw")],
)
def test_overlapped_step_has_bits_of_fused_step(twins: Twins, layout: str, plan: str, optimizer: str) -> None:
    for scaler in SCALERS if plan == "barely" else SCALERS[1:]:
        arguments = {"layout": layout, "optimizer": optimizer, "scaler": scaler, "plan": PLANS[plan]}
        for report in twins.values(train, **arguments):
            assert_same_bits(report)


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.as_fused_step")
def test_overlapped_step_of_disabled_scaler_has_bits_of_fused_step(twins: Twins) -> None:
    arguments = {"layout": "fully_shard", "optimizer": "adamw", "scaler": SCALERS[0], "enabled": False}
    for report in twins.values(train, plan=[GOOD, GOOD, CLIPPED, GOOD], **arguments):
        assert_same_bits(report)


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.early")
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("layout", ["fully_shard", "original"])
def test_update_is_early_unless_last_step_was_clipped_or_skipped(
    twins: Twins, layout: str, plan: str
) -> None:
    """The first step has no states yet, so it updates nothing early."""
    outcomes = PLANS[plan]
    arguments = {"layout": layout, "optimizer": "adamw", "scaler": SCALERS[1], "plan": outcomes}
    for _, overlapped, can_be_early in twins.values(train, **arguments):
        for step, (_, _, state, (early, repeated)) in enumerate(overlapped):
            before = outcomes[step - 1] if step else None
            if not can_be_early or step == 0 or before in (CLIPPED, BARELY, INF, UNSCALED):
                assert (early, repeated) == (0, 0), f"step {step}"
            elif outcomes[step] == GOOD:
                assert (early, repeated) == (elements(state), 0), f"step {step}"
            elif outcomes[step] == BARELY:
                assert (early, repeated) == (0, elements(state)), f"step {step}"
            elif outcomes[step] != HALVED:  # the last units arrive after the region's other code
                assert early == 0, f"step {step}"


def failing(scene: Scene, *, layout: str, where: str) -> Any:
    """Make the third step fail.

    Return the error, the states before and after it, and what a fourth step makes of them and of a run without it.
    """
    run, other = (Run(scene, layout, "adamw", SCALERS[1]) for _ in range(2))
    for step in range(2):
        for trainer in (run, other):
            trainer.optimizer.zero_grad()
            with trainer.scaler.overlapped_step(trainer.optimizer):
                trainer.loss(step).backward()
    before = run.state()
    run.optimizer.zero_grad()

    def fail() -> None:
        with run.scaler.overlapped_step(run.optimizer):
            loss = run.loss(2)
            if where == "backward":
                first = next(module for module in run.model.modules() if isinstance(module, nn.Tanh))
                with first.register_forward_hook(raise_in_backward):
                    loss = run.loss(2)
            (loss * math.inf if where == "fused_step" else loss).backward()
            if where == "step":
                run.optimizer.step()
            if where == "fused_step":
                run.scaler.fused_step(run.optimizer)
            if where == "region":
                run.scaler.overlapped_step(run.optimizer).__enter__()
            raise KeyError("after the backward")

    error = tried(fail)
    after = run.state()
    for trainer in (run, other):
        trainer.optimizer.zero_grad()
        with trainer.scaler.overlapped_step(trainer.optimizer):
            trainer.loss(3).backward()
    return error, before, after, run.state(), other.state()


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.undone")
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("backward", "amid the backward"),
        ("end", "after the backward"),
        ("step", "stepped inside of overlapped_step()"),
        ("fused_step", "stepped inside of overlapped_step()"),
        ("region", "inside of another overlapped_step()"),
    ],
)
@pytest.mark.parametrize("layout", ["fully_shard", "original"])
def test_exception_in_region_undoes_updates(twins: Twins, layout: str, where: str, text: str) -> None:
    for error, before, after, state, expected in twins.values(failing, layout=layout, where=where):
        assert text in error
        assert after == before, "parameters and states after the exception"
        assert state == expected, "parameters and states after the next step"


def refused(scene: Scene, *, layout: str) -> Any:
    """Return the errors of two regions for an unsupported optimizer, and the early elements of a step after them."""
    run = Run(scene, layout, "adamw", SCALERS[1])
    for step in range(3):
        run.optimizer.zero_grad()
        with run.scaler.overlapped_step(run.optimizer) as result:
            run.loss(step).backward()
        if step == 1:
            mesh = scene.rank.mesh(scene.rank.world_size)
            partial = DTensor.from_local(torch.ones(2, device=scene.rank.device), mesh, [Partial()])
            unsupported = AdamW([*run.model.parameters(), nn.Parameter(partial)])
            errors = [tried(run.scaler.overlapped_step(unsupported).__enter__) for _ in range(2)]
    return errors, result.early_numel, elements(run.state()) if run.is_native() else 0


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.undone")
@pytest.mark.parametrize("layout", ["fully_shard", "original"])
def test_refused_region_leaves_model_free_for_others(twins: Twins, layout: str) -> None:
    for errors, early, count in twins.values(refused, layout=layout):
        assert all("a DTensor with partial sums" in error for error in errors), errors
        assert early == count


def train_with_casts(scene: Scene, *, layout: str, plan: Sequence[str], changes: dict[int, str]) -> Any:
    """Train with `fused_step`, and with `overlapped_step(cast_params=True)`, in bfloat16. Return the results of both.

    Args:
        changes: what happens to the parameters after the step with this number.
    """
    results: list[Any] = []
    for overlaps in (False, True):
        run = Run(scene, layout, "adamw", SCALERS[1], param_dtype=torch.bfloat16)
        results.append([])
        for step, outcome in enumerate(plan):
            run.optimizer.zero_grad()
            max_norm = 1e-4 if outcome == CLIPPED else math.inf
            if overlaps:
                with run.scaler.overlapped_step(run.optimizer, max_norm, cast_params=True) as result:
                    run.backward(step, outcome, None)
                norm = result.norm
            else:
                run.backward(step, outcome, None)
                norm = run.scaler.fused_step(run.optimizer, max_norm)
            state = run.state()
            results[-1].append((norm.item(), run.change_params(changes.get(step, "")), state))
    return results


@clause("distributed.fsdp.sharded_grad_scaler.overlapped_step.cast_params")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        pytest.param("good", {1: HALVED_PARAMS, 2: HALVED_PARAMS}, id="written"),
        pytest.param("good", {1: FROZEN}, id="frozen"),
        pytest.param("good", {1: HOOKED}, id="hooked"),
        pytest.param("good", {1: ROUNDED, 2: ROUNDED}, id="rounded"),
        pytest.param("good", {1: ALIASED, 2: ALIASED}, id="aliased"),
        pytest.param("good", {1: EVALUATED, 2: EVALUATED}, id="evaluated"),
        pytest.param("good", {1: LOADED, 2: LOADED}, id="loaded"),
        *(pytest.param(plan, {}, id=plan) for plan in PLANS if plan != "barely"),
    ],
)
def test_next_iterations_compute_with_stepped_parameters(
    twins: Twins, layout: str, plan: str, changes: dict[int, str]
) -> None:
    arguments = {"layout": layout, "plan": [*PLANS[plan], GOOD], "changes": changes}
    for plain, with_casts in twins.values(train_with_casts, **arguments):
        for step, (expected, actual) in enumerate(zip(plain, with_casts, strict=True)):
            assert repr(actual) == repr(expected), (
                f"norm, evaluation, and parameters and states in step {step}"
            )
