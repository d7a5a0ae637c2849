"""Detects arithmetic that a program does by hand with weights and gradients of which other ranks hold the rest."""

from core.parallel_state.by_hand.functions import called_by_core, is_foreign, replaced_forward
from core.parallel_state.by_hand.heard import WHOLE_NORM, Heard
from core.parallel_state.by_hand.listening import ByHand
from core.parallel_state.by_hand.listening_classes import Reporter, listen_again, make_plain
from core.parallel_state.by_hand.rows_of_own import knows_context, watch_rows_of_own

__all__ = [
    "WHOLE_NORM",
    "ByHand",
    "Heard",
    "Reporter",
    "called_by_core",
    "is_foreign",
    "knows_context",
    "listen_again",
    "make_plain",
    "replaced_forward",
    "watch_rows_of_own",
]
