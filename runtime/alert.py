"""Run log.alert_command when a run fails or diverges. Imported only by a run that has one and fails."""
import os
import signal
import subprocess

from runtime.setup import redact
from runtime.sinks import alert_words

ALERT_SECONDS = 20.0  # that the program may take; the run has ended, but its job may wait for it


def run_alert(command: str, message: str) -> str | None:
    """Run the program with the message as its last argument. Returns what went wrong, if anything.

    One that takes too long is killed with all that it has started.
    """
    words = [*alert_words(command), redact(message)]
    try:
        program = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"log.alert_command: {words[0]}: {error.strerror}"
    with program:
        try:
            _, errors = program.communicate(timeout=ALERT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            return f"log.alert_command: {words[0]} did not end within {ALERT_SECONDS:g} s"
    if program.returncode:
        said = redact(errors.decode(errors="replace").strip().partition("\n")[0])
        return f"log.alert_command: {words[0]} ended with code {program.returncode}{': ' * bool(said)}{said}"
    return None
