"""The training engine: what happens between two batches. `run.py` tells the story, these files are its parts."""
