"""Run log.alert_command when a run fails or diverges. Imported only by a run that has one and fails."""
import subprocess

from runtime.setup import redact
from runtime.sinks import alert_words

ALERT_SECONDS = 20.0  # that the program may take; the run has ended, but its job may wait for it


def run_alert(command: str, message: str) -> str | None:
    """Run the program with the message as its last argument. Returns what went wrong, if anything."""
    words = [*alert_words(command), redact(message)]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=ALERT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"log.alert_command: {words[0]} did not end within {ALERT_SECONDS:g} s"
    except OSError as error:
        return f"log.alert_command: {words[0]}: {error.strerror}"
    if done.returncode:
        said = redact(done.stderr.decode(errors="replace").strip().partition("\n")[0])
        return f"log.alert_command: {words[0]} ended with code {done.returncode}{': ' * bool(said)}{said}"
    return None
