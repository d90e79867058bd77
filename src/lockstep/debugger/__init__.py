"""Breakpoints on any rank: the launcher lends the terminal (lender), a rank takes it (terminal) and prompts (prompt)."""
