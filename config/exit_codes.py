"""Exit codes of train.py. docs/training.md says what to do about each."""

FINISHED = 0
STOPPED_EARLY = 75  # the run is not at its horizon, and everything is saved
NON_FINITE = 77
INTERRUPTED = 130  # Ctrl-C, as a shell reports it

MEANINGS = {
    FINISHED: "finished",
    1: "an error, or a lost rank; the first line above that begins with 'error:' says which",
    2: "a mistake, named above",
    STOPPED_EARLY: "stopped early, everything is saved; the same command resumes",
    76: "a hang; what was waited for is named above",
    NON_FINITE: "loss or gradient stayed non-finite, or far above their recent range",
    79: "a file is damaged, and no good one is left",
    80: "replicas differ, or a device or a link is wrong",
    81: "out of memory",
    82: "the storage fails",
    INTERRUPTED: "interrupted; the same command resumes from the newest checkpoint",
}
