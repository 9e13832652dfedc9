"""Trees of modules for sharding: nested, shared, frozen, unused, called twice, too small for the ranks."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.module_trees import FORMS, INPUT_FORMS, Leaf, ModuleGroup, ModuleTree

KINDS = ("affine", "linear", "normed", "batched", "lookup", "scaled", "tied", "idle")
CHECKPOINTING = ("none", "none", "plain")


# Widths begin at 2, because torch accumulates the gradients of a one-element unit wrongly, which other tests cover.
@st.composite
def leaves(draw: st.DrawFn, *, frozen: tuple[str, ...] = ("none",), kinds: tuple[str, ...] = KINDS) -> Leaf:
    return Leaf(draw(st.sampled_from(kinds)), draw(st.integers(2, 5)), draw(st.sampled_from(frozen)))


def groups(
    parts: st.SearchStrategy[Leaf | ModuleGroup], checkpointing: tuple[str, ...], forms: tuple[str, ...]
) -> st.SearchStrategy[ModuleGroup]:
    return st.builds(
        ModuleGroup,
        parts=st.lists(parts, min_size=1, max_size=3).map(tuple),
        kind=st.sampled_from(["chain", "chain", "branches"]),
        calls=st.sampled_from([1, 1, 1, 2]),
        form=st.sampled_from(forms),
        checkpointing=st.sampled_from(checkpointing),
    )


@st.composite
def module_trees(
    draw: st.DrawFn,
    *,
    frozen: tuple[str, ...] = ("none",),
    kinds: tuple[str, ...] = KINDS,
    checkpointing: tuple[str, ...] = CHECKPOINTING,
    forms: tuple[str, ...] = FORMS,
    input_forms: tuple[str, ...] = INPUT_FORMS,
    heads: tuple[str, ...] = ("trained",),
    dtype: torch.dtype = torch.float64,
) -> ModuleTree:
    leaf = leaves(frozen=frozen, kinds=kinds)
    inner = groups(leaf, checkpointing, forms)
    return ModuleTree(
        body=draw(groups(st.one_of(leaf, leaf, inner), checkpointing, forms)),
        takes=draw(st.sampled_from(input_forms)),
        returns=draw(st.sampled_from(forms)),
        dtype=dtype,
        seed=draw(st.integers(0, 50)),
        head=draw(st.sampled_from(heads)),
    )
