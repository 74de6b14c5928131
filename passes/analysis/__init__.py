"""Analyses of graphs for passes; nothing here changes a graph."""
