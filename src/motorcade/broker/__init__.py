"""The flow plane: connections, sessions, subscriptions and routes of one node.

    listener -> connection -> channel -> session <- pubsub <- router
                 bytes, I/O    rules      per client          delivery   matching

`channel`, `session`, `pubsub` and `router` never wait, never read a clock and never open anything.
"""
