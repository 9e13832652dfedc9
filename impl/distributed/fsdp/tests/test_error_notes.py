"""Notes that say what helps, on errors whose texts are torch's, and warnings at the user's line."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp import FullyShardedDataParallel, PerParamPrecisionPolicy, fully_shard

pytestmark = pytest.mark.usefixtures("fake_group")


def test_copy_of_sharded_model_says_how_to_copy() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError) as caught:
        copy.deepcopy(model)
    (note,) = caught.value.__notes__
    assert all(words in note for words in ("before fully_shard", "AveragedModel", "state_dict()"))


def test_complex_flat_parameter_is_named() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors") as caught:
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    (note,) = caught.value.__notes__
    assert note.startswith("weight has torch.complex64; pass it in ignored_states")


def test_inner_module_sharded_after_outer_one_is_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        ValueError, match=r"got a Linear that is inside a FSDPSequential.* shard inner modules first"
    ):
        fully_shard(model[0])


def test_shared_module_is_refused_only_with_other_dtypes() -> None:
    policy = PerParamPrecisionPolicy(master_dtype=torch.float32)
    shared = nn.Linear(2, 2, dtype=torch.bfloat16)
    fully_shard(nn.Sequential(shared), mp_policy=policy)
    fully_shard(nn.Sequential(shared), mp_policy=policy)
    with pytest.raises(ValueError, match=r"0\.weight was sharded by an earlier call.* pass the same dtypes"):
        fully_shard(nn.Sequential(shared))


@pytest.mark.parametrize("is_outer_sharded", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_load_of_unsharded_tensors_names_function_that_shards_them(
    is_outer_sharded: bool, assign: bool
) -> None:
    model = nn.Sequential(fully_shard(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    if is_outer_sharded:
        fully_shard(model)
    whole = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    before = [param for param in model.parameters() if isinstance(param, DTensor)]
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for") as caught:
        model.load_state_dict(whole, assign=assign)
    text = str(caught.value)
    assert text.count("set_model_state_dict(") == 1
    assert ("got mixed torch" in text) is not assign
    assert [name in text for name in whole] == [True, True, is_outer_sharded, is_outer_sharded]
    assert [param for param in model.parameters() if isinstance(param, DTensor)] == before
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        model.load_state_dict({}, assign=assign)
    assert "set_model_state_dict(" not in str(caught.value)


@pytest.mark.skipif(
    torch.__version__ < "2.12.dev0", reason="the fake group of torch 2.11 fills no results of scatters"
)
def test_load_into_unsharded_model_says_to_reshard_it() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    whole = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True)
    model.unshard()
    with pytest.raises(RuntimeError, match=r"was unsharded when the load began\. First call reshard\(\)"):
        set_model_state_dict(model, whole, options=options)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(whole)
    assert "call reshard()" not in str(caught.value)
    set_model_state_dict(model, whole, options=options)
    assert model[0].weight.to_local().eq(1).all()


def test_module_that_loads_its_parameters_itself_is_loaded() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state_dict[f"{prefix}weight"])

    model = fully_shard(nn.Sequential(Own(2, 2)))
    doubled = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(doubled)
    assert torch.equal(model.state_dict()["0.weight"].to_local(), doubled["0.weight"].to_local())


def test_forward_with_buffer_on_meta_names_buffer() -> None:
    with torch.device("meta"):
        inner = nn.BatchNorm1d(2)
    model = fully_shard(nn.Sequential(inner))
    for name, param in inner.named_parameters():
        setattr(inner, name, nn.Parameter(torch.empty_like(param, device="cpu")))
    with pytest.raises(RuntimeError, match="meta") as caught:
        model(torch.ones(2, 2))
    (note,) = caught.value.__notes__
    assert note.startswith("buffers on the meta device: 0.running_mean, 0.running_var")


def test_forward_that_reads_parameters_of_inner_unit_names_it() -> None:
    attention = nn.MultiheadAttention(4, 2)
    fully_shard(attention.out_proj)
    model = fully_shard(attention)
    with pytest.raises(RuntimeError, match="got mixed torch") as caught:
        model(*[torch.ones(3, 1, 4)] * 3)
    (note,) = caught.value.__notes__
    assert note.endswith("Sharded inside FSDPMultiheadAttention: out_proj")


def test_forward_that_reads_parameters_of_inner_wrapper_names_them() -> None:
    attention = nn.MultiheadAttention(4, 2)
    attention.out_proj = _wrap(attention.out_proj)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="must be a matrix, got 1-D tensor") as caught:
        _wrap(attention)(*[torch.ones(3, 1, 4)] * 3)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "a function was called with out_proj.weight, out_proj.bias, sharded over the ranks"
    )


def test_error_inside_inner_wrapper_has_no_note() -> None:
    model = _wrap(nn.Sequential(_wrap(nn.BatchNorm1d(2))))
    with pytest.raises(RuntimeError, match="running_mean") as caught:
        model(torch.ones(2, 3))
    assert not hasattr(caught.value, "__notes__")


def _wrap(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


class Scaled(nn.Module):
    """Reads a parameter of an inner unit after its forward, or not at all."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads = fully_shard(nn.Linear(2, 2)), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        return output * self.inner.bias if self.reads else output


