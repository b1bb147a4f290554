"""Control and monitor plane over HTTP: health, metrics, `/api/v1`. In a thread of its own, apart from the messages."""
