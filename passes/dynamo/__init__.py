"""Passes before AOTAutograd, over graphs from Dynamo or compiled autograd."""
