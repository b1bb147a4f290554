"""Vehicles of a fleet table to encoded batches without Spark, as well as one process can.

    plain_audience.py FLEET OUT     prints seconds and vehicles as JSON

pyarrow reads and filters, a regular expression checks, a dictionary keeps each VIN once; the messages go into one
Parquet file.
"""

from __future__ import annotations

import json
import re
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

BATCH = 200


def main() -> None:
    fleet, out = sys.argv[1:]
    is_vin = re.compile(r"[A-HJ-NPR-Z0-9]{17}").fullmatch
    begun = time.perf_counter()
    chosen = ds.dataset(fleet).to_table(columns=["vin"], filter=pc.field("model") == "car")
    vins = [vin for vin in dict.fromkeys(chosen["vin"].to_pylist()) if is_vin(vin)]
    messages = []
    for number, first in enumerate(range(0, len(vins), BATCH)):
        ids = '","'.join(vins[first : first + BATCH])
        messages.append(
            f'{{"ids":["{ids}"],"request_id":"bench","data_id":"bench","batch_id":"bench-0-{number}"}}'.encode()
        )
    pq.write_table(pa.table({"message": pa.array(messages, pa.binary())}), out)
    print(json.dumps({"seconds": time.perf_counter() - begun, "vehicles": len(vins)}))


if __name__ == "__main__":
    main()
