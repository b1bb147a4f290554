"""Durable logs of messages, with three faces: streams, queues and compacted queues.

streams     `$stream/{name}`: every message in order, read again from any offset, a committed offset per client
queues      `$queue/{name}`: each message goes to one of several consumers, until one has acknowledged it
compacted   `$ECQ`, `$SCQ`: the last value of each key, for one consumer or for many
"""
