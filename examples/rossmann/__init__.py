"""Rossmann Store Sales from end to end: prepare, train in parallel, predict, submission file."""
