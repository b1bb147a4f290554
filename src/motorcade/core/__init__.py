"""The vocabulary of Motorcade: values every other layer speaks about.

Nothing here waits, reads a clock or opens anything. Time is always an argument.
"""
