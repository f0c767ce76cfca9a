"""Runs at the start of every interpreter with this folder on its path: if BEVATRON_TRACE is set, records the
functions that it runs.
"""

import os

if "BEVATRON_TRACE" in os.environ:
    import mutate_trace

    mutate_trace.start(os.environ["BEVATRON_TRACE"])
