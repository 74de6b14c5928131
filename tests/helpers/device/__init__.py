"""An emulated device on the CPU, with memory, streams, events and asynchronous collectives."""
