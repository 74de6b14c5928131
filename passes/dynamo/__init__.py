"""Passes over graphs as Dynamo has traced them, or compiled autograd captured them, before AOTAutograd."""
