"""Checkpoints of other programs, for `import`: torch's DCP, Megatron's `torch_dist`, DeepSpeed's.

They are pickles, which could run any code. Here they are read as data, by nobody outside of this room but `import`.
"""
