"""The way to Redis, for everything that uses it: the store, capture rules, dispatchers and workers.

resp     one connection that pipelines
slots    which server has which key
servers  all servers of a place: connections that come back, questions that are asked again
scripts  Lua files, known by their digest
place    what the URL says

All of it needs the library hiredis, which is an extra.
"""
