"""Helpers of the tests: raw MQTT over sockets, nodes as processes, clause marks."""
