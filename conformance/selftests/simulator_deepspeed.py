"""DeepSpeed's ZeRO-3, as a script for the simulator: `simulator_deepspeed.py [MISTAKE]`.

The installed package runs, with its CUDA accelerator under the names of the device. With `early`, gradients are copied
before they are computed. With `unfinished`, the optimizer does not wait for the reduced gradients.
"""

import inspect
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from conformance.simulator.rewriting import rewritten

os.environ["DS_ACCELERATOR"] = "cpu"
logging.disable()
warnings.simplefilter("ignore")
import deepspeed  # noqa: E402
from deepspeed.accelerator import cuda_accelerator, set_accelerator  # noqa: E402
from deepspeed.runtime.zero import stage3  # noqa: E402

WAITS = {
    "early": "self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())",
    "unfinished": "self.reduce_and_partition_stream.synchronize() for param_id in self.params_already_reduced.keys():",
}
LEFT_OUT = {
    "early": "pass",
    "unfinished": "pass\n        for param_id in self.params_already_reduced.keys():",
}


def accelerator_of_device() -> object:
    source = inspect.getsource(cuda_accelerator).replace("import torch.cuda", "import torch")
    for name, replacement in {"cuda": "sim", "nccl": "simccl"}.items():
        source = source.replace(f"torch.{name}", f"torch.{replacement}").replace(
            f"'{name}'", f"'{replacement}'"
        )
        source = source.replace(f"{name}:", f"{replacement}:").replace(f'"{name}"', f'"{replacement}"')
    names = {"__name__": "sim_accelerator", "__package__": "deepspeed.accelerator"}
    exec(compile(source, "sim_accelerator.py", "exec"), names)
    # The device has no compute capability, from which DeepSpeed decides whether halves are supported.
    names["CUDA_Accelerator"].is_fp16_supported = lambda self: True
    return names["CUDA_Accelerator"]()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


for mistake in sys.argv[1:]:
    rewritten(stage3, "DeepSpeedZeroOptimizer_Stage3", (WAITS[mistake], LEFT_OUT[mistake])).start()
set_accelerator(accelerator_of_device())
dist.init_process_group("simccl")
rank = dist.get_rank()
torch.accelerator.set_device_index(rank)
deepspeed.init_distributed("simccl", dist_init_required=False)
torch.manual_seed(0)
layers = nn.Sequential(*(Layer() for _ in range(4)))
zero = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
zero |= {"stage3_prefetch_bucket_size": 80, "stage3_max_live_parameters": 100}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": zero,
}
engine, *_ = deepspeed.initialize(
    model=layers, optimizer=torch.optim.SGD(layers.parameters(), 0.5), config=config
)
for _ in range(3):
    loss = engine(torch.randn(4, 8).to(torch.device("sim", rank))).square().mean()
    engine.backward(loss)
    engine.step()
torch.save([parameter.ds_tensor.detach() for parameter in layers.parameters()], f"model{rank}.pt")
dist.destroy_process_group()