def test_note_on_mixed_tensors_names_attention_only_if_model_has_attention() -> None:
    with pytest.raises(RuntimeError, match="got mixed torch") as caught:
        fully_shard(Scaled(reads=True))(torch.ones(1, 2))
    (note,) = caught.value.__notes__
    assert "MultiheadAttention" not in note
    assert note.endswith("Sharded inside FSDPScaled: inner")


def test_mixed_tensors_inside_inner_unit_have_no_note() -> None:
    model = fully_shard(Scaled(reads=False))
    with pytest.raises(RuntimeError, match="got mixed torch") as caught:
        model(torch.distributed.tensor.distribute_tensor(torch.ones(1, 2), model.inner.weight.device_mesh))
    assert not hasattr(caught.value, "__notes__")


def fail(tensor: torch.Tensor) -> None:
    raise ValueError(f"got {len(tensor)} rows")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_error_of_hook_names_parameter(register: str, is_flat: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    if is_flat:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model)
    getattr(next(model.parameters()), register)(fail)
    with pytest.raises(ValueError, match="got 2 rows") as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert caught.value.__notes__ == ["raised in a hook of 0.weight"]


def test_sparse_gradient_is_named() -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"[sS]parse") as caught:
        model(torch.arange(2)).sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith("0.weight got a sparse gradient")
    assert "sparse=False" in note
    assert "ignored_params" in note


@pytest.mark.parametrize("is_detached", [True, False])
def test_functional_call_refuses_parameters_only(is_detached: bool) -> None:
    model = fully_shard(nn.Linear(2, 2, bias=False))
    weight = nn.Parameter(torch.eye(2))
    if is_detached:
        output = torch.func.functional_call(model, {"weight": weight.detach()}, torch.ones(1, 2))
        assert torch.equal(output, torch.ones(1, 2))
    else:
        with pytest.raises(TypeError, match="pass detached tensors to functional_call, not parameters"):
            torch.func.functional_call(model, {"weight": weight}, torch.ones(1, 2))


def test_hook_on_all_gradients_warns_that_sharded_parameters_have_none() -> None:
    model = fully_shard(nn.Linear(2, 2))
    calls: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], calls.append, mode="all")
    with pytest.warns(UserWarning, match="use mode='any', or register_hook for each parameter"):
        model(torch.ones(1, 2)).sum().backward()
    assert not calls


_TRAINING = """
params = list(model.parameters())
optimizer = torch.optim.SGD(params, 0.1)
for _ in range(2):
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward(inputs=[x, *params])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_flat", [False, True])
def test_step_after_backward_with_inputs_warns_at_line_of_user(is_flat: bool) -> None:
    model: Any = nn.Linear(2, 2)
    if is_flat:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(_TRAINING, "/home/user/train.py", "exec"), {"model": model, "torch": torch})
    (warning,) = [entry for entry in caught if "call loss.backward()" in str(entry.message)]
    assert (warning.filename, warning.lineno) == ("/home/user/train.py", 6)


class _Branches(nn.Module):
    def __init__(self, use_orig_params: bool) -> None:
        super().__init__()
        options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        self.used = FullyShardedDataParallel(nn.Linear(2, 2), **options)
        self.unused = FullyShardedDataParallel(nn.Linear(2, 2), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("is_before_backward", [False, True])
def test_step_of_unused_unit_does_not_warn(use_orig_params: bool, is_before_backward: bool) -> None:
    branches = _Branches(use_orig_params)
    model = FullyShardedDataParallel(branches, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(branches.unused.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            output = model(torch.ones(1, 2))
            if is_before_backward:
                optimizer.step()
            else:
                output.sum().backward()
                optimizer.step()
