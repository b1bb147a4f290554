"""Fan-out: one message to a list of vehicles, and the truth about each.

options    what can be set
tables     where everything is in the store, and the names of topics
batch      what the platform asks for, checked as a whole before anything is stored
record     what the fan-out writes down
"""

from motorcade.plugins.fanout.batch import BadBatchError, Batch
from motorcade.plugins.fanout.options import FanoutConfig

__all__ = ["BadBatchError", "Batch", "FanoutConfig"]
