"""What each rank is doing, kept in a page that can be read from outside, and what to make of it. Never loads torch."""
