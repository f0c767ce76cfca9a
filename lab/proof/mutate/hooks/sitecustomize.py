"""Every interpreter that has this folder on its path starts here: with BEVATRON_TRACE set it records the
functions that it runs.
"""

import os

if "BEVATRON_TRACE" in os.environ:
    import mutate_trace

    mutate_trace.start(os.environ["BEVATRON_TRACE"])
