"""What a plugin may know of the broker: hook points, the plugin base class, and how plugins are loaded."""
