"""Public head: the order of the output vocabulary, which hides what the server answers.

Who      a server that holds the head [vocab, d] with permuted rows (and transformed features) and has the public head;
         with tied weights that is the embedding table.
Needs    the weights alone.
Wins     the plain id behind every output id: head rows are known vectors in another order. Without a public base it
         still links input and output alphabets when the model had tied weights: an input row is then an output row.
"""

from __future__ import annotations

import numpy as np

from cloister.permute.attacks.matching import Array, Matches, nearest, unit_rows
from cloister.permute.attacks.sorted_rows import match_sorted
from cloister.permute.attacks.weights import Alignment


def match_outputs(head_rows: Array, public_head: Array, alignment: Alignment | None = None) -> Matches:
    """The plain output id of each of these server head rows; without an alignment by sorted entries (permutation)."""
    if alignment is None:
        return match_sorted(head_rows, public_head)
    return alignment.match(head_rows, public_head)


def linked_to_outputs(rows: Array, head: Array) -> Matches:
    """Secret base: the server's own output row that has the direction of each input row.

    The linked ids mean something only where the distance (between unit rows) is far below the runner-up's.
    """
    return nearest(unit_rows(np.asarray(rows, dtype=np.float32)), head, unit_rows)
