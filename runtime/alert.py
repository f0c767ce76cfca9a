"""Run log.alert_command when a run fails or diverges. Imported only by a run that has one and fails."""
import os
import signal
import subprocess

from config import ConfigError
from runtime.setup import redact
from runtime.sinks import split_alert_command

ALERT_SECONDS = 20.0  # limit of the program: the run has ended, but its job may wait for it


def run_alert(command: str, message: str) -> str | None:
    """Run the program with the message as its last argument. Return what went wrong, or None.

    A program that takes too long is killed with all that it has started.
    """
    try:
        program, *options = split_alert_command(command)
    except ConfigError as error:  # the program has been removed since the start
        return str(error)
    try:
        process = subprocess.Popen(
            [program, *options, redact(message)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"log.alert_command: {program}: {error.strerror}"
    with process:
        try:
            _, errors = process.communicate(timeout=ALERT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"log.alert_command: {program} did not end within {ALERT_SECONDS:g} s"
    if process.returncode == 0:
        return None
    reason = redact(errors.decode(errors="replace").strip().partition("\n")[0])
    ended = f"log.alert_command: {program} ended with code {process.returncode}"
    return f"{ended}: {reason}" if reason else ended
