"""Does the proof catch a bug? See lab/proof/mutate/command.py."""
