"""Settings of the tests that must be made before datasets is imported."""
import os
import tempfile

CACHE = tempfile.TemporaryDirectory()
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
os.environ["HF_DATASETS_CACHE"] = CACHE.name
