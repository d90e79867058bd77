"""Breakpoints on any rank: the launcher lends the terminal (lender), and a rank prompts there (terminal, prompt)."""
