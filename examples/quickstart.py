"""The lines of Megatron's quickstart, and ten more that train.

python examples/quickstart.py
torchrun --standalone --nproc-per-node 2 examples/quickstart.py      # two tensor-parallel ranks: the same losses
"""

import torch

from core import parallel_state
from core.data_parallel import DataParallel
from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.models.gpt.gpt_model import GPTModel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.training.log.console import errors_as_one_line
from core.transformer.transformer_config import TransformerConfig


def main(tensor_ranks: int = 1) -> list[float]:
    """Overfit one batch; the losses, the same on every rank."""
    ps = parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_ranks)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=64)

    optimizer = ShardedAdamW(DataParallel(model, ps), OptimizerConfig(lr=1e-2))
    text = torch.randint(100, (4, 65), generator=torch.Generator().manual_seed(0)).to(ps.device)
    losses = []
    for step in range(20):
        loss = model(text[:, :-1], labels=text[:, 1:]).mean()  # [b, s] losses, one per token
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if ps.rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2d}  loss {losses[-1]:.4f}")
    parallel_state.destroy_model_parallel()
    return losses


if __name__ == "__main__":
    with errors_as_one_line(), parallel_state.launch():
        main(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
