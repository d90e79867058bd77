"""Programs as users of a library write them; tests/ecosystem/jobs.py starts them."""
