"""Machines that start their ranks together and hear of each other's failures: rounds, over torch's stores."""
