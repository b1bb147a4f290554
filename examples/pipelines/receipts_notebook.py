# %% [markdown]
# # How did the roll-out go?
# Receipts of a fan-out request, read from the store with Spark. Open this file as a notebook (VS Code, Jupytext),
# or run it: `MOTORCADE_STORE=rocksdb://motorcade-data/store python examples/pipelines/receipts_notebook.py`

# %%
import os

import pyspark.sql.functions as F

from motorcade.pipelines import session
from motorcade.pipelines.receipts import COLUMNS, receipts

store = os.environ.get("MOTORCADE_STORE", "rocksdb://motorcade-data/store")
spark = session.start()

# %% [markdown]
# The stream `receipts` has one record per change of state. `receipts()` makes tables of it.

# %%
frame = spark.read.format("motorcade").options(store=store, stream="receipts").schema(COLUMNS).load()
tables = receipts(frame)

# %% [markdown]
# Deliveries by request and final state. `acked` is what the vehicle has acknowledged.

# %%
states = tables.deliveries.groupBy("request_id", "state").agg(F.count("*").alias("vehicles"))
states.orderBy("request_id", "state").show(truncate=False)

# %% [markdown]
# The funnel: how many of the accepted deliveries were sent and acknowledged.

# %%
tables.funnel.show(truncate=False)

# %% [markdown]
# Vehicles that still wait, the longest first.

# %%
tables.stragglers.show(20, truncate=False)

# %%
session.stop(spark)
