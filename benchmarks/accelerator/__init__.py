"""Everything that an accelerator has to prove, as one command."""
