"""A fault campaign on real MPI ranks, as a program: python -m tests.campaigns.faults --count N --seed S."""
