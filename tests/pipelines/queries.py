"""Queries that are followed to their end, on a machine that may be busy."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from motorcade.pipelines import failures

#: How often a query is started whose Python process does not come up within Spark's ten seconds.
STARTS = 20

#: Seconds for a query.
PATIENCE = 300


def to_the_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Wait for the end of a query that ends. It goes on from its checkpoint if it is started again."""
    for left in reversed(range(STARTS)):
        query = start()
        try:
            assert query.awaitTermination(PATIENCE), "the query does not end"
            break
        except StreamingQueryException as error:
            if not left or not failures.is_of_haste(error):
                raise
        finally:
            query.stop()
    return query
