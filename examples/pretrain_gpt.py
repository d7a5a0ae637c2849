"""Pretrain a GPT on real text, over tensor, pipeline and data parallel ranks, on CPUs or accelerators.

    python examples/pretrain_gpt.py --help      # one process
    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --parallel.tensor 2 --parallel.pipeline 2
    torchrun --standalone --nproc-per-node 8 examples/pretrain_gpt.py --config run.toml --optimizer.lr 3e-4

Without data of your own it reads the interpreter's standard library.
"""

from core.pretrain import main

if __name__ == "__main__":
    main(description=__doc__)
