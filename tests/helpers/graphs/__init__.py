"""Graphs for passes: to build, draw at random, capture from a model, run, and print."""
