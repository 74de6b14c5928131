"""What the tests share, in folders named for what they give: ranks, graphs, models, parity, and so on."""
