"""The flow plane: connections, sessions, subscriptions and routes of one node.

    listener -> connection -> channel -> session (window) <- pubsub <- router
                 bytes, I/O    rules      per client          delivery   matching

`channel`, `session`, `window`, `pubsub` and `router` never wait, never read a clock and never open anything.
"""
