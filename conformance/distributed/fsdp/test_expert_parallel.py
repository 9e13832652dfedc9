"""A mixture of experts: the experts over one dimension of a mesh, all other parameters over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.distributed.fsdp.scenes.scaler_programs import EACH_SCALER
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import TwinsOf, each
from conformance.judge.clauses import clause
from conformance.judge.sandbox import seeding

EXPERTS, WIDTH, TOKENS, STEPS, RANKS, MAX_NORM = 4, 8, 6, 4, 4, 0.3


class SumOverGroup(torch.autograd.Function):
    """Sum over a group, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return SumOverGroup.apply(grads[0].contiguous(), ctx.group), None


class Experts(nn.Module):
    """Linear layers, mixed for each token. With a group, each of its ranks has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.group: Any = None

    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """Return [tokens, WIDTH] for tokens of this shape and gates [tokens, EXPERTS]."""
        if self.group is None:
            return self.mixed(tokens, gates, self.weight)
        local: Any = self.weight
        weight = local.to_local()
        rank, size, count = self.group.rank(), self.group.size(), len(tokens)
        own = slice(rank * count, (rank + 1) * count)
        # Each rank fills its own rows, so the sum has the tokens of all ranks of the group.
        rows = torch.cat([tokens, gates], 1)
        padded = F.pad(rows, (0, 0, own.start, (size - 1) * count - own.start))
        tokens, gates = SumOverGroup.apply(padded, self.group).split([WIDTH, EXPERTS], 1)
        local_gates = gates.chunk(size, 1)[rank]
        return SumOverGroup.apply(self.mixed(tokens, local_gates, weight), self.group)[own].clone()

    @staticmethod
    def mixed(tokens: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("td,edh,te->th", tokens, weight, gates)


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.router(tokens)
        chosen = torch.zeros_like(logits).scatter(1, logits.detach().topk(2).indices, 1.0)
        return tokens + self.experts(tokens, chosen * logits.softmax(1))


def build() -> nn.Sequential:
    seeding.seed_all()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), ExpertBlock(), ExpertBlock())


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    tokens, targets = torch.randn(2, TOKENS, WIDTH, generator=seeding.generator(10 * step + rank)).to(device)
    return F.mse_loss(model(tokens), targets)


def unsharded_curve() -> list[float]:
    """Return the loss and the norm of each step."""
    model, curve = build(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, step, rank) for rank in range(RANKS)]).mean()
        loss.backward()
        curve += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()]
        optimizer.step()
    return curve


def sharded_curve(scene: Scene, *, scaler: str, in_one_call: bool) -> list[float]:
    """Return the loss over all ranks and the norm of each step, with experts over their own dimension of the mesh."""
    mesh = scene.rank.mesh(2, 2, names=("data", "expert"))
    all_ranks, model = scene.rank.mesh(RANKS), build().to(scene.rank.device)
    for block in [*model][1:]:
        experts: Any = block.experts
        weight = distribute_tensor(experts.weight.detach(), mesh["expert"], [Shard(0)])
        experts.weight, experts.group = nn.Parameter(weight), mesh.get_group("expert")
        scene.shard(experts, mesh=mesh["data"])
        # The average is over all ranks' tokens. Its sum over the experts' ranks is in the backward.
        experts.set_gradient_divide_factor(float(RANKS))
        experts.set_force_sum_reduction_for_comms(True)
        scene.shard(block, mesh=all_ranks)
    scene.shard(model, mesh=all_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, foreach=False)
    its_scaler = scene.library.find(scaler)(scene.rank.device.type, init_scale=1024.0)
    curve: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, scene.rank.rank, scene.rank.device)
        its_scaler.scale(loss).backward()
        norm = step_of(scene, its_scaler, optimizer, model, in_one_call)
        mean = loss.detach() / RANKS
        dist.all_reduce(mean)
        curve += [mean.item(), norm.item()]
    return curve


def step_of(scene: Scene, scaler: Any, optimizer: Any, model: nn.Module, in_one_call: bool) -> Tensor:
    """Clip and step, by `fused_step` or by unscale_, clip_grad_norm_, step and update. Return the norm."""
    if in_one_call:
        return scaler.fused_step(optimizer, MAX_NORM)
    scaler.unscale_(optimizer)
    norm = scene.library.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@clause("nn.utils.clip_grad.clip_grad_norm_.mixed_meshes")
@pytest.mark.deviation("clip_grad.mixed_meshes")
@EACH_SCALER
def test_experts_train_like_unsharded(plain_twins_of: TwinsOf, device: str, scaler: str) -> None:
    expected = pytest.approx(unsharded_curve(), rel=1e-4)
    plain_twins_of(RANKS, device).deviate(
        sharded_curve,
        scaler=scaler,
        in_one_call=False,
        torch_does=lambda outcomes: all("same mesh" in str(outcome.raised) for outcome in outcomes),
        we_do=each(lambda curve: curve == expected),
    )


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.several_meshes")
@EACH_SCALER
def test_experts_train_by_fused_steps_like_unsharded(
    plain_twins_of: TwinsOf, device: str, scaler: str
) -> None:
    curves = plain_twins_of(RANKS, device).values(sharded_curve, scaler=scaler, in_one_call=True)
    assert curves == [pytest.approx(unsharded_curve(), rel=1e-4)] * RANKS
