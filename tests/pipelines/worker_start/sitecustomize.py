"""Python loads this when it starts, if its folder is in PYTHONPATH: what Spark's workers need, before they are forked.

Spark forks a worker for each look at a source and each write; importing the source takes each of them a second.
"""

import sys

if "pyspark.daemon" in sys.orig_argv:
    import motorcade.pipelines.sources.datasource  # noqa: F401 - for those that are forked
