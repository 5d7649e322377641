"""The suite `unify`: what a model of several owners is worth, what it costs, and what it gives away.

Every accuracy stands beside the same seed, data and budget without our method; every time beside a baseline of the
same run. The rows of texts, images and language keep what they have trained in CLOISTER_BENCH_CACHE, and go on there.
"""

from __future__ import annotations

from cloister.bench.suites import Suite
from cloister.bench.unify import contribution, disclosure, inference, language, pictures, selection, text_rows, vision

SUITE = Suite(
    "unify",
    (
        *selection.WORKLOADS,
        *inference.WORKLOADS,
        *text_rows.WORKLOADS,
        *vision.WORKLOADS,
        *language.WORKLOADS,
        *disclosure.WORKLOADS,
        *contribution.WORKLOADS,
    ),
    (pictures.draw,),
)
