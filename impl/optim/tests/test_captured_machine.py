"""A captured optimizer and a plain one in lockstep: whatever happens, in any order, they stay the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_twins import KINDS, CapturedTwins

DTYPES = st.sampled_from(
    [(torch.float32,), (torch.float64, torch.float32), (torch.bfloat16, torch.float32), (torch.complex64,)]
)
SEEDS = st.integers(0, 3)
MISSING = st.sets(st.integers(0, 5), max_size=3).map(lambda places: tuple(sorted(places)))
VALUES: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("lr"), st.sampled_from([0.0, 0.1, 1, torch.tensor(0.1)])),
    st.tuples(st.just("betas"), st.sampled_from([(0.5, 0.6), (0.0, 0.9)])),
    st.tuples(st.just("momentum"), st.sampled_from([0, 0.0, 0.5])),
    st.tuples(
        st.sampled_from(["weight_decay", "dampening", "lr_decay", "eps", "alpha", "rho"]),
        st.sampled_from([0.0, 0.5]),
    ),
    st.tuples(st.sampled_from(["maximize", "nesterov", "amsgrad", "centered", "capturable"]), st.booleans()),
    st.tuples(st.sampled_from(["foreach", "fused"]), st.sampled_from([None, True, False])),
)


class Lockstep(RuleBasedStateMachine):
    twins: CapturedTwins

    @initialize(kind=st.sampled_from(sorted(KINDS)), groups=st.integers(1, 2), dtypes=DTYPES)
    def begin(self, kind: str, groups: int, dtypes: tuple[torch.dtype, ...]) -> None:
        self.twins = CapturedTwins(kind, groups=1 if kind == "LBFGS" else groups, dtypes=dtypes)

    @rule(seed=SEEDS, missing=MISSING)
    def iteration(self, seed: int, missing: tuple[int, ...]) -> None:
        self.twins.do(on.iteration, seed, missing)

    @rule(count=st.integers(2, 3))
    def iterations(self, count: int) -> None:
        """Repeat iterations, because a graph is replayed after two equal steps."""
        for seed in range(count):
            self.twins.do(on.iteration, seed)

    @rule()
    def step(self) -> None:
        self.twins.do(on.step)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.twins.do(on.zero_grad, set_to_none)

    @rule(seed=SEEDS, missing=MISSING, sparse=st.booleans())
    def give_gradients(self, seed: int, missing: tuple[int, ...], sparse: bool) -> None:
        self.twins.do(on.give_gradients, seed, missing, sparse)

    @rule(scale=st.sampled_from([0.5, 1.0]), fails=st.booleans())
    def step_with_closure(self, scale: float, fails: bool) -> None:
        self.twins.do(on.step_with_closure, scale, fails)

    @rule(value=VALUES)
    def set_value(self, value: tuple[str, Any]) -> None:
        self.twins.do(on.set_values, **dict([value]))

    @rule(how=st.sampled_from(["in place", "replaced", "moved"]))
    def edit_states(self, how: str) -> None:
        self.twins.do(on.edit_states, how)

    @rule(through_file=st.booleans())
    def load(self, through_file: bool) -> None:
        self.twins.do(on.load, through_file)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def go_on_with_a_copy(self, how: str) -> None:
        self.twins.do(on.go_on_with_a_copy, how)

    @rule(inf=st.booleans(), unscaled=st.booleans())
    def scaled(self, inf: bool, unscaled: bool) -> None:
        self.twins.do(on.scaled, inf, unscaled)

    @rule(
        event=st.sampled_from(
            [
                on.add_group,
                on.drop_last_group,
                on.move_parameter_to_last_group,
                on.save,
                on.clear_state,
                on.forget_one_state,
                on.swap_states,
                on.move_parameters,
                on.add_to_gradients,
                on.share_a_gradient,
                on.hook_steps,
                on.schedule,
                on.schedule_step,
            ]
        )
    )
    def happens(self, event: Any) -> None:
        self.twins.do(event)


@pytest.mark.deadline(280)
def test_any_sequence_of_events() -> None:
    run_state_machine_as_test(Lockstep)
