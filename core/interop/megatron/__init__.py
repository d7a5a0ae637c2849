"""`megatron.core` by its own module names: put `core.interop.megatron` in its place, and a script runs.

docs/from_megatron.md lists which names are the same, renamed or not here.
"""

from core.interop.megatron.absent import tell_of_absent_modules

tell_of_absent_modules()
