"""Passes over functional graphs, at the stage of Inductor's post-grad passes."""
