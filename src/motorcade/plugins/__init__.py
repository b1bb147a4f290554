"""Features of the broker that are ordinary plugins: what they can do, a plugin of yours can do."""
