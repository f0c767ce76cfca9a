"""python -m scripts.verify"""
import sys

from runtime.failure import fail_cleanly
from scripts.verify import main

sys.exit(fail_cleanly(main, sys.argv[1:]))
