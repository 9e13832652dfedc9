"""Call every launcher with a replacement for CUDA's driver. Launched kernels are compiled for sm_90 and not run.

Run this as a program, in a process where TRITON_INTERPRET is not set. It prints one JSON object.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from conformance.gpu.update_bounds import EACH, states_of
from impl.kernels import RULES, Parameters, Rule, TensorList
from impl.kernels._triton import rules
from impl.kernels._triton.clamp import clamp_kernel, launch_clamp
from impl.kernels._triton.fused_step import launch_fused_step
from impl.kernels._triton.norm import launch_norm, launch_step_norm
from impl.kernels._triton.scale import launch_clip, launch_scale
from impl.kernels._triton.unscale import launch_unscale
from impl.kernels.rules import AdagradRule, AdamRule, SGDRule


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


def _step(rule: Rule, states: int, dtype: torch.dtype, copies: torch.dtype | None, found_inf: Any) -> bool:
    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(5, dtype=dtype)]

    parameters = Parameters(
        tensors(dtype),
        [tensors(dtype) for _ in range(states)],
        [torch.ones(())],
        tensors(copies) if copies else [],
    )
    return launch_fused_step(
        rule, parameters, TensorList(tensors(copies or dtype)), torch.ones(()), found_inf
    )


def launch_all() -> bool:
    """Whether every launcher took what it was given."""
    tensors = TensorList([torch.zeros(5), torch.zeros(7, dtype=torch.bfloat16)])
    scale, flag, norm_T = torch.ones(()), torch.zeros(()), torch.zeros(2, dtype=torch.float64)
    adam = AdamRule(torch.ones(()), 0.9, 0.999, 1e-8, 0.1, amsgrad=True, maximize=False, decoupled=True)
    sgd = SGDRule(0.1, 0.5, 0.0, 0.1, nesterov=True, maximize=False, is_first_step=True)
    return all((
        launch_unscale(tensors, scale, flag, is_inverse=True),
        launch_unscale(tensors, scale, flag, is_inverse=False),
        launch_scale(tensors, scale),
        launch_clip(tensors, 1.0, scale),
        launch_clamp(tensors, -1.0, 1.0),
        launch_norm(tensors, 2.0, torch.bfloat16) is not None,
        launch_norm(tensors, 2.0, torch.float32, flag, norm_T) is not None,
        launch_step_norm(tensors, 2.0, torch.float32, scale, 1.0, norm_T) is not None,
        _step(adam, 3, torch.float32, torch.bfloat16, flag),
        _step(sgd, 1, torch.float16, None, None),
        _step(AdagradRule(0.1, 0.5, 1e-8, 0.0, maximize=True), 1, torch.float32, None, flag),
        *(_step(rule, states_of(rule), torch.float32, None, flag) for rule in EACH),
    ))  # fmt: skip


def launches_with_other_numbers() -> int:
    """Return how many kernels are compiled when only the numbers of a compiled launch change."""
    tensors, flag = TensorList([torch.zeros(5)]), torch.zeros(())

    def launch(number: float) -> None:
        rule = AdamRule(number, number, number, number, number, amsgrad=False, maximize=False, decoupled=True)
        assert _step(rule, 2, torch.float32, None, flag)
        sgd = SGDRule(number, number, number, number, nesterov=False, maximize=False)
        assert _step(sgd, 1, torch.float32, None, flag)
        assert _step(
            AdagradRule(number, number, number, number, maximize=False), 1, torch.float32, None, flag
        )
        assert launch_clamp(tensors, -number, number)

    def binaries() -> int:
        kernels = (
            *(getattr(rules, rule.KERNELS.triton) for rule in RULES),
            clamp_kernel,
        )
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    launch(0.5)
    before = binaries()
    assert before >= 5, before
    for number in (1.0, 2.0, 16.0, 1e-30):
        launch(number)
    return binaries() - before


def main() -> None:
    driver.set_active(_Driver())
    real, launched = JITFunction.run, []

    def compile_only(self: Any, *args: Any, warmup: bool, **more: Any) -> Any:
        launched.append(self.fn.__name__)
        return real(self, *args, warmup=True, **more)

    JITFunction.run = compile_only
    assert launch_all(), "a launcher refused"
    names = [*launched]
    json.dump({"launched": names, "compiled_again": launches_with_other_numbers()}, sys.stdout)


if __name__ == "__main__":
    main()
