"""Models to shard and train: reference ones, random ones, odd parameters, every optimizer."""
