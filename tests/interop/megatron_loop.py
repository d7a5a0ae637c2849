"""A training script in Megatron's words: what its QuickStart does, over tensor and data ranks."""

from functools import partial

import torch
from torch.utils.data import DataLoader

from core.interop.megatron import dist_checkpointing
from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from core.interop.megatron.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from core.interop.megatron.datasets.utils import compile_helpers
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.tensor_parallel.random import model_parallel_cuda_manual_seed
from core.interop.megatron.tokenizers import MegatronTokenizer
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.interop.megatron.utils import get_batch_on_this_cp_rank

S, ROWS = 16, 4


def batches():
    compile_helpers()
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=60)
    config = GPTDatasetConfig(random_seed=0, sequence_length=S, tokenizer=tokenizer, create_attention_mask=True)
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, None, None], lambda: True, config).build()
    dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for batch in DataLoader(train, batch_size=ROWS):
        mine = slice(rank * ROWS // dp, (rank + 1) * ROWS // dp)
        yield {name: value[mine] for name, value in batch.items()}


def forward_step(iterator, model):
    batch = get_batch_on_this_cp_rank(next(iterator))

    def loss_func(mask, losses):
        loss = (losses.view(-1) * mask.view(-1)).sum() / mask.sum()
        return loss, {"lm loss": loss.detach()}

    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def train(tp, pp, directory, cp=1, steps=3, microbatches=2):
    """Trains, saves, loads into another model; (losses of the last stage, whole weights by name after it all)."""
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    try:
        model_parallel_cuda_manual_seed(123)
        facts = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
        config = TransformerConfig(
            **facts,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=tp,
            masked_softmax_fusion=True,
        )
        ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}

        def build(**ends):
            return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=S, **ends)

        model = DistributedDataParallel(config, DistributedDataParallelConfig(), build(**ends))
        optimizer, iterator, losses = torch.optim.SGD(model.parameters(), lr=0.5), batches(), []
        for _ in range(steps):
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterator,
                model=model,
                num_microbatches=microbatches,
                seq_length=S,
                micro_batch_size=ROWS,
                decoder_seq_length=S,
                forward_only=False,
            )
            finalize_model_grads([model])
            optimizer.step()
            losses.append([float(report["lm loss"]) for report in reports])
        dist_checkpointing.save(model.module.sharded_state_dict(prefix=""), str(directory))
        # its ends are where the rank stands
        other = build()
        other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(prefix=""), str(directory)))
        same = all(torch.equal(p, q) for p, q in zip(model.module.parameters(), other.parameters(), strict=True))
        assert same, "a loaded model is another"
        return losses, {
            name: p.detach() for name, p in other.named_parameters()
        } if ps.config.world_size == 1 else None
    finally:
        mpu.destroy_model_parallel()
