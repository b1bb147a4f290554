"""MQTT 3.1, 3.1.1 and 5 on the wire: bytes to packets and back. No I/O, no clock, no policy."""
