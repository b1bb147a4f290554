"""What every storage engine must do: one file per port, run over all engines."""
