"""Models to shard and train: reference models, random models, odd parameters, every optimizer."""
