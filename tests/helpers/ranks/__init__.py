"""Ranks to run a test on: processes, threads, a faked world, torchrun, two hosts; and a record of what a rank did."""
