"""From Dynamo's graph of a sharded model to two compiled graphs."""
